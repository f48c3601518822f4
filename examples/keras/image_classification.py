"""Classify images with a small convolutional network: ``compile`` and ``fit``, over two stages.

Run it with ``python examples/keras/image_classification.py``, or as a job of two processes with ``mpirun -np 2 python
examples/keras/image_classification.py``. With the argument ``plain`` it trains without the pipeline; the history is the
same.
"""

from __future__ import annotations

import sys

import keras
import numpy as np

import dapple_tf as dapple


def make_images(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy images with a bright square in one of four corners, and the corner's number."""
    random = np.random.default_rng(0)
    corners = random.integers(0, 4, samples)
    images = random.normal(0, 0.5, (samples, 16, 16, 1)).astype("float32")
    for image, corner in zip(images, corners, strict=True):
        row, column = 9 * (corner // 2), 9 * (corner % 2)
        image[row + 1 : row + 6, column + 1 : column + 6] += 1
    return images, corners


def train(*, pipelined: bool = True) -> dict[str, list[float]]:
    """Train three epochs, and return the history."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([16, 16, 1]),
            keras.layers.RandomTranslation(0.05, 0.05),
            keras.layers.Conv2D(8, 3, activation="relu", name="first"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(16, 3, activation="relu", name="second"),
            keras.layers.GroupNormalization(4),  # batch norm would normalise each micro-batch
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(4, name="corners"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.003),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    if pipelined:
        dapple.keras.pipeline(model, stages=["second"], micro_batches=4)

    images, corners = make_images(320)
    stop = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    slow_down = keras.callbacks.ReduceLROnPlateau(patience=1)
    history = model.fit(
        images, corners, batch_size=64, epochs=3, validation_split=0.2, callbacks=[stop, slow_down], verbose=2
    )
    return history.history


if __name__ == "__main__":
    dapple.init()
    train(pipelined="plain" not in sys.argv[1:])
