"""A trace with unknown lengths serves a batch only where the analysis decides alike at its lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.frontend.trace import trace_loss

Loss = Callable[[Any, Any, Any], Any]


def trace(loss_fn: Loss, x: Sequence[int], y: Sequence[int]) -> Any:
    """Return the trace of a loss of a variable and two batches of matrices, for these inner lengths, all unknown."""
    w = tf.Variable(2.0, dtype=tf.float64)
    batch = tuple(tf.zeros([4, *lengths], tf.float64) for lengths in (x, y))
    signature = [tf.TensorSpec([None] * (1 + len(lengths)), tf.float64) for lengths in (x, y)]
    return trace_loss(lambda a, b: loss_fn(w, a, b), batch, 4, signature=signature)


def served(captured: Any, *batches: tuple[Sequence[int], Sequence[int]]) -> list[bool]:
    return [captured.serves(tuple(tf.TensorSpec([None, *lengths], tf.float64) for lengths in b)) for b in batches]


def summed(w: Any, *batch: Any) -> Any:
    return tf.add_n([tf.reduce_sum(w * tensor) for tensor in batch])


def test_known_lengths_need_no_analysis() -> None:
    w = tf.Variable(2.0)
    assert trace_loss(lambda x: tf.reduce_mean(w * x), (tf.zeros([4, 3]),), 4).serves is None


def test_a_mean_serves_all_lengths() -> None:
    captured = trace(lambda w, x, y: tf.reduce_mean(w * x) + tf.reduce_mean(w * y), [3], [3])
    assert served(captured, ([3], [3]), ([9], [2]), ([1], [1])) == [True] * 3


@pytest.mark.parametrize(
    "count",
    [
        lambda x, y: tf.size(x) + 1,
        lambda x, y: tf.size(x) + 3 * tf.size(y) + 5,
        lambda x, y: tf.shape(x)[1] * tf.shape(x)[0] + tf.shape(y)[1],
    ],
    ids=["of one length", "of two lengths", "a length without the batch size"],
)
def test_sizes_that_are_affine_in_lengths_serve_all(count: Callable[[Any, Any], Any]) -> None:
    """The lengths are equal at first, which says nothing about other batches."""
    captured = trace(lambda w, x, y: summed(w, x, y) / tf.cast(count(x, y), tf.float64), [3], [3])
    assert served(captured, ([3], [3]), ([9], [2]), ([1], [8])) == [True] * 3


def test_a_product_of_lengths_serves_its_own_and_those_where_one_stays() -> None:
    captured = trace(lambda w, x, y: summed(w, x) / tf.cast(tf.size(x) + 1, tf.float64), [3, 5], [3])
    assert served(captured, ([3, 5], [3]), ([3, 5], [7]), ([3, 6], [3]), ([4, 6], [3])) == [True, True, True, False]


@pytest.mark.parametrize("threshold", [4, 7, 1000])
def test_both_sides_of_a_threshold_are_not_served_by_one_trace(threshold: int) -> None:
    def loss_fn(w: Any, x: Any, y: Any) -> Any:
        tokens = tf.shape(x)[0] * (tf.shape(x)[1] - threshold)
        return summed(w, x) / tf.cast(tf.maximum(tokens, 1), tf.float64)

    lengths = ([threshold - 1], [3]), ([1], [3]), ([threshold + 1], [3]), ([threshold + 7], [3])
    assert served(trace(loss_fn, *lengths[0]), *lengths) == [True, True, False, False]
    assert served(trace(loss_fn, *lengths[2]), *lengths) == [False, False, True, True]


def test_lengths_that_the_loss_wants_equal_vary_together() -> None:
    captured = trace(lambda w, x, y: summed(w, x * y) / tf.cast(tf.size(y) + 1, tf.float64), [3], [3])
    assert served(captured, ([3], [3]), ([8], [8])) == [True, True]
    (size,) = captured.dependence.sizes
    assert [term.argument for term in size.lengths] == [captured.graph.inputs[1]]  # of which the loss takes the size


def test_rows_of_a_draw_for_a_flat_list_are_those_of_one_length() -> None:
    def loss_fn(w: Any, x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.nn.experimental.stateless_dropout(tf.reshape(w * x, [-1]), 0.5, seed=[1, 2]))

    captured = trace(loss_fn, [3], [3])
    assert served(captured, ([3], [3]), ([3], [4]), ([4], [3])) == [True, True, False]
