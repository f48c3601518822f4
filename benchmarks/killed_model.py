"""A MODEL for ``dapple train`` whose runs can be compared bit by bit: float64, Adam, shuffled batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple


def chain() -> dapple.Workload:
    """Return five dense layers, and endless epochs of shuffled batches."""
    keras.utils.set_random_seed(1)
    numbers = np.random.default_rng(2)
    weights = [tf.Variable(numbers.normal(size=(96, 96)) / 10, name=f"w{i}") for i in range(5)]
    data = tf.data.Dataset.from_tensor_slices((numbers.normal(size=(48, 96)), numbers.normal(size=(48, 96))))

    def loss(x: Any, y: Any) -> Any:
        for i, weight in enumerate(weights):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ weight)
        return tf.reduce_mean(tf.square(x - y))

    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
    return dapple.Workload(loss, optimizer, data.shuffle(48, seed=3).batch(16, drop_remainder=True))
