"""A chain of dense layers of plain variables, for tests that need a small model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

WIDTH = 4


def weights(layers: int) -> list[tf.Variable]:
    """Return ``layers`` matrices, called w0, w1 ..."""
    random = np.random.default_rng(0)
    return [tf.Variable(random.normal(size=(WIDTH, WIDTH)) * 0.5, name=f"w{i}") for i in range(layers)]


def chain(matrices: Sequence[tf.Variable]) -> Callable[..., Any]:
    """Return a loss of x and y; layer i is called ``layer<i>``."""

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ matrix)
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    return loss_fn


def data(size: int, seed: int = 1) -> tuple[Any, Any]:
    """Return inputs x and targets y."""
    random = np.random.default_rng(seed)
    return tf.constant(random.normal(size=(size, WIDTH))), tf.constant(random.normal(size=(size, WIDTH)))


def values(variables: Sequence[tf.Variable]) -> list[Any]:
    """Return a copy of every variable's value."""
    return [np.array(variable.numpy()) for variable in variables]


def sgd() -> Any:
    """Return a new optimizer."""
    return keras.optimizers.SGD(0.1)
