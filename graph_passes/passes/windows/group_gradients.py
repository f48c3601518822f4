"""Put together the gradients of each update of an asynchronous window: over micro-batches, minibatches and replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, make_node
from dapple_tf.graph_passes.ir.names import Site, at, of_minibatch
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.allreduce import allreduce_node
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.gather_slices import SparsePart, gather_node, slice_ports
from dapple_tf.graph_passes.schedules.window import Window


@dataclass(frozen=True)
class GroupGradients(BuiltInPass):
    """Add ``reduced_gradients`` for each update of each stage, and ``allreduce`` where the stage has replicas.

    Replicas that take minibatches in turn average their gradients; those that share micro-batches add theirs up.
    ``parts``: the uses of variables whose gradients are sparse (see ``GatherSlices``).
    """

    window: Window
    parts: tuple[SparsePart, ...] = ()
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD, OpName.MINIBATCH}),
        requires_if_trained=frozenset({OpName.GRADIENTS}),
        forbids=frozenset({OpName.ALLREDUCE, OpName.REDUCED_GRADIENTS, OpName.GATHER_SLICES, OpName.UPDATE}),
        may_produce=frozenset({OpName.ALLREDUCE, OpName.REDUCED_GRADIENTS, OpName.GATHER_SLICES}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with the complete gradients of each update, named after the last of its minibatches.

        No trained variable may be used by several stages.
        """
        added: list[Node] = []
        for stage, updates in enumerate(self.window.updates):
            for update, group in enumerate(updates):
                last = self.window.last_minibatch(stage, update)
                names = [
                    of_minibatch(m // self.window.micro_batches, at(stage, replica, what=OpName.GRADIENTS))
                    for m in self.window.last_of_update(stage, update)
                    for replica in self.window.replicas_of(stage, m)
                ]
                added += _reduce(self.window, stage, last, [graph.node(n) for n in names if n in graph.by_name])
                own = [part for part in self.parts if part.stage == stage]
                for variable in dict.fromkeys(part.variable for part in own):
                    added.append(
                        _gather(graph, self.window, stage, last, group, [p for p in own if p.variable == variable])
                    )
        return graph.replace(nodes=(*graph.nodes, *added)).sorted()


def _reduce(window: Window, stage: int, last: int, gradients: Sequence[Node]) -> list[Node]:
    """Return the nodes that reduce the dense gradients of one update."""
    if not gradients:
        return []
    first = gradients[0]
    nodes = []
    if len(gradients) > 1:
        reduced = allreduce_node(of_minibatch(last, at(stage, what=OpName.ALLREDUCE)), gradients)
        nodes.append(reduced.with_attrs(average=True) if window.turns[stage] > 1 else reduced)
    op, attrs = OpName.REDUCED_GRADIENTS, Site(stage).attrs | {"variables": first.strings("variables")}
    values = (nodes or gradients)[-1].values()
    return [*nodes, make_node(of_minibatch(last, at(stage, what=op)), op, values, first.outputs, **attrs)]


def _gather(
    graph: Graph, window: Window, stage: int, last: int, group: Sequence[int], parts: Sequence[SparsePart]
) -> Node:
    """Return the node of one variable's slices of one update.

    Where replicas take minibatches in turn, the slices of all minibatches of the group are concatenated, and divided by
    the number of minibatches, since dense gradients are averaged too.
    """
    averaged = window.turns[stage]
    if averaged > 1:
        parts = [dataclasses.replace(part, combine="concat") for part in parts]
    calls = [at(stage, replica, m, OpName.BACKWARD) for m in group for replica in window.replicas_of(stage, m)]
    pairs = slice_ports(graph.function(at(stage, what=OpName.BACKWARD)))

    def pieces_of(part: SparsePart) -> Sequence[tuple[Value, Value]]:
        slices, indices = pairs[part.pair]
        return [(Value(call, slices), Value(call, indices)) for call in calls]

    name = of_minibatch(last, at(stage, what=f"{OpName.GATHER_SLICES}/{parts[0].variable}"))
    node = gather_node(graph, name, Site(stage), parts, pieces_of)
    return node.with_attrs(averaged=averaged) if averaged > 1 else node
