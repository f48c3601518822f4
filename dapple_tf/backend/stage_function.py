"""One TensorFlow function for each stage function of the IR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.write_graph import import_graph, needed_library
from graph_passes.ir.graph import Function


def build_function(
    function: Function, constants: Mapping[str, tf.Tensor], library: Mapping[str, bytes], *, whole: bool
) -> Any:
    """The ConcreteFunction of ``function``: it takes its ports in order (resources for variables).

    ``whole``: TensorFlow does not inline its calls, so the graph that runs does not grow with the model times the
    micro-batches. A function that is called once is better inlined: its ops are then optimised with their
    neighbours. TensorFlow's automatic control dependencies keep the order of side effects inside.
    """
    body_graph = function.graph.replace(library=needed_library(function.graph, library))
    by_input = dict(zip(function.graph.inputs, range(len(function.inputs)), strict=True))
    captured = {node.name: constants[node.name] for node in function.graph.nodes if node.op == "capture"}
    specs = [_spec(port.type.dtype.name) for port in function.inputs]

    def body(*inputs: Any) -> list[Any]:
        known = {name: inputs[index] for name, index in by_input.items()}
        known |= {name: tf.identity(value) for name, value in captured.items()}
        return import_graph(body_graph, known, "body")

    traced = tf.function(
        body, autograph=False, input_signature=specs, experimental_attributes={internals.NO_INLINE: whole}
    )
    return traced.get_concrete_function()


def _spec(dtype: str) -> tf.TensorSpec:
    return tf.TensorSpec([] if dtype == "resource" else None, tf.as_dtype(dtype))
