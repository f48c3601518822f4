"""Make a step fail if its loss or a gradient is NaN or infinite, before any variable changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.ir.graph import Graph, Node
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract

_COMPLETE = frozenset({OpName.REDUCED_GRADIENTS, OpName.GATHER_SLICES})


@dataclass(frozen=True)
class CheckNumerics(BuiltInPass):
    """Set ``check`` of the loss, each ``reduced_gradients`` and each ``gather_slices``: the update waits for them.

    ``gradients``: false to check the loss only, for an optimizer that scales the loss: it skips a step whose gradients
    overflow.
    """

    gradients: bool = True
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD, OpName.MERGE}),
        requires_if_trained=frozenset({OpName.REDUCED_GRADIENTS}),
        requires_if_sparse=frozenset({OpName.GATHER_SLICES}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph that checks its loss (its first output) and, with ``gradients``, its complete gradients."""
        loss = graph.outputs[0].node

        def checked(node: Node) -> Node:
            return (
                node.with_attrs(check=True) if (self.gradients and node.op in _COMPLETE) or node.name == loss else node
            )

        return graph.replace(nodes=tuple(map(checked, graph.nodes)))
