"""Wrap a plain TensorFlow loss function, without Keras layers, into a pipeline of two stages.

Run it with ``python examples/wrap_a_function.py``.

It prints the report of ``dapple.verify``, which compares one pipelined step with one step on one device (loss,
gradients and updated variables), then the loss of every 50th training step. The names of layers are the name scopes of
the function: ``stages=["output"]`` starts stage 1 at the scope ``output``.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple


def main() -> None:
    """Fit a small network to a sine."""
    dapple.init()  # without GPUs: eight logical CPU devices
    random = tf.random.Generator.from_seed(0)
    first = tf.Variable(random.normal([1, 64]), name="first")
    second = tf.Variable(random.normal([64, 1]) / 8.0, name="second")

    @tf.function
    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("hidden"):
            h = tf.tanh(x @ first)
        with tf.name_scope("output"):
            return tf.reduce_mean((h @ second - y) ** 2)

    x = np.linspace(-3, 3, 256, dtype="float32")[:, None]
    y = np.sin(x)
    optimizer = keras.optimizers.Adam(0.02)
    print(dapple.verify(loss_fn, optimizer=optimizer, batch=(x, y), stages=["output"], micro_batches=4))

    step = dapple.pipeline(loss_fn, optimizer=optimizer, stages=["output"], micro_batches=4)
    for number in range(201):
        loss = step(x, y)
        if number % 50 == 0:
            print(f"step {number}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
