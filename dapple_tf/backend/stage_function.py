"""Build the TensorFlow function of a stage function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.write_graph import import_graph, needed_library
from graph_passes.ir.graph import Function, Port


def build_function(
    function: Function, constants: Mapping[str, tf.Tensor], library: Mapping[str, bytes], *, whole: bool
) -> Any:
    """Return the ConcreteFunction of ``function``, which takes a tensor for each port (a resource for a variable).

    ``constants``: values of ``capture`` nodes by name. ``library``: serialised functions that ops call, by name.
    ``whole``: TensorFlow does not inline calls of the function, so that the graph that runs does not grow with the
    model's size times the micro-batches. A function with one call is better inlined: its ops are then optimised
    together with their neighbours. TensorFlow's automatic control dependencies order side effects inside.
    """
    graph = function.graph.replace(library=needed_library(function.graph, library))
    captured = {node.name: constants[node.name] for node in function.graph.nodes if node.op == "capture"}

    def body(*arguments: Any) -> list[Any]:
        inputs = dict(zip(graph.inputs, arguments, strict=True))
        inputs |= {name: tf.identity(value) for name, value in captured.items()}
        return import_graph(graph, inputs, "body")

    traced = tf.function(
        body,
        autograph=False,
        input_signature=[_port_spec(port) for port in function.inputs],
        experimental_attributes={internals.NO_INLINE: whole},
    )
    return traced.get_concrete_function()


def _port_spec(port: Port) -> tf.TensorSpec:
    dtype = port.type.dtype.name
    return tf.TensorSpec([] if dtype == "resource" else None, tf.as_dtype(dtype))
