"""Compiling a step: what is traced and built once, and what a compiled step needs to stay alive."""

from __future__ import annotations

import gc

import keras
import tensorflow as tf

from tests.dapple_tf.builders import X, chain, step_of


def test_branches_of_the_model_and_the_optimizer_are_still_defined_when_the_traces_are_garbage() -> None:
    """TensorFlow removes the functions nested in a trace once no one refers to the trace."""
    _, dense_loss = chain()

    def loss(x: tf.Tensor) -> tf.Tensor:
        value = dense_loss(x)
        return tf.cond(value > 100.0, lambda: value * 2.0, lambda: value)

    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)  # a tf.cond in its update
    step = step_of(loss, stages=1, micro_batches=1, optimizer=optimizer, example_batch=(X,))
    gc.collect()
    expected = float(loss(tf.constant(X)))
    assert float(step(X)) == expected
