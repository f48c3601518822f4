"""Return the complete gradients with the loss, to compare them with those of one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Graph, Node, make_node
from dapple_tf.graph_passes.ir.names import at, nodes_of, site_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.gather_slices import dense_type


@dataclass(frozen=True)
class ExposeGradients(BuiltInPass):
    """Add the gradients of all variables as last outputs; ``exposed_gradients`` gives their order."""

    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        requires_if_trained=frozenset({OpName.REDUCED_GRADIENTS}),
        requires_if_sparse=frozenset({OpName.GATHER_SLICES}),
        forbids=frozenset({OpName.DENSIFY}),
        may_produce=frozenset({OpName.DENSIFY}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with all gradients as further outputs: of ``reduced_gradients``, then of ``densify``.

        There is a ``densify`` for each sparse gradient. Raises GraphError if the gradients are outputs already.
        """
        reduced = nodes_of(graph, OpName.REDUCED_GRADIENTS)
        if not {node.name for node in reduced}.isdisjoint(value.node for value in graph.outputs):
            raise GraphError("the gradients are outputs already: run the pass once")
        dense = [_densify(node) for node in nodes_of(graph, OpName.GATHER_SLICES)]
        values = (value for node in (*reduced, *dense) for value in node.values())
        return graph.replace(nodes=(*graph.nodes, *dense), outputs=(*graph.outputs, *values))


def _densify(gathered: Node) -> Node:
    variable, site = gathered.string("variable"), site_of(gathered)
    name, kinds = at(site.stage, what=f"{OpName.DENSIFY}/{variable}"), [dense_type(gathered)]
    return make_node(name, OpName.DENSIFY, gathered.values(), kinds, **site.attrs, variable=variable)


def exposed_gradients(graph: Graph) -> tuple[str, ...]:
    """Return the variables whose gradients are outputs, in order: on a rank those that its stage owns.

    They follow the loss and the aux outputs.
    """
    found: list[str] = []
    for value in graph.outputs:
        node = graph.node(value.node)
        if node.op == OpName.REDUCED_GRADIENTS:
            found.append(node.strings("variables")[value.index])
        elif node.op == OpName.DENSIFY:
            found.append(node.string("variable"))
    return tuple(found)
