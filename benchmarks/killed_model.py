"""A MODEL for ``dapple train`` whose runs can be compared bit by bit: float64, Adam, shuffled batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple


def chain() -> dapple.Workload:
    """Return five dense layers, and endless epochs of shuffled batches."""
    return _chain(width=96, batch_size=16, repeats=1)


def heavy() -> dapple.Workload:
    """Return a chain whose layers compute long enough for more ranks to be worth a new start."""
    return _chain(width=256, batch_size=256, repeats=8)


def _chain(width: int, batch_size: int, repeats: int) -> dapple.Workload:
    """Return five layers of ``repeats`` products with a weight of its own, and shuffled batches."""
    keras.utils.set_random_seed(1)
    numbers = np.random.default_rng(2)
    size = (width, width)
    weights = [tf.Variable(numbers.normal(size=size) / np.sqrt(width), name=f"w{i}") for i in range(5)]
    rows = (3 * batch_size, width)
    data = tf.data.Dataset.from_tensor_slices((numbers.normal(size=rows), numbers.normal(size=rows)))

    def loss(x: Any, y: Any) -> Any:
        for i, weight in enumerate(weights):
            with tf.name_scope(f"layer{i}"):
                for _ in range(repeats):
                    x = tf.tanh(x @ weight)
        return tf.reduce_mean(tf.square(x - y))

    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
    batches = data.shuffle(3 * batch_size, seed=3).batch(batch_size, drop_remainder=True)
    return dapple.Workload(loss, optimizer, batches)
