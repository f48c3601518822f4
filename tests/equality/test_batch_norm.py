"""Batch norm in training mode: every micro-batch is normalised as plain Keras, called with it, normalises it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.equality.one_device import TOLERANCE, Problem, compare

LAYERS = keras.layers
WIDTH, STEPS = 6, 5


def regression(*layers: keras.Layer, shape: Sequence[int] = (WIDTH,)) -> Problem:
    """A model of float64 layers, trained by the mean of squared differences."""
    model = keras.Sequential([keras.Input(tuple(shape), dtype="float64"), *layers])

    @tf.function
    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((y - model(x, training=True)) ** 2)

    return Problem.of_model(model, loss_fn, lambda: keras.optimizers.SGD(0.1, momentum=0.9))


def dense(name: str) -> keras.Layer:
    seeded = keras.initializers.GlorotUniform(3)
    return LAYERS.Dense(WIDTH, "tanh", kernel_initializer=seeded, name=name, dtype="float64")


def padded(count: int, sizes: Sequence[int]) -> list[tuple[Any, Any]]:
    """Batches of sequences of very unequal lengths, the shortest first; what is behind their ends is zero."""
    rng = np.random.default_rng(count)
    found = []
    for size in sizes:
        x = rng.normal(size=(size, STEPS, WIDTH))
        for i in range(size):
            x[i, 1 + STEPS * i // size :] = 0
        found.append((tf.constant(x), tf.constant(rng.normal(size=(size, STEPS, WIDTH)))))
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "dapple-a", "zb-h1"])
def test_a_masked_batch_norm_counts_the_mask_of_its_micro_batch(schedule: str) -> None:
    """The count of the mask depends on no variable, but that of the whole batch would give a wrong mean."""
    problem = regression(
        LAYERS.Masking(dtype="float64"),
        dense("first"),
        LAYERS.BatchNormalization(momentum=0.5, name="norm", dtype="float64"),
        dense("second"),
        shape=(STEPS, WIDTH),
    )
    batches = padded(2, (7, 9))
    comparison = compare(problem, batches, in_turn=3, stages=["second"], micro_batches=3, schedule=schedule)
    comparison.check(TOLERANCE["float64"])
    assert comparison.step.exactness.reasons
