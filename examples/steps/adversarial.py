"""Adversarial training by the fast gradient sign method: a gradient of the inputs, then the loss on changed inputs.

Run it with ``python examples/steps/adversarial.py``.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


def make() -> tuple[Any, list[Any]]:
    """Return the training step, and the objects whose variables it changes."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input([4]), *layers])
    optimizer = keras.optimizers.Adam(0.01)

    def loss_object(labels: Any, logits: Any) -> Any:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))

    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_object(y, model(x, training=True))
        perturbed = x + 0.1 * tf.sign(tape.gradient(loss, x))

        with tf.GradientTape() as tape:
            predictions = model(perturbed, training=True)
            adversarial_loss = loss_object(y, model(x, training=True)) + loss_object(y, predictions)
        gradients = tape.gradient(adversarial_loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(y, predictions)
        return adversarial_loss, accuracy.result()

    return train_step, [model, optimizer, accuracy]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(samples, 4)), rng.integers(0, 3, samples)) for _ in range(steps)]


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
