"""The traced update of an optimizer: its inputs, and that running it is what the optimizer does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import PlanError
from dapple_tf.frontend.optimizer_update import TracedUpdate, trace_update
from dapple_tf.frontend.write_graph import import_graph
from dapple_tf.graph_passes.ir.graph import Effect, Node
from dapple_tf.graph_passes.ir.text import print_type


def variables() -> dict[str, tf.Variable]:
    return {name: tf.Variable([1.0, -2.0], name=name) for name in ("v", "w")}


GRADIENTS = {"v": np.float32([0.5, 0.25]), "w": np.float32([-3.0, 4.0])}


def run(update: TracedUpdate, gradients: Mapping[str, Any]) -> None:
    """Run a traced update on gradients by variable."""
    graph = update.graph
    arguments = {node.name: node for node in graph.nodes if node.op == "arg"}

    def apply() -> None:
        inputs = {name: tf.constant(gradients[_key(node)]) for name, node in arguments.items()}
        now = tf.compat.v1.get_default_graph()
        inputs |= {name: internals.capture_of(now, v.handle) for name, v in update.variables.items()}
        inputs |= {name: internals.capture_of(now, value) for name, value in update.constants.items()}
        import_graph(graph, inputs, "update")

    tf.function(apply, autograph=False)()


def _key(node: Node) -> str:
    """Return the variable of an argument, and whether it is slices or indices."""
    return f"{node.string('port')} {node.string('role')}" if node.has("role") else node.string("port")


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
        lambda: keras.optimizers.Adam(0.01, clipnorm=0.5),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)),
    ],
    ids=["momentum", "weight decay", "clipnorm", "schedule"],
)
def test_running_the_update_is_what_the_optimizer_does(make: Any) -> None:
    plain, traced = variables(), variables()
    optimizer = make()
    update = trace_update(make(), ("v", "w"), traced)
    for _ in range(3):
        optimizer.apply([tf.constant(GRADIENTS[name]) for name in plain], list(plain.values()))
        run(update, GRADIENTS)
    for name, variable in plain.items():
        np.testing.assert_allclose(traced[name].numpy(), variable.numpy(), rtol=1e-6, err_msg=name)


def test_tracing_changes_no_variable() -> None:
    own, optimizer = variables(), keras.optimizers.Adam(0.1)
    trace_update(optimizer, ("v", "w"), own)
    assert [variable.numpy().tolist() for variable in own.values()] == [[1, -2], [1, -2]]
    assert int(optimizer.iterations.numpy()) == 0


def test_gradients_are_arguments_named_after_their_variables() -> None:
    update = trace_update(keras.optimizers.SGD(0.1), ("w",), variables())
    arguments = [node for node in update.graph.nodes if node.op == "arg"]
    assert [(node.name, node.string("port")) for node in arguments] == [("gradient/0", "w")]
    written = [name for node in update.graph.nodes if node.effect is Effect.WRITE for name in node.strings("writes")]
    assert set(written) >= {"w"}
    assert "v" not in written


@pytest.mark.parametrize(
    "make", [lambda: keras.optimizers.Adam(0.1), lambda: keras.optimizers.SGD(0.1, clipnorm=0.1)], ids=["adam", "clip"]
)
def test_a_sparse_gradient_is_two_arguments_and_reaches_keras_as_indexed_slices(make: Any) -> None:
    plain, traced = variables(), variables()
    slices, indices = np.float32([0.5, -1.0, 2.0]), np.int64([1, 1, 0])
    optimizer, update = make(), trace_update(make(), ("v", "w"), traced, {"v": "int64"})
    arguments = [node for node in update.graph.nodes if node.op == "arg"]
    assert [_key(node) for node in arguments] == ["v slices", "v indices", "w"]
    assert [print_type(node.outputs[0]) for node in arguments] == ["float32[?]", "int64[?]", "float32[2]"]
    for _ in range(3):
        sparse = tf.IndexedSlices(tf.constant(slices), tf.constant(indices), tf.constant([2]))
        optimizer.apply([sparse, tf.constant(GRADIENTS["w"])], list(plain.values()))
        run(update, {"v slices": slices, "v indices": indices, "w": GRADIENTS["w"]})
    for name, variable in plain.items():
        np.testing.assert_allclose(traced[name].numpy(), variable.numpy(), rtol=1e-6, err_msg=name)


def test_an_optimizer_that_clips_by_the_global_norm_takes_dense_gradients() -> None:
    update = trace_update(keras.optimizers.SGD(0.1, global_clipnorm=1.0), ("v",), variables(), {"v": "int64"})
    assert [_key(node) for node in update.graph.nodes if node.op == "arg"] == ["v"]


def test_variables_of_the_optimizer_get_names_beside_the_models() -> None:
    own = {"momentum": tf.Variable([1.0], name="momentum"), "learning_rate": tf.Variable(1.0, name="learning_rate")}
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, name="learning_rate")
    update = trace_update(optimizer, tuple(own), own)
    assert {name: update.variables[name] for name in own} == own
    of_optimizer = {id(variable.value) for variable in optimizer.variables}
    others = {name: variable for name, variable in update.variables.items() if name not in own}
    assert {id(variable) for variable in others.values()} == of_optimizer
    assert len(others) == len(of_optimizer)


def test_keras_variables_are_updated_under_their_constraints() -> None:
    kernel = keras.Variable([1.0, -2.0], name="kernel")
    kernel.constraint = keras.constraints.NonNeg()
    update = trace_update(keras.optimizers.SGD(1.0), ("kernel",), {"kernel": kernel.value})
    assert update.trained[0] is kernel
    run(update, {"kernel": np.float32([3.0, -5.0])})
    assert kernel.numpy().tolist() == [0, 3]


def test_the_global_norm_is_reported_and_not_clipped() -> None:
    optimizer, own = keras.optimizers.SGD(1.0, global_clipnorm=0.1), variables()
    update = trace_update(optimizer, ("v", "w"), own)
    assert update.global_clipnorm == pytest.approx(0.1)
    assert optimizer.global_clipnorm == pytest.approx(0.1)  # put back
    run(update, GRADIENTS)
    np.testing.assert_allclose(own["w"].numpy(), [4, -6], rtol=1e-6)
    assert trace_update(keras.optimizers.SGD(1.0), ("v",), variables()).global_clipnorm is None


def test_an_object_that_is_no_keras_optimizer_is_refused() -> None:
    with pytest.raises(PlanError, match=r"optimizer is a function, not a keras.optimizers.Optimizer"):
        trace_update(variables, ("v",), variables())


def test_an_optimizer_of_a_distribution_strategy_is_refused() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        optimizer = keras.optimizers.SGD()
    with pytest.raises(PlanError, match=r"SGD was made under a tf.distribute strategy: make it without"):
        trace_update(optimizer, ("v",), variables())


def test_an_optimizer_that_was_built_for_other_variables_is_refused_and_keeps_its_options() -> None:
    optimizer = keras.optimizers.Adam(0.1, global_clipnorm=2.0)
    optimizer.build([keras.Variable([1.0])])
    with pytest.raises(PlanError, match="Adam cannot update these variables"):
        trace_update(optimizer, ("v", "w"), variables())
    assert optimizer.global_clipnorm == 2
