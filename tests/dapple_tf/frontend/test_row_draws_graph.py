"""The graph with draws by rows: which nodes it has, and which draws are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.row_draws import RowDraw
from dapple_tf.graph_passes.ir.graph import Graph, Node, ancestors
from tests.dapple_tf.frontend.divided_draws import draws_of, samples_of, trace, with_rows


def rewritten_draw(function: Callable[..., Any]) -> tuple[Node, Graph]:
    """Return the last draw of a function, and the graph that has its rows instead."""
    _, graph = trace(function, tf.TensorSpec((None, 2)))
    node = draws_of(graph)[-1]
    return node, with_rows(graph, [RowDraw(node.name, 0)])


@pytest.mark.parametrize("algorithm", ["philox", "auto_select"])
def test_a_draw_whose_rows_are_whole_blocks_gets_another_counter_and_nothing_else(algorithm: str) -> None:
    node, graph = rewritten_draw(lambda x: tf.random.stateless_normal([samples_of(x), 8], [1, 2], alg=algorithm))
    drawn = graph.node(node.name)
    assert drawn.op == node.op
    assert [value == old for value, old in zip(drawn.inputs, node.inputs, strict=True)] == [True, True, False, True]


def test_a_draw_whose_rows_are_whole_blocks_costs_a_few_small_ops() -> None:
    node, graph = rewritten_draw(lambda x: tf.random.stateless_uniform([samples_of(x), 8], [1, 2]))
    own = ancestors(graph, [node.inputs[0].node, node.inputs[1].node, "rows"])  # shape, key and seed
    new = [graph.node(name) for name in ancestors(graph, [graph.node(node.name).inputs[2].node], stop=own)]
    new = [n for n in new if n.op != "Const"]
    assert 0 < len(new) <= 5
    assert all(kind.shape.elements() <= 2 for n in new for kind in n.outputs)


# --- refusals


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: tf.random.experimental.stateless_shuffle(x, [1, 2]),
        lambda x: tf.random.uniform([samples_of(x)]),
        lambda x: tf.random.experimental.index_shuffle(tf.range(samples_of(x)), [1, 2], 10),
    ],
)
def test_other_ops_are_refused_by_name_and_layer(draw: Callable[[tf.Tensor], tf.Tensor]) -> None:
    _, graph = trace(draw, tf.TensorSpec((None, 2)))
    (node,) = (n for n in graph.nodes if n.op.startswith("Random") or "Shuffle" in n.op)
    inside = graph.replace(nodes=tuple(n.with_attrs(layer="net/mix") if n is node else n for n in graph.nodes))
    with pytest.raises(CaptureError, match=rf"'{node.name}' \({node.op}, in net/mix\).*stateless_uniform"):
        with_rows(inside, [RowDraw(node.name, 0)])


def test_a_parameter_of_unknown_rank_is_refused() -> None:
    def function(x: tf.Tensor) -> tf.Tensor:
        unranked = tf.reshape(x, tf.unique(tf.shape(x))[0])
        return tf.raw_ops.StatelessRandomPoisson(shape=tf.shape(x), seed=[1, 2], lam=unranked, dtype=tf.float32)

    with pytest.raises(CaptureError, match=r"in no Keras layer.*axes of its input 'lam' is unknown.*tf.ensure_shape"):
        rewritten_draw(function)
