"""A small model with every kind of variable that a rank may hold alone: weights, tied weights, slots, integer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

X = tf.constant(np.random.default_rng(0).normal(size=(8, 4)))


def make_model() -> tuple[Any, Any, Mapping[str, tf.Variable]]:
    """Return a loss function, its optimizer, and the model's variables by name.

    Layers 0 and 3 share the weights w0. Each counts its calls, one per micro-batch, in a variable of its own.
    """
    random = np.random.default_rng(1)
    made = {f"w{i}": tf.Variable(random.normal(size=(4, 4)) / 2, name=f"w{i}") for i in range(3)}
    for i in (0, 3):
        made[f"calls{i}"] = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"calls{i}")

    def loss(x: Any) -> Any:
        for i, name in enumerate(("w0", "w1", "w2", "w0")):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ made[name])
                if i in (0, 3):
                    x *= tf.cast(1 + 0 * made[f"calls{i}"].assign_add(1), x.dtype)
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - 0.5), 1))

    return loss, keras.optimizers.Adam(0.01), made
