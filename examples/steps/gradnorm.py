"""Two losses of one forward, whose weights are learned from the norms of their gradients, as in GradNorm.

Run it with ``python examples/steps/gradnorm.py``.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


def make() -> tuple[Any, list[Any]]:
    """Return the training step, and the objects whose variables it changes."""
    keras.utils.set_random_seed(1)
    body = keras.Sequential([keras.Input([4]), keras.layers.Dense(6, "tanh"), keras.layers.Dense(5, "tanh")])
    heads = [keras.Sequential([keras.Input([5]), keras.layers.Dense(width)]) for width in (1, 2)]
    optimizer = keras.optimizers.Adam(0.01)
    weights, first_losses = (tf.Variable([1.0, 1.0], dtype="float64", trainable=False) for _ in range(2))
    count = tf.Variable(0)

    @tf.function
    def train_step(x: Any, y: Any, z: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            hidden = body(x, training=True)
            losses = [tf.reduce_mean(tf.square(t - head(hidden, training=True))) for t, head in zip((y, z), heads)]
        shared = body.trainable_variables
        gradients = [tape.gradient(loss, [*shared, *head.trainable_variables]) for loss, head in zip(losses, heads)]
        first_losses.assign(tf.where(count == 0, tf.stack(losses), first_losses))
        count.assign_add(1)

        norms = tf.stack([tf.norm(of_loss[len(shared) - 2]) for of_loss in gradients])  # of the last shared kernel
        rates = tf.stack(losses) / first_losses
        wanted = tf.reduce_mean(weights * norms) * tf.sqrt(rates / tf.reduce_mean(rates))
        changed = weights - 0.05 * tf.sign(weights * norms - wanted) * norms
        weights.assign(2 * changed / tf.reduce_sum(changed))

        scaled = [[weights[i] * gradient for gradient in of_loss] for i, of_loss in enumerate(gradients)]
        of_body = [g + h for g, h in zip(scaled[0][: len(shared)], scaled[1][: len(shared)])]
        of_heads = [gradient for of_loss in scaled for gradient in of_loss[len(shared) :]]
        variables = [*shared, *(variable for head in heads for variable in head.trainable_variables)]
        optimizer.apply_gradients(zip([*of_body, *of_heads], variables))
        return losses, norms

    return train_step, [body, *heads, optimizer, weights, first_losses, count]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps."""
    rng = np.random.default_rng(0)
    return [tuple(rng.normal(size=(samples, width)) for width in (4, 1, 2)) for _ in range(steps)]


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
