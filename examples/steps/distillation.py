"""A student learns from a teacher, whose forward is outside of the tape: the ``train_step`` of a Keras model.

Run it with ``python examples/steps/distillation.py``.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


class Distiller(keras.Model):
    """Trains ``student`` on the labels, and on what ``teacher`` predicts."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher

    def train_step(self, data: Any) -> Any:
        """Train on one batch."""
        x, y = data
        wanted = tf.nn.softmax(self.teacher(x, training=False) / 3)
        with tf.GradientTape() as tape:
            predictions = self.student(x, training=True)
            student_loss = self.compute_loss(y=y, y_pred=predictions)
            distillation_loss = tf.reduce_mean(keras.losses.kl_divergence(wanted, tf.nn.softmax(predictions / 3)))
            loss = 0.1 * student_loss + 0.9 * 3**2 * distillation_loss
        gradients = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.student.trainable_variables))
        return {"loss": loss, "distillation_loss": distillation_loss}


def make() -> tuple[Any, list[Any]]:
    """Return the training step, and the objects whose variables it changes."""
    keras.utils.set_random_seed(1)

    def network(width: int) -> Any:
        layers = [keras.layers.Dense(width, "tanh"), keras.layers.Dense(width, "tanh"), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input([4]), *layers])

    model = Distiller(network(5), network(8))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def train_step(x: Any, y: Any) -> Any:
        return model.train_step((x, y))

    return train_step, [model.student, model.teacher, model.optimizer]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(samples, 4)), rng.integers(0, 3, samples)) for _ in range(steps)]


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
