from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.frontend.additions import read_additions
from dapple_tf.frontend.read_graph import read_graph
from dapple_tf.graph_passes.ir.graph import Graph, Node


def traced(write: Callable[[Any, Any], Any]) -> Graph:
    """Return the graph of what ``write`` does to a variable of three numbers."""
    variable = tf.Variable(tf.zeros(3))

    def function(x: Any) -> None:
        write(variable, x)

    graph = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([3])).graph
    inputs = {"x": Node("x", "arg")}
    inputs |= {placeholder.op.name: Node("v", "variable") for _, placeholder in graph.captures}
    return read_graph(graph, inputs, "writes")


def writes(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if "Assign" in node.op]


@pytest.mark.parametrize(
    ("write", "op"),
    [
        (lambda v, x: v.assign(v + x), "AssignAddVariableOp"),
        (lambda v, x: v.assign(x + v), "AssignAddVariableOp"),
        (lambda v, x: v.assign(tf.identity(v.read_value() + x)), "AssignAddVariableOp"),
        (lambda v, x: v.assign(v - x), "AssignSubVariableOp"),
    ],
)
def test_an_assignment_of_a_sum_with_the_variable_is_an_addition(write: Any, op: str) -> None:
    graph = traced(write)
    (assign,) = writes(graph)
    (found,) = writes(read_additions(graph, ()))
    assert assign.op == "AssignVariableOp"
    assert (found.op, [str(value) for value in found.inputs]) == (op, ["%v:0", "%x:0"])
    assert found.strings("writes") == ("v",)
    assert found.controls == ()  # it does not wait for the read, which nothing needs


def test_every_addition_of_several_is_one() -> None:
    def twice(v: Any, x: Any) -> Any:
        v.assign(v + x)
        return v.assign(v + 2.0 * x)

    found = read_additions(traced(twice), ())
    assert [node.op for node in writes(found)] == ["AssignAddVariableOp"] * 2


def written_between(v: Any, x: Any) -> Any:
    total = v + x
    v.assign(tf.zeros(3))
    return v.assign(total)


@pytest.mark.parametrize(
    "write",
    [
        lambda v, x: v.assign(x - v),
        lambda v, x: v.assign(v * x),
        lambda v, x: v.assign(v + tf.reduce_sum(x)),
        lambda v, x: (v.assign(total := v + x), tf.reduce_sum(total)),
        written_between,
    ],
)
def test_other_assignments_stay(write: Any) -> None:
    graph = traced(write)
    assert "AssignVariableOp" in {node.op for node in writes(graph)}
    assert read_additions(graph, ()) == graph


def test_a_sum_that_the_loss_returns_stays() -> None:
    graph = traced(lambda v, x: v.assign(v + x))
    (total,) = (node for node in graph.nodes if node.op == "AddV2")
    assert read_additions(graph, total.values()) == graph
