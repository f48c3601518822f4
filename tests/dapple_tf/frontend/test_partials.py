"""The analysis finds the reductions over samples that ranks can compute from parts of the batch and then combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.frontend.trace import trace_loss

N = 6


def partials(statistic: Callable[[Any], Any]) -> list[str]:
    """Return the operations that combine the statistics of a mask, by one of which a loss is divided."""
    w = tf.Variable(tf.ones([3], tf.float64))

    def loss_fn(x: Any, mask: Any) -> Any:
        return tf.reduce_sum(tf.linalg.matvec(x, w) * mask) / statistic(mask)

    batch = tf.ones([N, 3], tf.float64), tf.ones([N], tf.float64)
    return sorted(trace_loss(loss_fn, batch, N).dependence.partials.values())


def size(mask: Any) -> Any:
    return tf.cast(tf.shape(mask)[0], mask.dtype)


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        (tf.reduce_sum, ["sum"]),
        (lambda mask: tf.reduce_max(mask) - tf.reduce_min(mask) + 1, ["max", "min"]),
        (lambda mask: tf.reduce_prod(mask), ["product"]),
        (lambda mask: 1 + tf.cast(tf.reduce_all(mask > 0) & tf.reduce_any(mask > 1), mask.dtype), ["all", "any"]),
        (lambda mask: tf.reduce_sum(mask * mask) + tf.reduce_sum(mask), ["sum", "sum"]),
        (lambda mask: tf.reduce_sum((mask - tf.reduce_sum(mask)) ** 2), ["sum"]),  # not the outer one
        (lambda mask: tf.reduce_sum(mask + 1 / size(mask)), []),
        (lambda mask: tf.reduce_logsumexp(mask[:, tf.newaxis]), ["max"]),  # not the sum, which takes the largest value
        (lambda mask: tf.sort(mask)[-1], []),
    ],
    ids=["sum", "range", "product", "booleans", "two", "nested", "size", "logsumexp", "sorted"],
)
def test_reductions_of_what_each_sample_has_by_itself_combine(
    statistic: Callable[[Any], Any], expected: list[str]
) -> None:
    assert partials(statistic) == expected
