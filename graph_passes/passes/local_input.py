"""Let a rank take only the rows of the batch that it needs (see ``analysis.input_needs``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.analysis.input_needs import Use, find_inputs
from dapple_tf.graph_passes.ir.graph import Graph, Node, make_node, tensor
from dapple_tf.graph_passes.ir.names import BATCH_SIZE_NAME
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract


@dataclass(frozen=True)
class LocalInput(BuiltInPass):
    """Make the batch size the last input of a rank's graph, and have slices take tensors of the rank's own rows.

    A tensor may then be empty where the rank uses none of its rows.
    """

    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.BATCH_SIZE, OpName.FORWARD, OpName.COLLECT_TOKENS}),
        forbids=frozenset({OpName.TIMESTAMP}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph whose tensors of the batch hold only what the rank uses; its last input is the batch size.

        A tensor still holds the whole batch where the rank uses all of its rows.
        """
        uses = zip(graph.inputs, find_inputs(graph).uses, strict=True)
        own = {name for name, use in uses if use is Use.OWN}

        def rewrite(node: Node) -> Node:
            if node.op == OpName.BATCH_SIZE:
                return make_node(node.name, OpName.INPUT, (), [tensor("int64")], index=len(graph.inputs))
            if node.op == OpName.SLICE:
                _, *tensors = node.inputs
                return node.with_attrs(local=tuple(i for i, value in enumerate(tensors) if value.node in own))
            return node

        return graph.replace(nodes=tuple(map(rewrite, graph.nodes)), inputs=(*graph.inputs, BATCH_SIZE_NAME))
