"""Control edges that make each replica run its calls in the order of an asynchronous window (1F1B-RR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.ir.graph import Graph, Node
from dapple_tf.graph_passes.ir.names import replica_counts
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.windows.update_groups import update_name
from dapple_tf.graph_passes.passes.windows.use_versions import calls_of
from dapple_tf.graph_passes.schedules.weight_versions import Versions


@dataclass(frozen=True)
class OrderWindow(BuiltInPass):
    """Join the calls of each replica by control edges, in the order of the window of ``versions``."""

    versions: Versions
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD, OpName.MINIBATCH, OpName.SET_UPDATING}),
        forbids=frozenset({OpName.TIMESTAMP}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with an edge between each two consecutive calls of a replica.

        A forward also waits for the updates of the backwards before it on its replica, and so does a backward that uses
        the newest weights. What runs once a minibatch runs before its forward (see ``calls_of``). Raises ScheduleError
        where the graph has other replicas than the window.
        """
        window = self.versions.window
        if replica_counts(graph) != window.replicas:
            raise ScheduleError(f"the window has {window.replicas} replicas, the graph {replica_counts(graph)}")
        nodes = dict(graph.by_name)
        for (stage, replica), actions in window.rows.items():
            previous: str | None = None
            pending: str | None = None  # the last update for which no call of the replica waits yet
            for action in actions:
                for name in calls_of(graph, window, action, replica):
                    call = _after(nodes[name], previous, f"order: {action}")
                    if action.kind == "F" or self.versions.policy == "latest":
                        call = _after(call, pending, f"order: {action} after the update before it")
                        pending = None  # later calls come after this one
                    nodes[name] = call
                    previous = name
                update = update_name(window, stage, window.update_of(stage, action.micro_batch))
                if window.ends_update(action) and update in nodes:
                    pending = update
        return graph.replace(nodes=tuple(nodes.values())).sorted()


def _after(node: Node, source: str | None, reason: str) -> Node:
    """Return the node after ``source``, if there is one that no data edge joins to it."""
    if source is None or any(value.node == source for value in node.inputs):
        return node
    return node.after(source, reason)
