"""Tracing a user's function into the IR, and functions that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.errors import CaptureError, LossError
from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.captured import CapturedTensors
from dapple_tf.frontend.dependence.numbers import constant_value
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value
from dapple_tf.graph_passes.ir.verify import verify

X = np.ones((4, 2), np.float32)


def weight(*shape: int, name: str = "w") -> tf.Variable:
    return tf.Variable(tf.ones(shape), name=name)


def the(graph: Graph, op: str) -> Node:
    (node,) = (node for node in graph.nodes if node.op == op)
    return node


def controls(graph: Graph) -> dict[str, list[str]]:
    return {node.name: [control.source for control in node.controls] for node in graph.nodes if node.controls}


# --- data edges, inputs, outputs


def test_the_graph_is_valid_and_has_the_functions_ops() -> None:
    w = weight(2, 1)
    captured = capture(lambda x: tf.reduce_mean(tf.nn.relu(x @ w)), (X,))
    verify(captured.graph)
    relu = the(captured.graph, "Relu")
    assert [captured.graph.node(v.node).op for v in relu.inputs] == ["MatMul"]
    assert captured.graph.inputs == ("input/0",)
    assert captured.graph.type_of(captured.graph.outputs[0]).shape.dims == ()


def test_the_batch_size_is_unknown() -> None:
    captured = capture(lambda x: tf.reduce_mean(x @ weight_of_two), (X,))
    assert captured.graph.node("input/0").outputs[0].shape.dims == (None, 2)
    assert captured.signature == (tf.TensorSpec((None, 2), tf.float32),)


weight_of_two = tf.Variable([[1.0], [2.0]], name="two")


def test_aux_outputs_follow_the_loss_and_keep_their_structure() -> None:
    captured = capture(lambda x: (tf.reduce_mean(x @ weight_of_two), {"double": 2 * x, "sum": [x + x]}), (X,))
    assert len(captured.graph.outputs) == 3
    assert set(captured.aux) == {"double", "sum"}


def test_an_argument_that_is_the_aux_output() -> None:
    captured = capture(lambda x: (tf.reduce_mean(x @ weight_of_two), x), (X,))
    verify(captured.graph)
    assert len(captured.graph.outputs) == 2


# --- variables and constants


def test_variables_and_which_are_trainable() -> None:
    w, frozen = weight(2, 1), tf.Variable([[1.0]], trainable=False, name="frozen")
    captured = capture(lambda x: tf.reduce_mean(x @ w @ frozen), (X,))
    assert captured.variables == {"w": w, "frozen": frozen}
    assert captured.trainable == ("w",)
    assert [captured.graph.node(name).op for name in ("w", "frozen")] == ["variable", "variable"]


def test_variables_of_the_same_name_are_numbered() -> None:
    a, b = weight(2, 2), weight(2, 1)
    captured = capture(lambda x: tf.reduce_mean(x @ a @ b), (X,))
    assert captured.variables == {"w": a, "w_1": b}


@pytest.mark.parametrize("name", ["Mean", "matmul", "Identity"])
def test_a_variable_may_have_an_ops_name(name: str) -> None:
    w = weight(2, 1, name=name)
    captured = capture(lambda x: tf.reduce_mean(x @ w), (X,))
    verify(captured.graph)
    assert captured.variables == {f"{name}_1": w}


def test_a_variable_used_only_in_a_nested_function_is_found() -> None:
    w, inner_only = weight(2, 1), tf.Variable(2.0, name="inner")
    inner = tf.function(lambda y: y * inner_only)
    captured = capture(lambda x: tf.reduce_mean(inner(x @ w)), (X,))
    assert captured.trainable == ("w", "inner")


def test_large_eager_tensors_are_constants_not_variables() -> None:
    table = tf.reshape(tf.range(400.0), (2, 200))
    captured = capture(lambda x: tf.reduce_mean(x @ table) * weight_of_one, (X,))
    assert list(captured.constants) == ["capture/0"]
    np.testing.assert_array_equal(captured.constants["capture/0"], table)
    assert captured.graph.node("capture/0").op == "capture"


def test_small_eager_tensors_are_ops_with_names_that_every_process_gives() -> None:
    padding, scale = tf.constant(3), tf.constant(2.0)
    captured = capture(lambda x: tf.reduce_mean(tf.pad(x, [[0, 0], [0, padding]])) * scale * weight_of_one, (X,))
    assert not captured.constants
    values = {name: constant_value(captured.graph.node(name)) for name in ("constant/0", "constant/1")}
    assert values == {"constant/0": 3, "constant/1": 2.0}
    again = CapturedTensors(captured)[Value("constant/0")]
    assert tf.get_static_value(again) == 3


weight_of_one = tf.Variable(1.0, name="one")


# --- control edges


def test_control_edges_that_only_make_outputs_wait_for_reads_are_dropped() -> None:
    w, b = weight(2, 2), weight(2, name="b")
    traced = tf.function(lambda x: tf.reduce_mean(x @ w + b))
    spec = tf.TensorSpec((None, 2), tf.float32)
    assert any(op.control_inputs for op in traced.get_concrete_function(spec).graph.get_operations())
    assert controls(capture(traced, (X,)).graph) == {}


def test_a_read_before_a_write_stays_before_it() -> None:
    w, count = weight(2, 1), tf.Variable(0.0, trainable=False, name="count")

    def loss(x: tf.Tensor) -> tf.Tensor:
        before = count.read_value()
        count.assign(5.0)
        return tf.reduce_mean(x @ w) + before

    graph = capture(loss, (X,)).graph
    write = the(graph, "AssignVariableOp")
    assert write.effect == Effect.WRITE
    assert write.strings("writes") == ("count",)
    (source,) = (graph.node(name) for name in controls(graph)[write.name])
    assert (source.op, source.inputs[0].node) == ("ReadVariableOp", "count")
    assert write.controls[0].reason == "effect: writes what was read before"


def test_a_read_after_a_write_stays_after_it() -> None:
    w, count = weight(2, 1), tf.Variable(0.0, trainable=False, name="count")

    def loss(x: tf.Tensor) -> tf.Tensor:
        count.assign(5.0)
        return tf.reduce_mean(x @ w) + count.read_value()

    graph = capture(loss, (X,)).graph
    (read,) = (n for n in graph.nodes if n.op == "ReadVariableOp" and n.inputs[0].node == "count")
    assert [c.source for c in read.controls] == [the(graph, "AssignVariableOp").name]
    assert read.controls[0].reason == "effect: ordered after a write"


def test_a_write_is_not_ordered_after_reads_of_other_variables() -> None:
    w, count = weight(2, 1), tf.Variable(0.0, trainable=False, name="count")

    def loss(x: tf.Tensor) -> tf.Tensor:
        result = tf.reduce_mean(x @ w)
        with tf.control_dependencies([result]):
            count.assign_add(1.0)
        return result

    assert controls(capture(loss, (X,)).graph) == {}


def test_asserts_are_kept_and_ops_ordered_after_them_stay_after_them() -> None:
    w = weight(2, 1)

    def loss(x: tf.Tensor) -> tf.Tensor:
        check = tf.debugging.Assert(tf.reduce_all(x > 0), [x])
        with tf.control_dependencies([check]):
            checked = tf.exp(x)
        return tf.reduce_mean(checked @ w)

    graph = capture(loss, (X,)).graph
    (assertion,) = (node for node in graph.nodes if node.effect == Effect.SIDE)
    assert [c.source for c in the(graph, "Exp").controls] == [assertion.name]
    assert the(graph, "Exp").controls[0].reason == "effect: ordered after a side effect"


def test_prints_keep_their_order() -> None:
    w = weight(2, 1)

    def loss(x: tf.Tensor) -> tf.Tensor:
        tf.print("first")
        tf.print("second")
        return tf.reduce_mean(x @ w)

    graph = capture(loss, (X,)).graph
    first, second = (node for node in graph.nodes if node.op == "PrintV2")
    assert (first.effect, second.effect) == (Effect.SIDE, Effect.SIDE)
    assert controls(graph)[second.name] == [first.name]


def test_batch_norm_in_training_writes_its_moving_statistics() -> None:
    layer = keras.layers.BatchNormalization(name="bn")
    layer.build((None, 2))
    captured = capture(lambda x: tf.reduce_mean(layer(x, training=True)), (X,))
    written = {name for node in captured.graph.nodes if node.effect == Effect.WRITE for name in node.strings("writes")}
    assert written == {name for name in captured.variables if "moving" in name}
    assert len(written) == 2


def test_two_seeded_draws_read_and_write_the_seed_in_order() -> None:
    w, seed = weight(2, 1), keras.random.SeedGenerator(1)

    def loss(x: tf.Tensor) -> tf.Tensor:
        a = keras.random.uniform((2, 1), seed=seed)
        b = keras.random.uniform((2, 1), seed=seed)
        return tf.reduce_mean(x @ (w * a + b))

    graph = capture(loss, (X,)).graph
    first, second = (node for node in graph.nodes if node.effect == Effect.WRITE)
    assert first.strings("writes") == second.strings("writes")
    later = {name for name, sources in controls(graph).items() if first.name in sources}
    assert second.name in later, "the second write comes after the first"
    reads = [n for n in graph.nodes if n.op == "ReadVariableOp" and n.inputs[0].node == first.strings("writes")[0]]
    assert any(read.name in later for read in reads), "the second draw reads what the first wrote"


def test_unseeded_random_ops_have_the_effect_random() -> None:
    w = weight(2, 1)
    graph = capture(lambda x: tf.reduce_mean(x @ (w * tf.random.normal((2, 1)))), (X,)).graph
    assert the(graph, "RandomStandardNormal").effect == Effect.RANDOM


# --- the function library


def test_bodies_of_loops_branches_and_calls_are_kept() -> None:
    w = weight(2, 1)
    helper = tf.function(lambda y: y * w[0, 0])

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, helper(y)), (0, x))[1]
        return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_mean(y), lambda: 0.0)

    graph = capture(loss, (X,)).graph
    names = [name for name, _ in graph.library]
    assert sum("while" in name for name in names) >= 2
    assert sum("cond" in name for name in names) >= 2
    referred = [value.name for node in graph.nodes for _, value in node.attrs if hasattr(value, "name")]
    assert {name for name in referred if name.startswith(("while", "cond"))} <= set(names)


# --- the user's function


def test_the_users_function_and_its_traces_do_not_change() -> None:
    traced: list[int] = []
    w = weight(2, 1)

    @tf.function
    def loss(x: tf.Tensor) -> tf.Tensor:
        traced.append(1)
        return tf.reduce_mean(x @ w)

    loss(X)
    concrete = loss.get_concrete_function(X)
    before = concrete.graph.as_graph_def().SerializeToString(deterministic=True)
    capture(loss, (X,))
    assert len(traced) == 2, "once for the user, once for the capture"
    assert loss.experimental_get_tracing_count() == 1
    assert loss.get_concrete_function(X) is concrete
    assert concrete.graph.as_graph_def().SerializeToString(deterministic=True) == before


def test_the_python_function_runs_once() -> None:
    traced: list[int] = []

    def loss(x: tf.Tensor) -> tf.Tensor:
        traced.append(1)
        return tf.reduce_mean(x @ weight_of_two)

    capture(loss, (X,))
    assert len(traced) == 1


@pytest.mark.parametrize("rows", [None, 4])
def test_an_input_signature_must_leave_axis_0_open(rows: int | None) -> None:
    loss = tf.function(
        lambda x: tf.reduce_mean(x @ weight_of_two), input_signature=[tf.TensorSpec((rows, 2), tf.float32)]
    )
    if rows is None:
        assert capture(loss, (X,)).trainable == ("two",)
    else:
        with pytest.raises(CaptureError, match="input_signature fixes axis 0 to 4; micro-batches need it to be None"):
            capture(loss, (X,))


# --- refusals


def loss_of(make: Callable[[tf.Tensor], Any]) -> Callable[[tf.Tensor], Any]:
    def my_loss(x: tf.Tensor) -> Any:
        return make(x @ weight_of_two)

    return my_loss


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda y: y, r"loss of my_loss has shape \(None, 1\), not \(\): return its mean .* \(tf.reduce_mean\)"),
        (lambda y: tf.cast(tf.reduce_mean(y), tf.int32), "the loss of my_loss is int32, not a float"),
        (lambda y: None, r"my_loss must return a scalar loss, or \(loss, aux\), but returns NoneType"),
        (lambda y: [tf.reduce_mean(y)], "but returns list"),
        (lambda y: (tf.reduce_mean(y), y, y), "but returns tuple"),
    ],
)
def test_invalid_losses_are_refused(make: Callable[[tf.Tensor], Any], message: str) -> None:
    with pytest.raises(LossError, match=message):
        capture(loss_of(make), (X,))


def test_an_aux_output_that_is_not_a_tensor_is_refused() -> None:
    with pytest.raises(CaptureError, match="every output of my_loss must be a tensor"):
        capture(loss_of(lambda y: (tf.reduce_mean(y), {"a": y, "b": None})), (X,))


def test_a_function_without_trainable_variables_is_refused() -> None:
    frozen = tf.Variable([[1.0], [1.0]], trainable=False)
    with pytest.raises(CaptureError, match=r"lambda uses no trainable variable, so there is nothing to train: let it"):
        capture(lambda x: tf.reduce_mean(x @ frozen), (X,))


def test_a_captured_table_that_is_read_is_a_constant() -> None:
    initializer = tf.lookup.KeyValueTensorInitializer(tf.constant([1], tf.int64), tf.constant([1.0]))
    table = tf.lookup.StaticHashTable(initializer, 0.0)
    captured = capture(loss_of(lambda y: tf.reduce_mean(y) * table.lookup(tf.constant(1, tf.int64))), (X,))
    assert [constant.dtype for constant in captured.constants.values()].count(tf.resource) == 1


def test_another_captured_resource_is_refused() -> None:
    numbers = iter(tf.data.Dataset.range(9))
    with pytest.raises(CaptureError, match=r"nor a lookup table .*the op IteratorGetNext; .*pass the values"):
        capture(loss_of(lambda y: tf.reduce_mean(y) * tf.cast(numbers.get_next(), tf.float32)), (X,))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: tf.reduce_sum(x @ weight_of_two) / x.shape[0],
        lambda x: tf.reduce_mean(tf.reshape(x, (x.shape[0], 2)) @ weight_of_two),
        lambda x: sum(tf.reduce_mean(x[i] * weight_of_one) for i in range(x.shape[0])),
    ],
)
def test_a_static_batch_size_is_refused_with_a_hint(make: Callable[[tf.Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"(?s)unknown batch size on axis 0 .* x.shape\[0\], .* tf.shape\(x\)\[0\]"):
        capture(make, (X,))


def test_a_static_batch_size_is_known_where_the_whole_batch_runs_at_once() -> None:
    captured = capture(lambda x: tf.reduce_sum(x @ weight_of_two) / x.shape[0], (X,), sized=True)
    assert captured.signature == (tf.TensorSpec(X.shape, X.dtype),)
    assert capture(lambda x: tf.reduce_sum(x @ weight_of_two), (X,), sized=True).signature[0].shape[0] is None


def test_a_function_of_other_arguments_is_refused() -> None:
    def takes_two(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(x @ weight_of_two + y)

    with pytest.raises(CaptureError, match=r"takes_two cannot be traced: .*missing a required argument: 'y'"):
        capture(takes_two, (X,))


def test_a_batch_given_as_one_tuple_is_refused_with_a_hint() -> None:
    def takes_two(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(x @ weight_of_two + y)

    with pytest.raises(CaptureError, match=r"The batch is one tuple: give its tensors one by one, step\(\*batch\)"):
        capture(takes_two, ((X, X),))


def test_an_error_that_a_known_batch_size_has_too_is_not_blamed_on_the_unknown_one() -> None:
    dense = keras.layers.Dense(1)
    dense.build((None, 7))
    with pytest.raises(CaptureError, match=r"cannot be traced: (?s:.*)expected axis -1 of input shape to have value 7"):
        capture(lambda x: tf.reduce_mean(dense(x)), (X,))


def test_an_error_of_the_users_function_is_raised_as_it_is() -> None:
    @tf.function(autograph=False)
    def broken(x: tf.Tensor) -> tf.Tensor:
        raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        capture(broken, (X,))


def test_a_frozen_keras_layer_is_not_trained() -> None:
    """Freezing a layer marks its Keras variables, not TensorFlow's."""
    layers = [keras.layers.Dense(2, name=name) for name in ("a", "b", "c")]
    model = keras.Sequential([keras.Input((2,)), *layers])
    layers[1].trainable = False
    captured = capture(lambda x: tf.reduce_mean(model(x)), (X,))
    trained = [captured.variables[name] for name in captured.trainable]
    assert [any(v is w.value for v in trained) for layer in layers for w in layer.weights] == [True] * 2 + [
        False
    ] * 2 + [True] * 2
    layers[0].trainable = layers[2].trainable = False
    with pytest.raises(CaptureError, match="uses no trainable variable"):
        capture(lambda x: tf.reduce_mean(model(x)), (X,))
