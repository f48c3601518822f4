"""Sharpness-aware minimization, by the ``train_step`` of a Keras model: two gradients a step, at two points.

Run it with ``python examples/steps/sam.py``.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


class SAMModel(keras.Model):
    """Trains ``network`` by the gradients where its loss is largest nearby."""

    def __init__(self, network: Any, rho: float = 0.05) -> None:
        super().__init__()
        self.network = network
        self.rho = rho

    def train_step(self, data: Any) -> Any:
        """Train on one batch."""
        x, y = data
        variables = self.network.trainable_variables
        with tf.GradientTape() as tape:
            predictions = self.network(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predictions)
        gradients = tape.gradient(loss, variables)

        norm = tf.norm([tf.norm(gradient) for gradient in gradients])
        scale = self.rho / (norm + 1e-12)
        steps = [gradient * scale for gradient in gradients]
        for variable, step in zip(variables, steps):
            variable.assign_add(step)

        with tf.GradientTape() as tape:
            there = self.compute_loss(y=y, y_pred=self.network(x, training=True))
        gradients = tape.gradient(there, variables)
        for variable, step in zip(variables, steps):
            variable.assign_sub(step)
        self.optimizer.apply_gradients(zip(gradients, variables))

        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predictions)
        return {metric.name: metric.result() for metric in self.metrics}


def make() -> tuple[Any, list[Any]]:
    """Return the training step, and the objects whose variables it changes."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
    model = SAMModel(keras.Sequential([keras.Input([4]), *layers]))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)

    def train_step(x: Any, y: Any) -> Any:
        return model.train_step((x, y))

    return train_step, [model.network, model.optimizer, *model.metrics]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(samples, 4)), rng.integers(0, 3, samples)) for _ in range(steps)]


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
