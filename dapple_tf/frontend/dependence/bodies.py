"""Read the bodies of the functions that a trace calls into the IR, with their shapes for one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dapple_tf.frontend.inference import BodyShapes, Shapes, argument_name
from dapple_tf.frontend.read_graph import read_graph, read_value
from dapple_tf.graph_passes.ir.graph import Graph, Node


@dataclass(frozen=True)
class Body:
    """A function's body. ``graph``: its inputs are ``arg`` nodes. ``shapes``: of all nodes, as far as known.

    ``kept``: see ``BodyShapes``.
    """

    graph: Graph
    shapes: Shapes
    func_graph: Any
    kept: frozenset[int]


def read_body(found: BodyShapes, name: str) -> Body:
    """Return the body of the function ``name``, whose shapes were inferred."""
    body = found.func_graph
    inputs = {t.op.name: Node(argument_name(i), "arg") for i, t in enumerate(body.inputs)}
    graph = read_graph(body, inputs, name)
    graph = graph.replace(
        inputs=tuple(node.name for node in inputs.values()),
        outputs=tuple(read_value(tensor, inputs) for tensor in body.outputs),
    )
    return Body(graph, found.shapes, body, found.kept)
