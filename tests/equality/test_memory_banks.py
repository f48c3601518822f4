"""Variables that keep rows of the batch, written once a step before the loss reads them."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tests.equality.one_device import Problem, compare
from tests.equality.small_models import data, sgd, weights

PLACES = 20


def ring() -> Problem:
    """Return two layers, and a ring of the last inputs, with a pointer that only the ring's write reads."""
    first, second = weights(2)
    kept = tf.Variable(tf.ones([PLACES, first.shape[0]], tf.float64), trainable=False, name="kept")
    pointer = tf.Variable(0, trainable=False, name="pointer")

    def loss_fn(x: Any, y: Any) -> Any:
        samples = tf.shape(x)[0]
        kept.scatter_nd_update(((pointer + tf.range(samples)) % PLACES)[:, tf.newaxis], x)
        pointer.assign((pointer + samples) % PLACES)
        old = tf.gather(kept, tf.cast(100 * tf.abs(y[:, 0]), tf.int32) % PLACES)
        with tf.name_scope("first"):
            h = tf.tanh((x + old) @ first)
        with tf.name_scope("second"):
            return tf.reduce_mean(tf.reduce_sum(tf.square(h @ second - y), 1))

    return Problem(loss_fn, {"w0": first, "w1": second, "kept": kept, "pointer": pointer}, sgd)


@pytest.mark.parametrize(
    "options", [{"micro_batches": 1}, {"micro_batches": 3}, {"micro_batches": 2, "replicas": [2, 1]}]
)
def test_the_stage_that_reads_a_ring_moves_its_pointer(options: dict[str, Any]) -> None:
    compare(ring(), [data(6), data(7), data(6)], stages=["second"], **options).check(1e-12)
