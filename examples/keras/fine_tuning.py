"""Fine-tune a trained model: freeze its layers, train a new head, then all layers at a lower rate. Over two stages.

Run it with ``python examples/keras/fine_tuning.py``, or as a job of two processes with ``mpirun -np 2 python
examples/keras/fine_tuning.py``. With the argument ``plain`` it trains without the pipeline; the history is the same.
"""

from __future__ import annotations

import sys

import keras
import numpy as np

import dapple_tf as dapple


def make_waves(samples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return noisy waves, the frequency of each, and whether that is high."""
    random = np.random.default_rng(0)
    frequencies = random.uniform(1, 6, (samples, 1))
    times = np.linspace(0, 2 * np.pi, 32)
    waves = np.sin(frequencies * times) + random.normal(0, 0.1, (samples, 32))
    return waves[..., None].astype("float32"), frequencies.astype("float32"), (frequencies > 3).astype("float32")


def train(*, pipelined: bool = True) -> dict[str, list[float]]:
    """Train the base, then the head for three epochs, then everything for two; return the history of the last two."""
    keras.utils.set_random_seed(0)
    waves, frequencies, high = make_waves(192)
    base = keras.Sequential(
        [
            keras.Input([32, 1]),
            keras.layers.Conv1D(8, 5, activation="relu", name="conv_0"),
            keras.layers.Conv1D(8, 5, strides=2, activation="relu", name="conv_1"),
            keras.layers.GlobalMaxPooling1D(),
        ],
        name="base",
    )
    first = keras.Sequential([base, keras.layers.Dense(1, name="frequency")])
    first.compile(keras.optimizers.Adam(0.01), "mse")
    first.fit(waves, frequencies, batch_size=32, epochs=2, verbose=0)

    base.trainable = False
    model = keras.Sequential([base, keras.layers.Dense(8, "relu", name="hidden"), keras.layers.Dense(1, name="high")])
    history: dict[str, list[float]] = {}
    for epochs, rate in ((3, 0.01), (2, 0.001)):
        model.compile(
            keras.optimizers.SGD(rate, momentum=0.9),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
        )
        if pipelined:
            dapple.keras.pipeline(model, stages=["hidden"], micro_batches=4)  # after each call of compile

        found = model.fit(waves, high, batch_size=32, epochs=epochs, validation_split=0.25, verbose=2).history
        history = {name: history.get(name, []) + values for name, values in found.items()}
        base.trainable = True
    return history


if __name__ == "__main__":
    dapple.init()
    train(pipelined="plain" not in sys.argv[1:])
