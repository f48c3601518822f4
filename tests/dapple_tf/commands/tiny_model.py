"""Models for the command line: two dense layers on random numbers, with options that make it fail in many ways."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple


def tiny(
    width: int = 4,
    batch_size: int = 8,
    seed: int = 1,
    noisy: bool = False,
    empty: bool = False,
    infinite: bool = False,
    fails: bool = False,
    interrupted: int = 0,
) -> dapple.Workload:
    """Return two dense layers on four batches of random numbers.

    ``noisy``: the loss draws numbers that no other run draws. ``empty``: there are no batches. ``infinite``: the third
    batch is infinite. ``fails``: the loss cannot be computed. ``interrupted``: how often Ctrl-C is
    pressed after four batches.
    """
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(width, "tanh", name="one"), keras.layers.Dense(1, name="two")]
    model = keras.Sequential([keras.Input((3,)), *layers], name="net")
    numbers = np.random.RandomState(seed)
    data = [(numbers.randn(batch_size, 3).astype("float32"), numbers.rand(batch_size, 1) > 0.4) for _ in range(4)]
    if infinite:
        data[2] = (data[2][0] * np.inf, data[2][1])

    def interrupt() -> Iterator[Any]:
        yield from data
        for _ in range(interrupted):
            os.kill(os.getpid(), signal.SIGINT)
        yield from data

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        if fails:
            tf.debugging.assert_less(tf.reduce_max(x), -1e9, "positive")
        if noisy:
            x += tf.raw_ops.RandomStandardNormal(shape=tf.shape(x), dtype=x.dtype)
        return tf.reduce_mean(tf.square(model(x) - 1) * tf.cast(y, tf.float32))

    return dapple.Workload(loss, keras.optimizers.Adam(0.01), [] if empty else interrupt() if interrupted else data)


def without_options() -> dapple.Workload:
    """Return the model; this callable takes no batch_size and no seed."""
    return tiny()


def broken() -> dapple.Workload:
    """Raise the error of a model that cannot be made."""
    raise ValueError("the user's own mistake")
