"""Have a step fail where its loss or a gradient is NaN or infinite, before any weight changes."""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.ir.graph import Graph, Node


@dataclass(frozen=True)
class CheckNumerics:
    """Mark with ``check`` what gives the loss, and every stage's complete gradients: the update waits for them."""

    name: str = "check_numerics"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        loss = graph.outputs[0].node

        def mark(node: Node) -> Node:
            return node.with_attrs(check=True) if node.op == "reduced" or node.name == loss else node

        return graph.replace(nodes=tuple(map(mark, graph.nodes)))
