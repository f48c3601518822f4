"""Gradients of stages, chained over the boundaries, equal the gradients of the whole loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError
from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.gradients import differentiate
from dapple_tf.frontend.write_graph import import_graph
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.graph_passes.ir.graph import OTHER, Graph, tensor
from dapple_tf.graph_passes.passes.backward import StageGradients
from dapple_tf.graph_passes.passes.partition import partition

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(5, 3))
IDS = np.array([0, 2, 2, 1, 0])
A, B, C = (tf.Variable(RANDOM.normal(size=(3, 3)), name=name) for name in "abc")
TABLE = tf.Variable(RANDOM.normal(size=(4, 3)), name="table")


def cut(
    loss: Callable[..., Any], batch: Sequence[Any], *starts: str, sparse: bool = True
) -> tuple[Captured, Graph, Any]:
    """Return a loss cut before the scopes ``starts``: the capture, the joint graph, and the gradients of stages."""
    captured = capture(tf.function(loss, autograph=False), batch)
    layers = find_layers(captured.graph)
    names = [layer.name for layer in layers.layers]
    stages = partition(layers, [next(i for i, n in enumerate(names) if n.startswith(start)) for start in starts])
    return captured, *differentiate(captured, stages, sparse=sparse)


def chain_gradients(captured: Captured, joint: Graph, found: Sequence[StageGradients], batch: Any) -> dict[str, Any]:
    """Return the gradients of all variables, by name, from those of the stages, the last stage first."""
    (loss,) = captured.graph.outputs[:1]

    def backward(*tensors: Any) -> dict[str, Any]:
        inputs = dict(zip(captured.graph.inputs, tensors, strict=True))
        now = tf.compat.v1.get_default_graph()
        inputs |= {name: internals.capture_of(now, v.handle) for name, v in captured.variables.items()}
        received: dict[Any, Any] = {loss: tf.ones([], loss_dtype)}
        total: dict[str, Any] = {}
        for index, stage in reversed(list(enumerate(found))):
            seeds = {name: received[value] for value, name in stage.seeds}
            wanted = [gradient for _, gradient in (*stage.boundary, *stage.variables)]
            tensors = import_graph(joint.replace(outputs=tuple(wanted)), inputs | seeds, f"stage{index}")
            received = {value: tensors[i] for i, (value, _) in enumerate(stage.boundary)}
            for (name, _), gradient in zip(stage.variables, tensors[len(stage.boundary) :], strict=True):
                total[name] = total[name] + gradient if name in total else gradient
        return total

    loss_dtype = captured.graph.type_of(loss).dtype.name
    results = tf.function(backward, autograph=False)(*map(tf.constant, batch))
    return {name: gradient.numpy() for name, gradient in results.items()}


def whole_gradients(loss: Callable[..., Any], captured: Captured, batch: Any) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        value = loss(*map(tf.constant, batch))
    names = list(captured.trainable)
    found = tape.gradient(value, [captured.variables[name] for name in names])
    return {n: tf.convert_to_tensor(g).numpy() for n, g in zip(names, found, strict=True) if g is not None}


def scoped(name: str, compute: Callable[..., Any], *tensors: Any) -> Any:
    with tf.name_scope(name):
        return compute(*tensors)


def straight(x: Any) -> Any:
    h = scoped("one", lambda x: tf.tanh(x @ A), x)
    h = scoped("two", lambda h: tf.nn.relu(h @ B), h)
    return scoped("three", lambda h: tf.reduce_mean(tf.square(h @ C)), h)


def skip(x: Any) -> Any:
    """A tensor of the first stage that the third reads too, through the second."""
    first = scoped("one", lambda x: tf.tanh(x @ A), x)
    h = scoped("two", lambda h: tf.tanh(h @ B), first)
    return scoped("three", lambda h: tf.reduce_mean(tf.square(h @ C + first)), h)


def tied(x: Any) -> Any:
    h = scoped("one", lambda x: tf.tanh(x @ A), x)
    h = scoped("two", lambda h: tf.tanh(h @ B), h)
    return scoped("three", lambda h: tf.reduce_mean(tf.square(h @ A)), h)


def integers_cross(x: Any) -> Any:
    """The indices of the largest entries cross the boundaries beside a tensor of floats."""

    def first(x: Any) -> Any:
        h = tf.tanh(x @ A)
        return h, tf.argmax(h, 1)

    h, largest = scoped("one", first, x)
    h = scoped("two", lambda h: tf.tanh(h @ B), h)
    return scoped("three", lambda h: tf.reduce_mean(tf.gather(h @ C, largest, axis=1, batch_dims=1)), h)


@tf.custom_gradient
def doubled_backward(x: Any) -> Any:
    """Identity with a gradient that is twice the true one."""
    return tf.identity(x), lambda gradient: 2.0 * gradient


def custom(x: Any) -> Any:
    h = scoped("one", lambda x: tf.tanh(x @ A), x)
    h = scoped("two", lambda h: doubled_backward(tf.tanh(h @ B)), h)
    return scoped("three", lambda h: tf.reduce_mean(tf.square(h @ C)), h)


def loop(x: Any) -> Any:
    def repeat(h: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ B)), (0, h))[1]

    h = scoped("one", lambda x: tf.tanh(x @ A), x)
    h = scoped("two", repeat, h)
    return scoped("three", lambda h: tf.reduce_mean(tf.square(h @ C)), h)


FIRST, SECOND = tf.function(lambda x: tf.tanh(x @ A)), tf.function(lambda x: tf.tanh(x @ B))


def calls(x: Any) -> Any:
    """Each boundary tensor is the result of a function call, which tf.gradients would differentiate."""
    h = scoped("one", FIRST, x)
    h = scoped("two", SECOND, h)
    return scoped("three", lambda h: tf.reduce_mean(tf.square(h @ C)), h)


@pytest.mark.parametrize("loss", [straight, skip, tied, integers_cross, custom, loop, calls])
@pytest.mark.parametrize("starts", [("two",), ("three",), ("two", "three")])
def test_gradients_of_the_stages_equal_those_of_the_whole(loss: Callable[..., Any], starts: tuple[str, ...]) -> None:
    captured, joint, found = cut(loss, (X,), *starts)
    whole = whole_gradients(loss, captured, (X,))
    chained = chain_gradients(captured, joint, found, (X,))
    assert chained.keys() == whole.keys()
    for name, gradient in whole.items():
        np.testing.assert_allclose(chained[name], gradient, rtol=1e-12, atol=1e-15, err_msg=name)


def embedded(ids: Any, x: Any) -> Any:
    h = scoped("one", lambda i: tf.tanh(tf.gather(TABLE, i)), ids)
    return scoped("two", lambda h: tf.reduce_mean(tf.square(h @ A - x)), h)


def test_gradients_of_an_embedding_are_dense_where_that_is_asked_for() -> None:
    captured, joint, found = cut(embedded, (IDS, X), "two", sparse=False)
    chained = chain_gradients(captured, joint, found, (IDS, X))
    np.testing.assert_allclose(chained["table"], whole_gradients(embedded, captured, (IDS, X))["table"], rtol=1e-12)
    assert not chained["table"][3].any()  # no sample has id 3


def test_gradients_of_an_embedding_are_slices_and_indices() -> None:
    _, joint, (first, second) = cut(embedded, (IDS, X), "two")
    assert first.variables == ()
    (use,) = first.slices
    assert (use.variable, use.rows, use.combine, use.position) == ("table", 4, "concat", 0)
    assert use.kinds == (tensor("float64", OTHER, 3), tensor("int64", OTHER))
    assert {joint.node(value.node).op for value in (use.slices, use.indices)} == {"Reshape"}
    assert (second.slices, [name for name, _ in second.variables]) == ((), ["a"])


def test_a_stage_before_all_trainable_variables_has_no_gradients() -> None:
    def loss(x: Any) -> Any:
        h = scoped("one", lambda x: tf.tanh(x * 2.0), x)
        return scoped("two", lambda h: tf.reduce_mean(tf.square(h @ A)), h)

    _, _, (first, second) = cut(loss, (X,), "two")
    assert first == StageGradients()
    assert second.boundary == ()
    assert [name for name, _ in second.variables] == ["a"]


def test_a_tensor_whose_gradient_is_stopped_gets_none() -> None:
    def loss(x: Any) -> Any:
        h = scoped("one", lambda x: tf.tanh(x @ A), x)
        return scoped("two", lambda h: tf.reduce_mean(tf.square(tf.stop_gradient(h) @ B)), h)

    _, _, (first, second) = cut(loss, (X,), "two")
    assert first == StageGradients()
    assert [name for name, _ in second.variables] == ["b"]


def test_the_joint_graph_keeps_the_shapes_that_were_known() -> None:
    """Differentiation reads the graph again; marks such as that of the batch axis are of the first reading."""
    captured, joint, _ = cut(straight, (X,), "two")
    for node in captured.graph.nodes:
        assert joint.node(node.name).outputs == node.outputs


def test_a_py_function_between_a_variable_and_the_loss_is_refused() -> None:
    def loss(x: Any) -> Any:
        h = scoped("one", lambda x: tf.ensure_shape(tf.py_function(lambda y: y, [x @ A], tf.float64), [None, 3]), x)
        return scoped("two", lambda h: tf.reduce_mean(tf.square(h @ B)), h)

    with pytest.raises(CaptureError, match=r"'one/EagerPyFunc' is a tf.py_function between a variable and the loss"):
        cut(loss, (X,), "two")


def test_a_write_of_backward_that_no_gradient_depends_on_is_refused() -> None:
    norm, w = tf.Variable(0.0, name="norm", trainable=False), tf.Variable(tf.ones([2]))

    @tf.custom_gradient
    def watched(x: Any) -> Any:
        def differentiate(dy: Any) -> Any:
            norm.assign(tf.norm(dy))
            return dy

        return tf.identity(x), differentiate

    with pytest.raises(CaptureError, match=r"backward writes norm .* no gradient depends on that write"):
        cut(lambda x: tf.reduce_sum(watched(x * w)), (tf.ones([4, 2]),))


def test_a_py_function_of_the_batch_alone_is_accepted() -> None:
    def loss(x: Any) -> Any:
        h = scoped("one", lambda x: tf.ensure_shape(tf.py_function(lambda y: 2 * y, [x], tf.float64), [None, 3]), x)
        return scoped("two", lambda h: tf.reduce_mean(tf.square(h @ A)), h)

    captured, joint, found = cut(loss, (X,), "two")
    chained = chain_gradients(captured, joint, found, (X,))
    np.testing.assert_allclose(chained["a"], whole_gradients(loss, captured, (X,))["a"], rtol=1e-12)
