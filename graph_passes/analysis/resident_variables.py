"""Find the variables that the nodes of a finished graph read or write, and those that a rank must keep in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dapple_tf.graph_passes.analysis.layers import written_variables
from dapple_tf.graph_passes.ir.graph import Graph, Node
from dapple_tf.graph_passes.ir.names import STAGE_OPS, nodes_of
from dapple_tf.graph_passes.ir.ops import OpName

# Ops that use a replica's copy of a variable, where it has one.
_USE_COPIES = frozenset({*STAGE_OPS, OpName.READ_STATE})
_USE_OWN = frozenset({OpName.READ_VARIABLE, OpName.READ_STATE, OpName.COMMIT, OpName.STORE_VERSION})


def resident_variables(graph: Graph) -> frozenset[str]:
    """Return the names of the variables that a rank's graph (see ``project``) reads or writes itself.

    A copy is a variable of its own: where another rank owns a variable (tied weights), only its copy is resident.
    """
    return frozenset(name for _, names in variable_uses(graph) for name in names)


def variable_uses(graph: Graph) -> Iterator[tuple[Node, Sequence[str]]]:
    """Yield each node with the names of the variables that it reads or writes itself, not a replica's copy of them."""
    copies = {
        (node.integer("stage"), node.integer("replica"), name)
        for node in nodes_of(graph, OpName.REFRESH)
        for name in node.strings("variables")
    }
    for node in graph.nodes:
        names = _variables_of(graph, node)
        if node.op in _USE_COPIES:
            place = node.integer("stage"), node.integer("replica")
            names = [name for name in names if (*place, name) not in copies]
        yield node, names


def written_by(graph: Graph, node: Node, names: Sequence[str]) -> Sequence[str]:
    """Return those of the variables ``names``, which a node uses, that it writes."""
    if node.has("function"):
        written = written_variables(graph.function(node.string("function")).graph)
        return [name for name in names if name in written]
    return names if node.op in (OpName.COMMIT, OpName.COUNT_UPDATE) else ()


def _variables_of(graph: Graph, node: Node) -> Sequence[str]:
    """Return the names of the variables of which a node reads or writes the value or a copy."""
    if node.has("function"):
        return [port.name for _, port in graph.function(node.string("function")).input_ports("variable")]
    if node.op == OpName.REFRESH:
        return node.strings("variables")[len(node.inputs) :]  # the values of the first are inputs
    if node.op == OpName.COUNT_UPDATE:  # even where no update uses the step counter, such as SGD's
        return [node.string("variable")]
    return node.strings("variables") if node.op in _USE_OWN else ()
