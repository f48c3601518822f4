"""Which variables a rank needs to hold: those whose own values its graph reads or writes."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.ir.graph import Graph, Node
from graph_passes.ir.names import nodes_of

# Work on a replica's copy of a variable, where it has one.
_ON_COPIES = frozenset({"forward", "backward", "weights", "state"})


def resident_variables(graph: Graph) -> frozenset[str]:
    """Names of the variables that a rank's graph (see ``project``) reads or writes itself.

    A copy is another variable: of what comes from the stage that owns it (tied weights) the rank holds nothing else.
    """
    copies = {
        (node.integer("stage"), node.integer("replica"), name)
        for node in nodes_of(graph, "refresh")
        for name in node.strings("variables")
    }
    held: set[str] = set()
    for node in graph.nodes:
        names = _named(graph, node)
        if node.op in _ON_COPIES:
            place = node.integer("stage"), node.integer("replica")
            names = [name for name in names if (*place, name) not in copies]
        held.update(names)
    return frozenset(held)


def _named(graph: Graph, node: Node) -> Sequence[str]:
    """Names of the variables, or of what it has copies of, that a node reads or writes."""
    if node.has("function"):
        return [port.name for _, port in graph.function(node.string("function")).input_ports("variable")]
    if node.op == "refresh":
        return node.strings("variables")[len(node.inputs) :]  # the first come as values
    return node.strings("variables") if node.op in ("read", "state", "commit") else ()
