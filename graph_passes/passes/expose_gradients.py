"""Return the complete gradients with the loss, to compare them with those of one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graph_passes.ir.graph import Graph
from graph_passes.ir.names import nodes_of
from graph_passes.ir.ops import OpName
from graph_passes.passes.base import Contract
from graph_passes.passes.gather_slices import densify


@dataclass(frozen=True)
class ExposeGradients:
    """Add the gradients of all variables as last outputs, in the order of ``exposed_gradients``."""

    name: str = "expose_gradients"
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        requires_if_trained=frozenset({OpName.REDUCED_GRADIENTS}),
        requires_if_sparse=frozenset({OpName.GATHER_SLICES}),
        may_produce=frozenset({OpName.DENSIFY}),
    )

    def __call__(self, graph: Graph) -> Graph:
        return expose_gradients(graph)


def expose_gradients(graph: Graph) -> Graph:
    """Return the graph with the outputs of all ``reduced_gradients`` as further outputs, then those of ``densify``.

    There is a ``densify`` for each sparse gradient, added where there is none yet.
    """
    dense = [densify(node) for node in nodes_of(graph, OpName.GATHER_SLICES)]
    added = [node for node in dense if node.name not in graph.by_name]
    values = [value for node in (*nodes_of(graph, OpName.REDUCED_GRADIENTS), *dense) for value in node.values()]
    return graph.replace(nodes=(*graph.nodes, *added), outputs=(*graph.outputs, *values))


def exposed_gradients(graph: Graph) -> tuple[str, ...]:
    """Return the variables whose gradients ``ExposeGradients`` adds as outputs, in order."""
    dense = [name for node in nodes_of(graph, OpName.REDUCED_GRADIENTS) for name in node.strings("variables")]
    return (*dense, *(node.string("variable") for node in nodes_of(graph, OpName.GATHER_SLICES)))
