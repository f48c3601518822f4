"""Build the TensorFlow function of a stage function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.foreign_reads import pass_values
from dapple_tf.frontend.write_graph import import_graph, needed_library
from dapple_tf.graph_passes.ir.graph import OTHER, Function, TensorType

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

    traced = tf.function(
        read_and_call,
        autograph=False,
        input_signature=[spec_of(port.type) for port in function.inputs],
        experimental_attributes={internals.NO_INLINE: True},
    )
    return traced.get_concrete_function()


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
