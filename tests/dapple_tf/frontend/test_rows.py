"""The graph in which ops know which rows of the batch a micro-batch has."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from dapple_tf.frontend.rows import ROWS_NAME, ROWS_OP, use_rows
from dapple_tf.graph_passes.ir.graph import Value
from dapple_tf.graph_passes.ir.verify import verify
from tests.dapple_tf.frontend.dependence.evaluation import Evaluation, N, analyse, make_loss


def test_a_loss_that_needs_no_rows_keeps_its_graph() -> None:
    captured, dependence = analyse(make_loss(lambda b: tf.reduce_mean(b.z)))
    assert use_rows(captured.graph, dependence) is captured.graph
    assert use_rows(captured.graph, None) is captured.graph


def test_a_float_size_is_replaced_wherever_it_is_used() -> None:
    captured, dependence = analyse(make_loss(lambda b: tf.reduce_sum(b.z) / tf.cast(b.n + 1, tf.float64)))
    graph = use_rows(captured.graph, dependence)
    verify(graph)
    (size,) = dependence.sizes
    assert graph.node(ROWS_NAME).op == ROWS_OP
    found = Evaluation(captured, graph, ()).run([Value(size.node)], 2, 5)
    assert found == [N + 1]
    assert graph.type_of(Value(size.node)) == captured.graph.type_of(Value(size.node))


def test_an_integer_size_is_replaced_at_one_operand_only() -> None:
    """The same size makes a shape elsewhere, which stays the micro-batch's."""
    captured, dependence = analyse(
        make_loss(lambda b: tf.reduce_mean(tf.cast(b.y * b.n, tf.float64) * tf.reshape(b.z, [b.n, 4])[:, 0]))
    )
    graph = use_rows(captured.graph, dependence)
    verify(graph)
    (size,) = dependence.sizes
    assert size.operand is not None
    before, after = (g.node(size.node).inputs for g in (captured.graph, graph))
    assert [a == b for a, b in zip(before, after, strict=True)] == [i != size.operand for i in range(len(before))]
    evaluation = Evaluation(captured, graph, ())
    assert evaluation.run([after[size.operand], before[size.operand]], 2, 5) == [N, 3]


def test_a_draw_gives_the_rows_of_the_micro_batch() -> None:
    captured, dependence = analyse(
        make_loss(lambda b: tf.reduce_mean(b.z * tf.random.stateless_normal(tf.shape(b.z), [1, 2], dtype=tf.float64)))
    )
    graph = use_rows(captured.graph, dependence)
    verify(graph)
    (draw,) = dependence.draws
    evaluation = Evaluation(captured, graph, ())
    (whole,), (part,) = (evaluation.run([Value(draw.node)], *rows) for rows in ((0, N), (3, 7)))
    np.testing.assert_array_equal(part, whole[3:7])
    np.testing.assert_array_equal(whole, tf.random.stateless_normal([N, 4], [1, 2], dtype=tf.float64))


def test_a_draw_outside_of_layers_is_one_layer_with_what_gives_it_its_rows() -> None:
    captured, dependence = analyse(
        make_loss(lambda b: tf.reduce_mean(b.z * tf.random.stateless_normal(tf.shape(b.z), [1, 2], dtype=tf.float64)))
    )
    (draw,) = dependence.draws
    graph = use_rows(captured.graph, dependence)
    assert graph.node(draw.node).string("layer") == draw.node
