"""Build the TensorFlow function of a stage function."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.write_graph import import_graph, needed_library
from dapple_tf.graph_passes.ir.graph import OTHER, Function, Node, Port, TensorType, Value

BODY = "body"
"""The name scope of a stage function's ops in the TensorFlow function that is made of it."""

Constants = Mapping[str, Any]
Library = Mapping[str, bytes]


def build_function(function: Function, constants: Constants, library: Library, *, whole: bool) -> Any:
    """Return the ConcreteFunction of ``function``, which takes a tensor for each port (a resource for a variable).

    ``constants``: values of ``capture`` nodes by name. ``library``: serialised functions that ops call, by name.
    ``whole``: TensorFlow does not inline calls of the function, so that the graph that runs does not grow with the
    model's size times the micro-batches. Where each function is called once, inlined ops are optimised together with
    their neighbours. TensorFlow's automatic control dependencies order side effects inside.
    """
    return _build(function, constants, library, whole=whole, jit_compile=None)


def build_compiled_function(
    function: Function, constants: Constants, library: Library, foreign: Collection[str]
) -> Any:
    """Return the ConcreteFunction of ``function`` that XLA compiles, with the same arguments.

    ``foreign``: the variables that live on another device, which XLA cannot read: they are read before.
    """
    if not foreign:
        return _build(function, constants, library, whole=True, jit_compile=True)
    compiled = _build(pass_values(function, foreign), constants, library, whole=True, jit_compile=True)

    def read_and_call(*arguments: Any) -> Any:
        passed = list(arguments)
        for i, port in function.input_ports("variable"):
            if port.name in foreign:
                passed[i] = tf.raw_ops.ReadVariableOp(resource=arguments[i], dtype=compiled.inputs[i].dtype)
        return compiled(*passed)

    signature = [spec_of(port.type) for port in function.inputs]
    return internals.trace_function(read_and_call, signature, internals.NO_INLINE)


def import_body(function: Function, constants: Constants, library: Library, arguments: Sequence[Any]) -> list[Any]:
    """Import the ops of ``function`` into the graph under construction, and return the tensors of its outputs."""
    graph = function.graph.replace(library=needed_library(function.graph, library))
    inputs = dict(zip(graph.inputs, arguments, strict=True))
    inputs |= {node.name: tf.identity(constants[node.name]) for node in graph.nodes if node.op == "capture"}
    return import_graph(graph, inputs, BODY)


def _build(function: Function, constants: Constants, library: Library, *, whole: bool, jit_compile: bool | None) -> Any:
    def body(*arguments: Any) -> list[Any]:
        return import_body(function, constants, library, arguments)

    traced = tf.function(
        body,
        autograph=False,
        jit_compile=jit_compile,
        input_signature=[spec_of(port.type) for port in function.inputs],
        experimental_attributes={internals.NO_INLINE: whole},
    )
    return traced.get_concrete_function()


def spec_of(kind: TensorType) -> tf.TensorSpec:
    """Return the spec of a tensor of this type; dimensions that are not known to be the batch's are left open."""
    dims = kind.shape.dims
    lengths = None if dims is None else [None if dim == OTHER else dim for dim in dims]
    return tf.TensorSpec(lengths, tf.as_dtype(kind.dtype.name))


# --- Stage functions that take the values of variables in place of the variables, which live on other devices


_READ = "ReadVariableOp"


def only_read(function: Function, variable: str) -> bool:
    """Return whether the function does nothing to the variable but read it, so that its value can be passed."""
    holders = {function.graph.inputs[i] for i, port in function.input_ports("variable") if port.name == variable}
    users = [node for node in function.graph.nodes if any(value.node in holders for value in node.inputs)]
    return all(node.op == _READ for node in users)


def pass_values(function: Function, variables: Collection[str]) -> Function:
    """Return the function whose ports of these ``variables``, which it may only read, take their values."""
    graph = function.graph
    positions = {graph.inputs[i]: i for i, port in function.input_ports("variable") if port.name in variables}
    read_of = {node.name: node.inputs[0].node for node in graph.nodes if _reads(node, positions)}
    types = {holder: graph.node(read).outputs[0] for read, holder in read_of.items()}
    nodes = []
    for node in graph.nodes:
        if node.name in read_of:
            continue
        if node.name in types:
            nodes.append(Node(node.name, "arg", (), (types[node.name],)))
            continue
        inputs = tuple(Value(read_of.get(value.node, value.node), value.index) for value in node.inputs)
        controls = tuple(control for control in node.controls if control.source not in read_of)
        nodes.append(dataclasses.replace(node, inputs=inputs, controls=controls))
    outputs = tuple(Value(read_of.get(value.node, value.node), value.index) for value in graph.outputs)
    ports = list(function.inputs)
    for holder, kind in types.items():
        position = positions[holder]
        ports[position] = Port("variable", ports[position].name, kind)
    return dataclasses.replace(function, graph=graph.replace(nodes=tuple(nodes), outputs=outputs), inputs=tuple(ports))


def _reads(node: Node, holders: Collection[str]) -> bool:
    return node.op == _READ and node.inputs[0].node in holders
