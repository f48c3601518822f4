"""Return the complete gradients with the loss, to compare them with those of one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graph_passes.ir.graph import Graph
from graph_passes.ir.names import nodes_of
from graph_passes.ir.ops import OpName
from graph_passes.passes.base import Contract


@dataclass(frozen=True)
class ExposeGradients:
    """Add the gradients of all variables as last outputs, in the order of ``exposed_gradients``."""

    name: str = "expose_gradients"
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        requires_if_trained=frozenset({OpName.REDUCED_GRADIENTS}),
        requires_if_sparse=frozenset({OpName.GATHER_SLICES}),
    )

    def __call__(self, graph: Graph) -> Graph:
        return expose_gradients(graph)


def expose_gradients(graph: Graph) -> Graph:
    """Return the graph with the outputs of all ``reduced_gradients``, then of all ``gather_slices``, as outputs."""
    complete = (*nodes_of(graph, OpName.REDUCED_GRADIENTS), *nodes_of(graph, OpName.GATHER_SLICES))
    return graph.replace(outputs=(*graph.outputs, *(value for node in complete for value in node.values())))


def exposed_gradients(graph: Graph) -> tuple[str, ...]:
    """Return the variables whose dense gradients ``ExposeGradients`` adds as outputs, in order."""
    return tuple(name for node in nodes_of(graph, OpName.REDUCED_GRADIENTS) for name in node.strings("variables"))


def exposed_slices(graph: Graph) -> tuple[str, ...]:
    """Return the variables whose slices and indices it adds after these, in order."""
    return tuple(node.string("variable") for node in nodes_of(graph, OpName.GATHER_SLICES))
