"""TensorFlow functions of stage functions: their ports, constants, side effects, and whether calls are inlined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.stage_function import build_function
from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.captured import Captured
from dapple_tf.graph_passes.ir.graph import Function, Graph, Node, Port, Value, tensor
from tests.dapple_tf.builders import executed_nodes

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def whole_loss(loss: Callable[..., Any], *batch: Any) -> tuple[Function, Captured]:
    """Return a loss as one stage function, which takes the batch, then the variables."""
    captured = capture(loss, batch)
    graph = captured.graph
    variables = tuple(captured.variables)
    inputs = (
        *(Port("arg", name, graph.node(name).outputs[0]) for name in graph.inputs),
        *(Port("variable", name, tensor("resource")) for name in variables),
    )
    outputs = tuple(Port("loss", f"loss{i}", graph.type_of(value)) for i, value in enumerate(graph.outputs))
    return Function("stage0/forward", graph.replace(inputs=(*graph.inputs, *variables)), inputs, outputs), captured


def run(loss: Callable[..., Any], *batch: Any) -> list[Any]:
    """Return the outputs of a loss's stage function on ``batch``."""
    function, captured = whole_loss(loss, *batch)
    built = build_function(function, captured.constants, dict(captured.graph.library), whole=True)
    handles = [variable.handle for variable in captured.variables.values()]
    return [result.numpy() for result in built(*map(tf.constant, batch), *handles)]


def test_variables_are_passed_as_resources() -> None:
    w, b = tf.Variable([[2.0], [3.0]], name="w"), tf.Variable(1.0, name="b")

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(x @ w) + b

    assert run(loss, X) == [pytest.approx(14.0)]
    w.assign(tf.zeros_like(w))
    assert run(loss, X) == [1]


def test_tensors_that_the_loss_closes_over_are_constants_of_the_function() -> None:
    w, table = tf.Variable(1.0), tf.reshape(tf.range(400.0), [2, 200])
    (found,) = run(lambda x: tf.reduce_mean(x @ table) * w, X)
    assert found == np.mean(X @ table.numpy())


def test_functions_that_ops_call_come_along() -> None:
    w = tf.Variable(2.0)

    def loss(x: tf.Tensor) -> tf.Tensor:
        total = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * w), (0, tf.reduce_mean(x)))[1]
        return tf.cond(total > 10.0, lambda: total + 1.0, lambda: total)

    assert run(loss, X) == [2.5 * 8 + 1]


def test_an_input_may_be_an_output() -> None:
    w = tf.Variable(1.0)
    loss, same = run(lambda x: (tf.reduce_mean(x) * w, x), X)
    assert loss == 2.5
    np.testing.assert_array_equal(same, X)


def test_a_function_without_ops_returns_its_inputs_in_the_order_of_the_outputs() -> None:
    kinds = tensor("float32", None)
    nodes = tuple(Node(name, "boundary", outputs=(kinds,)) for name in "ab")
    ports = tuple(Port("boundary", name, kinds) for name in "ab")
    graph = Graph("f", nodes, ("a", "b"), (Value("b"), Value("a")))
    built = build_function(Function("f", graph, ports, ports[::-1]), {}, {}, whole=True)
    assert [result.numpy().tolist() for result in built(tf.constant([1.0]), tf.constant([2.0]))] == [[2], [1]]


def test_side_effects_inside_keep_their_order() -> None:
    w, count = tf.Variable(1.0), tf.Variable(0.0, trainable=False)

    def loss(x: tf.Tensor) -> tf.Tensor:
        before = count.read_value()
        count.assign_add(tf.reduce_sum(x))
        count.assign(count * 2.0)
        return tf.reduce_mean(x) * w + before + 100.0 * count.read_value()

    assert run(loss, X) == [2.5 + 0 + 100 * 20]
    assert count.numpy() == 20


@pytest.mark.parametrize("whole", [True, False])
def test_only_functions_that_are_not_whole_are_inlined(whole: bool) -> None:
    """In a graph that calls the function twice; after inlining, its Softsign ops are ops of that graph."""
    w = tf.Variable(1.0)
    function, captured = whole_loss(lambda x: tf.reduce_mean(tf.math.softsign(x) * w), X)
    built = build_function(function, {}, dict(captured.graph.library), whole=whole)

    @tf.function(autograph=False, experimental_attributes={internals.NO_AUTOMATIC_CONTROL: True})
    def step(x: tf.Tensor) -> tf.Tensor:
        handle = internals.capture_of(tf.compat.v1.get_default_graph(), w.handle)
        return built(x, handle)[0] + built(2.0 * x, handle)[0]

    concrete = step.get_concrete_function(tf.TensorSpec([2, 2]))
    assert [op.type in internals.CALL_OPS for op in concrete.graph.get_operations()].count(True) == 2
    with internals.without_specialisation():
        nodes = executed_nodes(concrete, tf.constant(X))
    inlined = [node for node in nodes if node.op == "Softsign" and node.name.count("/body/")]
    calls = [node for node in nodes if node.op in internals.CALL_OPS]
    assert (len(inlined), len(calls)) == ((0, 2) if whole else (2, 0))
