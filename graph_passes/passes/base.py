"""Passes: frozen values whose fields are their options, run one after the other under observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from graph_passes.errors import GraphError
from graph_passes.ir.graph import Graph
from graph_passes.ir.verify import verify


@runtime_checkable
class Pass(Protocol):
    """A pure function from a valid graph to a valid graph."""

    @property
    def name(self) -> str:
        """How errors and dumps call the pass."""

    def __call__(self, graph: Graph) -> Graph:
        """The rewritten graph."""


Observer = Callable[[str, Graph], None]
"""Called with the name of each pass and the graph it left."""


def run_passes(graph: Graph, passes: Sequence[Pass], observers: Sequence[Observer] = ()) -> Graph:
    """Apply ``passes`` in order, verifying the graph after each.

    Raises GraphError that names the pass that left an invalid graph, and the pass before it.
    """
    before = "the input"
    for step in passes:
        graph = step(graph)
        try:
            verify(graph)
        except GraphError as error:
            raise GraphError(f"pass {step.name!r} (after {before}) left an invalid graph: {error}") from error
        for observe in observers:
            observe(step.name, graph)
        before = repr(step.name)
    return graph
