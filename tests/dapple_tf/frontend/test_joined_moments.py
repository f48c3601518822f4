"""The statistics of batch norm that replicas join: as if one device had all samples, and so are their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.batch_norms import join, join_moments, mark_joins
from dapple_tf.frontend.capture import capture
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node

ROWS = np.random.default_rng(0).normal(3.0, 2.0, size=(7, 4, 3))
PIECES = (ROWS[:2], ROWS[2:3], ROWS[3:])


def statistics(rows: Any) -> Any:
    """Weight, mean and variance of each channel."""
    others = tuple(range(rows.ndim - 1))
    return np.stack([np.full(rows.shape[-1], rows[..., 0].size), rows.mean(others), rows.var(others)])


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_joined_moments_are_those_of_all_samples(offset: float) -> None:
    """Also where the mean is large: the sum of squares would have no digit of the variance."""
    found = join("moments", [tf.constant(statistics(piece + offset)) for piece in PIECES])
    np.testing.assert_allclose(found, statistics(ROWS + offset), rtol=1e-9 if offset else 1e-13)


def test_replicas_without_samples_count_nothing() -> None:
    nothing, own = tf.zeros([3, 3], tf.float64), tf.constant(statistics(ROWS))
    np.testing.assert_allclose(join("moments", [nothing, own]), own, rtol=1e-14)
    np.testing.assert_array_equal(join("moments", [nothing, nothing]), nothing)


def test_sums_are_sums() -> None:
    np.testing.assert_array_equal(join("sum", [tf.ones([3, 2]), 2 * tf.ones([3, 2])]), np.full((3, 2), 3.0))


def replica_gradients(pieces: Sequence[Any], weights: Any) -> list[Any]:
    """Return the gradient of each replica's samples, as the trace computes it, of a function of the joined statistics.

    Replicas are the calls of one trace; the marks are replaced by what the handlers make of them.
    """
    own = [tf.constant(statistics(piece)) for piece in pieces]
    joined = join("moments", own)
    with tf.Graph().as_default() as graph:
        placeholder = tf.compat.v1.placeholder(tf.float64, (3, 3))
        with graph.gradient_override_map({"Identity": "DappleJoinMoments"}):
            mark = tf.identity(placeholder)
        (gradient,) = tf.gradients(mark, placeholder, grad_ys=tf.constant(weights))
        with tf.compat.v1.Session(graph=graph) as session:
            # Each replica's part of the loss has the same gradient: their sum is what all of it has.
            feed = {mark: joined.numpy()}
            return [session.run(gradient, {**feed, placeholder: piece.numpy()}) for piece in own]


def test_the_gradients_of_a_replica_are_those_of_its_samples_in_the_whole() -> None:
    weights = np.random.default_rng(1).normal(size=(3, 3))
    pieces = [tf.constant(piece) for piece in PIECES]
    with tf.GradientTape() as tape:
        tape.watch(pieces)
        mean, variance = tf.nn.moments(tf.concat(pieces, 0), (0, 1))
        loss = tf.reduce_sum(weights[1] * mean + weights[2] * variance)
    wanted = tape.gradient(loss, pieces)
    for piece, of_statistics, expected in zip(pieces, replica_gradients(PIECES, weights), wanted, strict=True):
        with tf.GradientTape() as own:
            own.watch(piece)
            mean, variance = tf.nn.moments(piece, (0, 1))
            part = tf.reduce_sum(of_statistics[1] * mean + of_statistics[2] * variance)
        np.testing.assert_allclose(own.gradient(part, piece), expected, rtol=1e-12, atol=1e-15)
        assert not of_statistics[0].any()


# --- in a trace


def traced(layer: Any, masked: bool = False) -> Any:
    """Return a layer's outputs for ``ROWS`` and a mask, with the marks in its trace and without."""
    mask = tf.constant(np.random.default_rng(1).random(ROWS.shape[:2]) < 0.4) if masked else None
    found = []
    for moments in (join_moments, lambda layer, inputs, mask, compute: compute()):
        with internals.replace_moments(moments):
            call = tf.function(lambda x: layer(x, training=True, mask=mask), autograph=False)
            found.append(call.get_concrete_function(tf.TensorSpec(ROWS.shape, layer.dtype)))
    return [function(tf.cast(ROWS, layer.dtype)).numpy() for function in found]


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_replica_normalises_to_the_last_bit_as_keras_does(axis: int, dtype: str) -> None:
    marked, plain = traced(keras.layers.BatchNormalization(axis=axis, dtype=dtype))
    np.testing.assert_array_equal(marked, plain)


def test_one_replica_with_a_mask_normalises_as_keras_does() -> None:
    marked, plain = traced(keras.layers.BatchNormalization(dtype="float64"), masked=True)
    np.testing.assert_allclose(marked, plain, rtol=1e-13)


def test_a_mask_that_keeps_nothing_gives_zeros() -> None:
    layer = keras.layers.BatchNormalization(dtype="float64")
    with internals.replace_moments(join_moments):
        call = tf.function(lambda x: layer(x, training=True, mask=tf.zeros([7, 4], tf.bool)), autograph=False)
        assert np.isfinite(call(tf.constant(ROWS))).all()
    np.testing.assert_allclose(layer.moving_mean.numpy(), np.zeros(3), atol=0)


@pytest.mark.parametrize("known", [(7, 4), (None, 4), (7, None), (None, None)])
def test_entries_are_counted_along_known_and_unknown_axes(known: tuple[int | None, ...]) -> None:
    layer = keras.layers.BatchNormalization(dtype="float64")
    counts = []

    def keep(layer: Any, inputs: Any, mask: Any, compute: Any) -> Any:
        joined = join_moments(layer, inputs, mask, compute)
        (mark,) = (op for op in inputs.graph.get_operations() if op.name.endswith("join_moments"))
        counts.append(mark.outputs[0][0])
        return joined

    def call(x: Any) -> Any:
        layer(x, training=True)
        return counts[-1]

    with internals.replace_moments(keep):
        function = tf.function(call, autograph=False).get_concrete_function(tf.TensorSpec((*known, 3), tf.float64))
    np.testing.assert_array_equal(function(tf.constant(ROWS)), np.full(3, 28.0))


# --- marks


def marked_graph(**attrs: Any) -> list[Node]:
    layer, weight = keras.layers.BatchNormalization(dtype="float64"), tf.Variable(tf.ones([3, 3], tf.float64))
    captured = capture(lambda x: tf.reduce_sum(layer(x @ weight, training=True)), (ROWS[:, 0],), batch_norm="sync")
    graph = captured.graph
    if attrs:
        graph = Graph(graph.name, tuple(node.with_attrs(**attrs) for node in graph.nodes), graph.inputs, graph.outputs)
    return [node for node in mark_joins(graph).nodes if node.has("join")]


def test_a_mark_is_found_again_in_the_graph_of_the_loss() -> None:
    (node,) = marked_graph()
    assert (node.op, node.string("join"), node.effect) == ("Identity", "moments", Effect.JOIN)
    assert node.outputs[0].shape.dims == (3, 3)


@pytest.mark.parametrize("attribute", ["once", "loss_head"])
def test_nothing_is_joined_that_sees_the_whole_batch(attribute: str) -> None:
    assert marked_graph(**{attribute: True}) == []


def test_nothing_else_is_marked() -> None:
    nodes = (Node("a", "Identity"), Node("b", "Identity").with_attrs(_gradient_op_type=b"Other"))
    assert not any(node.has("join") for node in mark_joins(Graph("g", nodes)).nodes)
