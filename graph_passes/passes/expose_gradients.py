"""Make the complete gradients outputs of the graph, so that they can be compared with one device's."""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.ir.graph import Graph
from graph_passes.ir.names import nodes_of


@dataclass(frozen=True)
class ExposeGradients:
    """Add the gradients of all variables as last outputs, in the order of ``exposed_gradients``."""

    name: str = "expose"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        values = tuple(value for node in nodes_of(graph, "reduced") for value in node.values())
        return graph.replace(outputs=(*graph.outputs, *values))


def exposed_gradients(graph: Graph) -> tuple[str, ...]:
    """The variables whose gradients ``ExposeGradients`` returns, in order."""
    return tuple(name for node in nodes_of(graph, "reduced") for name in node.strings("variables"))
