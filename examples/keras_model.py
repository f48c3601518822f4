"""Train a Keras model over two stages, then use it as any Keras model: predict, save, load.

Run it with ``python examples/keras_model.py``.

It prints the plan (which layers are in which stage), the loss and the accuracy of every 20th step, the accuracy of
``model.predict`` on the training data, and that the saved model predicts the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple


def main() -> None:
    """Learn which of four quadrants a point is in."""
    dapple.init()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([2]),
            keras.layers.Dense(32, "relu", name="first"),
            keras.layers.Dense(32, "relu", name="second"),
            keras.layers.Dense(4, name="scores"),
        ]
    )

    def loss_fn(points: tf.Tensor, quadrants: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        scores = model(points, training=True)
        losses = keras.losses.sparse_categorical_crossentropy(quadrants, scores, from_logits=True)
        correct = keras.metrics.sparse_categorical_accuracy(quadrants, scores)
        return tf.reduce_mean(losses), {"accuracy": tf.reduce_mean(correct)}  # the second item is aux

    points = np.random.default_rng(0).normal(size=(512, 2)).astype("float32")
    quadrants = (2 * (points[:, 0] > 0) + (points[:, 1] > 0)).astype("int32")

    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.Adam(0.01), stages=["second"], micro_batches=4)
    for number in range(61):
        loss, aux = step(points, quadrants)
        if number == 0:
            for i, stage in enumerate(step.plan.stages):
                print(f"stage {i}: {', '.join(step.layer_names[stage.first_layer : stage.last_layer + 1])}")
        if number % 20 == 0:
            print(f"step {number}: loss {float(loss):.4f}, accuracy {float(aux['accuracy']):.2f}")

    # The variables are the user's own: the model that was trained is `model` itself.
    predicted = model.predict(points, verbose=0)
    print(f"accuracy of model.predict: {np.mean(predicted.argmax(1) == quadrants):.2f}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quadrants.keras"
        model.save(path)
        same = np.array_equal(keras.models.load_model(path).predict(points, verbose=0), predicted)
    print(f"the saved model predicts the same: {same}")


if __name__ == "__main__":
    main()
