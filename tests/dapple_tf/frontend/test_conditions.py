"""Conditions of a traced update are laid open: names, guards, order, and what stays closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.branches import build_branches
from dapple_tf.backend.stage_function import build_function
from dapple_tf.frontend.conditions import open_conditions
from dapple_tf.frontend.optimizer_update import trace_update
from dapple_tf.frontend.read_graph import read_graph
from dapple_tf.graph_passes.ir.conditions import is_marker
from dapple_tf.graph_passes.ir.graph import Function, Graph, Node, Port
from dapple_tf.graph_passes.ir.verify import verify


def put(*pairs: tuple[tf.Variable, Any]) -> None:
    """Assign each value, as a branch without a result."""
    for variable, value in pairs:
        variable.assign(value)


def traced(update: Callable[[Any], Any], **variables: tf.Variable) -> Graph:
    """The open graph of a function of one tensor, called x, that uses these variables."""
    concrete = tf.function(update, autograph=False).get_concrete_function(tf.TensorSpec([], tf.float32))
    func_graph = concrete.graph
    inputs = {func_graph.inputs[0].op.name: Node("x", "capture")}
    for name, variable in variables.items():
        inputs[internals.capture_of(func_graph, variable.handle).op.name] = Node(name, "variable")
    return open_conditions(read_graph(func_graph, inputs, "update"), func_graph)


def run(graph: Graph, x: float, **variables: tf.Variable) -> None:
    """Build the graph as a stage function and run it."""
    nodes = {node.name: node for node in graph.nodes}
    ports = tuple(Port("variable" if n in variables else "carry", n, nodes[n].outputs[0]) for n in ("x", *variables))
    nodes["x"] = Node("x", "carry", (), nodes["x"].outputs)
    body = graph.replace(nodes=tuple(nodes.values()), inputs=("x", *variables), outputs=())
    library = dict(graph.library)
    built = build_branches(Function("update", body, ports, ()), {}, library)
    function = build_function(built.function, {}, {**library, **built.library}, whole=True)
    function(tf.constant(x), *(variable.handle for variable in variables.values()))


def test_both_branches_stand_in_the_graph_and_run_as_they_did() -> None:
    v, w = tf.Variable(1.0), tf.Variable(7.0)

    def update(x: Any) -> None:
        def positive() -> None:
            v.assign_add(x)
            w.assign(v.read_value() * 2.0)  # what was written

        tf.cond(x > 0.0, positive, lambda: put((v, -1.0)))

    graph = traced(update, v=v, w=w)
    verify(graph)
    (marker,) = (node for node in graph.nodes if is_marker(node))
    writes = {node.strings("writes")[0]: node for node in graph.nodes if node.effect == "write"}
    assert set(writes) == {"v", "w"}
    for node in writes.values():
        assert node.strings("guard")[0] == marker.name
        assert marker.name in {control.source for control in node.controls}
    run(graph, 4.0, v=v, w=w)
    assert (v.numpy(), w.numpy()) == (5.0, 10.0)
    run(graph, -4.0, v=v, w=w)
    assert (v.numpy(), w.numpy()) == (-1.0, 10.0)


def test_nested_conditions_are_open_too_and_nested_again_when_they_run() -> None:
    v = tf.Variable(0.0)

    def update(x: Any) -> None:
        def outer() -> None:
            tf.cond(x > 10.0, lambda: put((v, 2.0)), lambda: put((v, 1.0)))

        tf.cond(x > 0.0, outer, lambda: put((v, -1.0)))
        v.assign_add(0.5)

    graph = traced(update, v=v)
    assert len([node for node in graph.nodes if is_marker(node)]) == 2
    for x, expected in ((20.0, 2.5), (5.0, 1.5), (-5.0, -0.5)):
        run(graph, x, v=v)
        assert v.numpy() == expected


def test_uses_of_other_variables_are_not_ordered_by_a_condition() -> None:
    """The condition as a whole waits for all that it uses; open, only uses of one variable wait for each other."""
    v, w = tf.Variable(1.0), tf.Variable(2.0)

    def update(x: Any) -> None:
        w.assign_add(1.0)
        tf.cond(x > 0.0, lambda: put((v, x), (w, x)), lambda: None)
        v.assign_add(1.0)

    graph = traced(update, v=v, w=w)
    last = [node for node in graph.nodes if node.effect == "write" and not node.has("guard")][-1]
    waits = {control.source for control in last.controls}
    (of_v,) = (n.name for n in graph.nodes if n.has("guard") and n.has("writes") and n.strings("writes") == ("v",))
    assert waits == {of_v}


def test_results_of_an_open_condition_are_chosen_by_its_predicate() -> None:
    v, w, seen = tf.Variable(1.0), tf.Variable(7.0), tf.Variable(0.0)

    def update(x: Any) -> None:
        def positive() -> Any:
            before = v * 1.0
            v.assign_add(x)
            inner = tf.cond(x > 2.0, lambda: put((w, x)) or x * 10.0, lambda: put((w, 0.0)) or v * 1.0)
            return before + inner

        seen.assign(tf.cond(x > 0.0, positive, lambda: w * 1.0) + 0.5)

    graph = traced(update, v=v, w=w, seen=seen)
    verify(graph)
    assert len([node for node in graph.nodes if is_marker(node)]) == 2
    run(graph, 4.0, v=v, w=w, seen=seen)
    assert (v.numpy(), w.numpy(), seen.numpy()) == (5.0, 4.0, 41.5)
    run(graph, 1.0, v=v, w=w, seen=seen)
    assert (v.numpy(), w.numpy(), seen.numpy()) == (6.0, 0.0, 11.5)
    run(graph, -1.0, v=v, w=w, seen=seen)
    assert (v.numpy(), w.numpy(), seen.numpy()) == (6.0, 0.0, 0.5)


def test_a_condition_whose_results_cannot_be_computed_in_both_cases_stays_closed() -> None:
    v = tf.Variable(1.0)

    def looped(x: Any) -> Any:
        v.assign_add(1.0)
        return tf.while_loop(lambda y: y < 10.0, lambda y: (y * (1.0 + x),), (x,))[0]

    def between(x: Any) -> Any:
        v.assign_add(1.0)
        found = v * 1.0
        v.assign(x)
        return found

    for branch in (looped, between):
        graph = traced(lambda x, branch=branch: v.assign_add(tf.cond(x > 0.0, lambda: branch(x), lambda: x)), v=v)
        assert not [node for node in graph.nodes if is_marker(node)]
    graph = traced(lambda x: v.assign_add(tf.cond(x > 0.0, lambda: x * 2.0, lambda: x)), v=v)
    assert not [node for node in graph.nodes if is_marker(node)]  # it writes nothing


def test_a_condition_whose_result_nobody_uses_is_open() -> None:
    """tf.cond passes its result on through an Identity, and that of a nested one is what the outer one returns."""
    v, w = tf.Variable(1.0), tf.Variable(7.0)

    def update(x: Any) -> None:
        def write(value: Any) -> Any:
            w.assign(value)
            return v.assign_add(value, read_value=True)

        tf.cond(x > 0.0, lambda: tf.cond(x > 1.0, lambda: write(x), lambda: write(-x)), lambda: 3.0 * v)

    graph = traced(update, v=v, w=w)
    verify(graph)
    assert not [node for node in graph.nodes if node.op == "If" and not is_marker(node)]
    run(graph, 4.0, v=v, w=w)
    assert (v.numpy(), w.numpy()) == (5.0, 4.0)
    run(graph, 0.5, v=v, w=w)
    assert (v.numpy(), w.numpy()) == (4.5, -0.5)
    run(graph, -1.0, v=v, w=w)
    assert (v.numpy(), w.numpy()) == (4.5, -0.5)


@pytest.mark.parametrize("count", [1, 3])
def test_the_update_of_a_loss_scale_optimizer_has_nothing_closed(count: int) -> None:
    variables = {f"w{i}": tf.Variable(np.ones(2, np.float32), name=f"w{i}") for i in range(count)}
    inner = keras.optimizers.Adam(0.1, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2)
    update = trace_update(keras.optimizers.LossScaleOptimizer(inner), list(variables), variables)
    markers = [node for node in update.graph.nodes if is_marker(node)]
    assert len(markers) == 4  # overflow, accumulation, overwriting, and growth of the scale
    assert all(len(node.strings("writes")) == 1 for node in update.graph.nodes if node.effect == "write")
