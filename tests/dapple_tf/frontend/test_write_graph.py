"""Op-level graphs of the IR as GraphDefs: what they compute, and which functions they need."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2

from dapple_tf import internals
from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.write_graph import import_graph, needed_library, rename_functions, write_graph
from dapple_tf.graph_passes.ir.graph import DType, Effect, FunctionRef, Graph, Node, Opaque, attributes, tensor

X = np.ones((4, 2), np.float32)


def imported(definition: graph_pb2.GraphDef, name: str, **inputs: tf.Tensor) -> tf.Tensor:
    """Run a written graph: one of its tensors, given its placeholders."""
    with tf.Graph().as_default() as graph:
        placeholders = {k: tf.compat.v1.placeholder(v.dtype) for k, v in inputs.items()}
        (output,) = tf.graph_util.import_graph_def(
            definition, {k.replace("__", "/"): v for k, v in placeholders.items()}, [name], name=""
        )
        with tf.compat.v1.Session(graph=graph) as session:
            return session.run(output, {placeholders[k]: v.numpy() for k, v in inputs.items()})


def test_a_written_graph_computes_what_the_function_does() -> None:
    w = tf.Variable(1.0)

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.nn.conv2d(tf.reshape(x, (-1, 1, 2, 1)), tf.ones((1, 2, 1, 3)), [1, 1, 1, 1], "VALID")
        z = tf.cond(tf.reduce_sum(y) > 0, lambda: tf.einsum("abcd->ad", y), lambda: tf.zeros((4, 3)))
        return tf.reduce_mean(tf.one_hot(tf.argmax(z, -1), 3) + tf.concat([z, z], 0)[:4]) + 0.0 * w

    captured = capture(loss, (X,))
    definition = write_graph(captured.graph.replace(nodes=without_variables(captured.graph)))
    (summed,) = (n.inputs[0] for n in captured.graph.nodes if n.op == "Mean")
    found = imported(definition, f"{summed.node}:{summed.index}", input__0=tf.constant(X))
    np.testing.assert_allclose(np.mean(found), loss(tf.constant(X)), rtol=1e-6)


def without_variables(graph: Graph) -> tuple[Node, ...]:
    gone = {node.name for node in graph.nodes if node.op == "variable"}
    kept = []
    for node in graph.nodes:
        if node.name in gone or any(value.node in gone for value in node.inputs):
            gone.add(node.name)
        else:
            kept.append(node)
    return tuple(kept)


def test_a_scalars_shape_is_an_attribute_too() -> None:
    scale = tf.Variable(1.0)
    graph = capture(lambda x: (tf.reduce_mean(x) * scale, tf.ensure_shape(tf.reduce_sum(x), ())), (X,)).graph
    (ensure,) = (node for node in graph.nodes if node.op == "EnsureShape")
    definition = write_graph(graph.replace(nodes=without_variables(graph)))
    assert imported(definition, f"{ensure.name}:0", input__0=tf.constant(X)) == X.sum()


def test_attributes_of_the_ir_alone_are_not_written() -> None:
    own = attributes({"layer": "a/b", "within": "a", "writes": ("v",), "T": DType("float32")})
    node = Node("n", "Identity", outputs=(tensor("float32"),), attrs=own)
    (proto,) = write_graph(Graph("g", (node,))).node
    assert list(proto.attr) == ["T"]


def test_inputs_become_placeholders_and_control_edges_are_written() -> None:
    graph = Graph(
        "g",
        (
            Node("input/0", "arg", outputs=(tensor("int32", None, 2),)),
            Node("say", "PrintV2", effect=Effect.SIDE),
            Node("same", "Identity", Node("input/0", "arg", outputs=(tensor("int32"),)).values()).after("say", "why"),
        ),
    )
    placeholder, _, same = write_graph(graph).node
    assert (placeholder.op, placeholder.attr["dtype"].type) == ("Placeholder", tf.int32.as_datatype_enum)
    assert list(same.input) == ["input/0", "^say"]


def test_inputs_that_an_op_takes_are_replaced_and_others_may_be_outputs_or_unused() -> None:
    names = ("input/0", "input/1", "input/2")
    taken, returned, unused = (Node(name, "arg", outputs=(tensor("int32"),)) for name in names)
    same = Node("same", "Identity", taken.values(), outputs=(tensor("int32"),))
    same = dataclasses.replace(same, attrs=attributes({"T": DType("int32")}))
    graph = Graph("g", (taken, returned, unused, same), outputs=(*same.values(), *returned.values()))
    with tf.Graph().as_default() as built:
        inputs = {name: tf.constant(i + 3) for i, name in enumerate(names)}
        found = import_graph(graph, inputs, "body")
        with tf.compat.v1.Session(graph=built) as session:
            assert session.run(found) == [3, 4]
    assert "Placeholder" not in {op.type for op in built.get_operations()}


# --- the library


def test_the_needed_library_has_all_functions_called_indirectly_and_no_others() -> None:
    innermost = tf.function(lambda x: tf.exp(x))
    outer = tf.function(lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, innermost(x)), (0, x))[1])
    other = tf.function(lambda x: tf.tanh(x))
    w = tf.Variable(1.0)
    graph = capture(lambda x: (tf.reduce_mean(outer(x) * w), other(x)), (X,)).graph
    library = dict(graph.library)
    loops = tuple(node for node in graph.nodes if node.op == "PartitionedCall")
    first = next(node for node in loops if any(uses(library, name, "Exp") for name in reached(library, node)))

    needed = dict(needed_library(Graph("g", (first,)), library))
    assert set(needed) == reached(library, first)
    assert any(uses(library, name, "Exp") for name in needed)
    assert not any(uses(library, name, "Tanh") for name in needed)
    assert all(needed[name] == library[name] for name in needed)


def test_renamed_functions_compute_the_same() -> None:
    inner = tf.function(lambda x: tf.exp(x))
    w = tf.Variable(1.0)

    def loss(x: tf.Tensor) -> tf.Tensor:
        looped = tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, inner(x) / 9), (0, x))[1]
        chosen = tf.switch_case(tf.size(x) % 2, [lambda: looped, lambda: inner(looped)])
        return tf.reduce_mean(chosen) * w

    captured = capture(loss, (X,))
    renamed = rename_functions(captured.graph, "_again")
    assert {name for name, _ in renamed.library} == {f"{name}_again" for name, _ in captured.graph.library}

    def run(graph: Graph) -> tf.Tensor:
        def imported_loss() -> tf.Tensor:
            (variable,) = captured.variables
            handle = internals.capture_of(tf.compat.v1.get_default_graph(), w.handle)
            return import_graph(graph, {graph.inputs[0]: tf.constant(X), variable: handle}, "imported")[0]

        with internals.registered_functions([definition for _, definition in graph.library]):
            return tf.function(imported_loss)()

    assert float(run(renamed)) == pytest.approx(float(loss(tf.constant(X))))


def body(library: dict[str, bytes], name: str) -> graph_pb2.GraphDef:
    definition = graph_pb2.GraphDef()
    definition.library.function.add().ParseFromString(library[name])
    return definition


def uses(library: dict[str, bytes], name: str, op: str) -> bool:
    return any(node.op == op for node in body(library, name).library.function[0].node_def)


def reached(library: dict[str, bytes], node: Node) -> set[str]:
    """Return the functions that ``node`` reaches, by searching serialised bodies for names: independent of parsing."""
    found, pending = set(), [value.name for _, value in node.attrs if isinstance(value, FunctionRef)]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += [other for other in library if other.encode() in library[name] and other != name]
    return found


def test_functions_named_in_opaque_attributes_are_needed() -> None:
    both = attr_value_pb2.AttrValue()
    both.list.func.add(name="f")
    both.list.func.add(name="g")
    one = attr_value_pb2.AttrValue(func=attr_value_pb2.NameAttrList(name="h"))
    node = Node("n", "Case", attrs=attributes({
        "branches": Opaque(both.SerializeToString()), "other": Opaque(one.SerializeToString())
    }))  # fmt: skip
    library = dict.fromkeys(("f", "g", "h", "unused"), b"")
    assert [name for name, _ in needed_library(Graph("g", (node,)), library)] == ["f", "g", "h"]
