"""A Keras model that two steps of different plans and optimizers train, and a model with large weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

X = tf.constant(np.random.default_rng(0).normal(size=(8, 4)))
LARGE = 3072  # rows and columns of a large matrix
LARGE_BYTES = 4 * LARGE**2


def make_dense() -> keras.Model:
    """Return a model of four dense layers, with initial values that each process draws itself."""
    dense = [keras.layers.Dense(4, "tanh", dtype="float64", name=f"dense_{i}") for i in range(4)]
    return keras.Sequential([keras.Input((4,), dtype="float64"), *dense])


def loss_of(model: keras.Model) -> Callable[[Any], Any]:
    """Return a loss function of the model."""
    return lambda x: tf.reduce_mean(tf.reduce_sum(tf.square(model(x, training=True) - 0.5), 1))


def optimizers() -> tuple[Any, Any]:
    """Return an optimizer for each of the two steps."""
    return keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)


def make_large() -> tuple[Callable[[Any], Any], Any]:
    """Return a loss function of six large matrices, all of whose memory is written, and an optimizer with two slots."""
    random = np.random.default_rng(1)
    rows = random.normal(size=(LARGE, 1)).astype(np.float32) / LARGE
    weights = [tf.Variable(np.repeat(rows, LARGE, 1), name=f"w{i}") for i in range(6)]

    def loss(x: Any) -> Any:
        for i, weight in enumerate(weights):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ weight)
        return tf.reduce_mean(tf.square(x - 0.5))

    return loss, keras.optimizers.Adam(0.01)
