"""Two losses of one forward, whose gradients are combined by hand: PCGrad removes what works against the other.

Run it with ``python examples/steps/pcgrad.py``.
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

    def without_conflict(gradients: Any, others: Any) -> Any:
        product = tf.add_n([tf.reduce_sum(g * h) for g, h in zip(gradients, others)])
        square = tf.add_n([tf.reduce_sum(h * h) for h in others])
        share = tf.minimum(product / square, tf.zeros_like(square))
        return [g - share * h for g, h in zip(gradients, others)]

    @tf.function
    def train_step(x: Any, y: Any, z: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            hidden = body(x, training=True)
            first = tf.reduce_mean(tf.square(y - heads[0](hidden, training=True)))
            second = tf.reduce_mean(tf.abs(z - heads[1](hidden, training=True)))
        shared, variables = body.trainable_variables, [head.trainable_variables for head in heads]
        one, of_first_head = tape.gradient(first, (shared, variables[0]))
        other, of_second_head = tape.gradient(second, (shared, variables[1]))
        combined = [g + h for g, h in zip(without_conflict(one, other), without_conflict(other, one))]
        gradients = [*combined, *of_first_head, *of_second_head]
        optimizer.apply_gradients(zip(gradients, [*shared, *variables[0], *variables[1]]))
        return first, second

    return train_step, [body, *heads, optimizer]


def batches(steps: int = 3, samples: int = 12) -> list[tuple[Any, ...]]:
    """Return the batches of ``steps`` steps."""
    rng = np.random.default_rng(0)
    return [tuple(rng.normal(size=(samples, width)) for width in (4, 1, 2)) for _ in range(steps)]


if __name__ == "__main__":
    from beside_one_device import compare

    compare(make, batches())
