"""Read the bodies of the functions that a trace calls, with their shapes for a batch of a given size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.read_graph import read_graph, read_shapes, read_value
from graph_passes.ir.graph import Graph, Node, Shape

_SCOPE = "inferred"


@dataclass(frozen=True)
class Body:
    """A function's body. ``graph``: its inputs are ``arg`` nodes. ``shapes``: of all nodes, as far as known."""

    graph: Graph
    shapes: Mapping[str, Sequence[Shape]]
    func_graph: Any


def read_body(func_graph: Any, name: str, shapes: Sequence[Shape]) -> Body:
    """Return the body of the function ``name`` of the FuncGraph ``func_graph`` for arguments of these shapes."""
    return read_function(internals.function_graph(func_graph, name), name, shapes)


def read_function(body: Any, name: str, shapes: Sequence[Shape]) -> Body:
    """Return the body of a function, whose FuncGraph is ``body``, for arguments of these shapes."""
    inputs = {t.op.name: Node(f"input/{i}", "arg") for i, t in enumerate(body.inputs)}
    graph = read_graph(body, inputs, name)
    graph = graph.replace(
        inputs=tuple(node.name for node in inputs.values()),
        outputs=tuple(read_value(tensor, inputs) for tensor in body.outputs),
    )
    found = _infer(body, shapes)
    found |= {node.name: (shape,) for node, shape in zip(inputs.values(), shapes, strict=True)}
    return Body(graph, found, body)


def _infer(body: Any, shapes: Sequence[Shape]) -> dict[str, tuple[Shape, ...]]:
    scratch = tf.Graph()
    try:
        with scratch.as_default():
            fed = {
                tensor.name: internals.placeholder_like(tensor, None if shape.dims is None else list(shape.dims))
                for tensor, shape in zip(body.inputs, shapes, strict=True)
            }
            tf.graph_util.import_graph_def(body.as_graph_def(), input_map=fed, name=_SCOPE)
    except ValueError:  # the body does not accept these shapes; unknown shapes are always correct
        return {}
    return read_shapes(scratch, f"{_SCOPE}/")
