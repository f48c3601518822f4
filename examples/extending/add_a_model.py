"""Add a model to the command line: a function that returns a ``dapple.Workload``.

Run it with ``dapple train examples/extending/add_a_model.py:mlp --stages 2 --micro-batches 4 --steps 100``. Options of
the function are set with ``--set width=128``; ``--batch-size`` and ``--seed`` set the options of these names.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple


def mlp(
    *, layers: int = 6, width: int = 64, batch_size: int = 32, learning_rate: float = 0.01, seed: int = 0
) -> dapple.Workload:
    """Give a stack of dense layers random points and a function of them to learn."""
    keras.utils.set_random_seed(seed)  # the same weights on every rank of a job
    stack = [keras.layers.Dense(width, "tanh", name=f"dense_{i}") for i in range(layers)]
    model = keras.Sequential([keras.Input([2]), *stack, keras.layers.Dense(1, name="output")], name="mlp")

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

    points = np.random.default_rng(seed).normal(size=(64 * batch_size, 2)).astype("float32")
    values = np.sin(points[:, :1]) * points[:, 1:]
    return dapple.Workload(
        loss_fn=loss_fn,
        optimizer=keras.optimizers.Adam(learning_rate),
        dataset=tf.data.Dataset.from_tensor_slices((points, values)).batch(batch_size, drop_remainder=True),
    )
