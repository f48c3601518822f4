"""Find which nodes of a graph run before others, along data and control edges."""

from __future__ import annotations

from collections.abc import Iterable

from graph_passes.ir.graph import Node


class Precedence:
    """Whether a path of edges leads from one node to another; ``marked``: the nodes that are asked about, by name.

    ``nodes``: those of the graph in a topological order. A set of marked nodes is an integer, a bit for each, so it
    takes one operation of an edge to find those before each node.
    """

    def __init__(self, nodes: Iterable[Node], marked: Iterable[str]) -> None:
        self._bits = {name: 1 << i for i, name in enumerate(dict.fromkeys(marked))}
        self._before: dict[str, int] = {}
        reached: dict[str, int] = {}  # by node, the marked nodes before it, and itself
        for node in nodes:
            before = 0
            for source in node.predecessors():
                before |= reached[source]
            reached[node.name] = before | self._bits.get(node.name, 0)
            if node.name in self._bits:
                self._before[node.name] = before

    def __call__(self, first: str, second: str) -> bool:
        """Return whether ``first`` runs before ``second``. Raises KeyError for nodes that are not marked."""
        return bool(self._before[second] & self._bits[first])
