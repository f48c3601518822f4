"""Uses of variables by their rows: which there are, in which order, and how their micro-batches are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.gradients import differentiate
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.graph_passes.passes.backward import SparseUse
from dapple_tf.graph_passes.passes.partition import partition

RANDOM = np.random.default_rng(3)
TABLE = tf.Variable(RANDOM.normal(size=(9, 3)), name="table")
W = tf.Variable(RANDOM.normal(size=(3, 3)), name="w")
IDS, OTHERS = np.array([[0, 2], [2, 1], [0, 3]]), np.array([[5, 5], [6, 7], [6, 6]])


def uses_of(loss: Callable[..., Any], *starts: str) -> list[tuple[int, SparseUse]]:
    """Return the sparse uses of a loss of two arrays of ids, with their stages, in order."""
    captured = capture(tf.function(loss, autograph=False), (IDS, OTHERS))
    layers = find_layers(captured.graph)
    names = [layer.name for layer in layers.layers]
    stages = partition(layers, [next(i for i, n in enumerate(names) if n.startswith(start)) for start in starts])
    _, found = differentiate(captured, stages)
    uses = [(stage, use) for stage, gradients in enumerate(found) for use in gradients.slices]
    return sorted(uses, key=lambda entry: entry[1].position)


def rows(ids: Any) -> Any:
    """Look rows up, and make a row for each sample of them."""
    with tf.name_scope("look_up"):
        return tf.reduce_sum(tf.reshape(tf.gather(TABLE, ids), [-1, 2, 3]), 1)


def score(h: Any) -> Any:
    with tf.name_scope("score"):
        return tf.reduce_mean(tf.square(h @ W))


def of_samples(ids: Any, others: Any) -> Any:
    return score(rows(ids))


def of_positions(ids: Any, others: Any) -> Any:
    return score(tf.gather(TABLE, tf.range(tf.shape(ids)[1]))[0] + tf.cast(ids[:, :1], tf.float64))


def of_a_constant_of_unknown_length(ids: Any, others: Any) -> Any:
    chosen = tf.where(tf.constant([True, False, True]))[:, 0]
    return score(tf.reduce_sum(tf.gather(TABLE, chosen), 0) + tf.cast(ids[:, :1], tf.float64))


def of_unique_ids(ids: Any, others: Any) -> Any:
    unique, position = tf.unique(tf.reshape(ids, [-1]))
    return score(tf.reduce_sum(tf.reshape(tf.gather(tf.gather(TABLE, unique), position), [-1, 2, 3]), 1))


@pytest.mark.parametrize(
    ("loss", "combine"),
    [
        (of_samples, "concat"),
        (of_positions, "sum"),
        (of_a_constant_of_unknown_length, "sum"),
        (of_unique_ids, "merge"),
    ],
)
def test_micro_batches_are_put_together_as_one_device_would_have_them(loss: Any, combine: str) -> None:
    ((_, use),) = uses_of(loss)
    assert use.combine == combine


def test_indices_of_a_function_that_takes_unique_ones_are_refused() -> None:
    look_up = tf.function(lambda ids: tf.gather(tf.gather(TABLE, tf.unique(ids)[0]), tf.unique(ids)[1]))

    def loss(ids: Any, others: Any) -> Any:
        return score(tf.reduce_sum(tf.reshape(look_up(tf.reshape(ids, [-1])), [-1, 2, 3]), 1))

    with pytest.raises(CaptureError, match=r"'table' .* calls tf.unique, .*: call tf.unique outside of a tf.function"):
        uses_of(loss)


def test_a_use_in_a_function_is_found() -> None:
    look_up = tf.function(lambda ids: tf.gather(TABLE, ids))
    ((_, use),) = uses_of(lambda ids, others: score(tf.reduce_sum(look_up(ids), 1)))
    assert use.combine == "concat"


def test_a_dense_use_in_another_stage_makes_the_gradient_dense() -> None:
    def loss(ids: Any, others: Any) -> Any:
        h = rows(ids)
        with tf.name_scope("output"):
            return tf.reduce_mean(tf.square(h @ tf.transpose(TABLE)))

    assert uses_of(loss, "output") == []


def added(ids: Any, others: Any) -> Any:
    h = rows(ids)
    with tf.name_scope("second"):
        return score(h + tf.reduce_sum(tf.gather(TABLE, others), 1))


def multiplied(ids: Any, others: Any) -> Any:
    h = rows(ids)
    with tf.name_scope("second"):
        return score(tf.tanh(h) * tf.reduce_sum(tf.gather(TABLE, others), 1))


def the_same_ids_again(ids: Any, others: Any) -> Any:
    h = rows(ids)
    with tf.name_scope("second"):
        return score(h + tf.reduce_sum(tf.gather(TABLE, ids), 1))


@pytest.mark.parametrize("loss", [added, multiplied, the_same_ids_again])
def test_the_uses_of_two_stages_come_in_the_order_of_the_tape(loss: Any) -> None:
    with tf.GradientTape() as tape:
        value = loss(tf.constant(IDS), tf.constant(OTHERS))
    indices = tape.gradient(value, TABLE).indices.numpy().reshape(2, 6)
    wanted = [int(found.max() > 4) for found in indices]  # OTHERS are looked up in stage 1
    uses = uses_of(loss, "second")
    assert sorted(stage for stage, _ in uses) == [0, 1]
    if loss is not the_same_ids_again:
        assert [stage for stage, _ in uses] == wanted


def test_stages_that_run_the_same_lookup_give_the_same_use() -> None:
    def loss(ids: Any, others: Any) -> Any:
        shared = tf.gather(TABLE, tf.range(2))
        h = rows(ids) + shared[0]
        with tf.name_scope("second"):
            return score(tf.tanh(h) + shared[1])

    uses = uses_of(loss, "second")
    assert sorted((stage, use.combine) for stage, use in uses) == [(0, "concat"), (0, "sum"), (1, "sum")]
    assert len({use.position for _, use in uses if use.combine == "sum"}) == 1
