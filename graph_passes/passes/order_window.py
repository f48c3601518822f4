"""Control edges that make each replica run its calls in the order of an asynchronous window (1F1B-RR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graph_passes.errors import ScheduleError
from graph_passes.ir.graph import Graph, Node
from graph_passes.ir.names import at, of_minibatch, replica_counts
from graph_passes.ir.ops import OpName
from graph_passes.passes.base import Contract
from graph_passes.passes.update_groups import update_name
from graph_passes.passes.use_versions import action_name
from graph_passes.schedules.schedule import Action
from graph_passes.schedules.weight_versions import Versions
from graph_passes.schedules.window import Window


@dataclass(frozen=True)
class OrderWindow:
    """Join the calls of each replica by control edges, in the order of the window of ``versions``."""

    versions: Versions
    name: str = "order_window"
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD, OpName.MINIBATCH, OpName.SET_UPDATING}),
        forbids=frozenset({OpName.TIMESTAMP}),
    )

    def __call__(self, graph: Graph) -> Graph:
        return order_window(graph, self.versions)


def order_window(graph: Graph, versions: Versions) -> Graph:
    """Return the graph with an edge between each two consecutive calls of a replica.

    A forward also waits for the updates of the backwards before it on its replica, and so does a backward that uses the
    newest weights. What runs once a minibatch runs in the order of the minibatches. Raises ScheduleError where the
    graph has other replicas than the window.
    """
    window = versions.window
    if replica_counts(graph) != window.replicas:
        raise ScheduleError(f"the window has {window.replicas} replicas, the graph {replica_counts(graph)}")
    nodes = dict(graph.by_name)
    for (stage, replica), actions in window.rows.items():
        previous: str | None = None
        last_update: str | None = None
        once = _once_calls(graph, window, stage, replica)
        for action in actions:
            call = nodes[action_name(action, replica)]
            for name in once.pop(action, ()):
                nodes[name] = _after(nodes[name], previous, f"order: before {action}")
                previous = name
            call = _after(call, previous, f"order: {action}")
            if last_update is not None and (action.kind == "F" or versions.policy == "latest"):
                call = _after(call, last_update, f"order: {action} after the update before it")
            nodes[call.name] = call
            previous = call.name
            update = update_name(window, stage, window.update_of(stage, action.micro_batch))
            if window.ends_update(action) and update in nodes:
                last_update = update
        for name in once.pop(None, ()):
            nodes[name] = _after(nodes[name], previous, "order: in the order of the minibatches")
            previous = name
    return graph.replace(nodes=tuple(nodes.values())).sorted()


def _after(node: Node, source: str | None, reason: str) -> Node:
    """Return the node after ``source``, if there is one that no data edge joins to it."""
    if source is None or any(value.node == source for value in node.inputs):
        return node
    return node.after(source, reason)


def _once_calls(graph: Graph, window: Window, stage: int, replica: int) -> dict[Action | None, tuple[str, ...]]:
    """Return what runs once a minibatch on a replica: by the forward before which it runs, or None for the end.

    Replicas that take minibatches in turn run it for all minibatches, so that what it writes is the same on all.
    """
    found: dict[Action | None, tuple[str, ...]] = {}
    pending: list[str] = []
    for minibatch in range(window.minibatches):
        name = of_minibatch(minibatch, at(stage, replica, what=OpName.RUN_ONCE))
        if name in graph.by_name:
            pending.append(name)
        first = minibatch * window.micro_batches
        if replica in window.replicas_of(stage, first):
            found[Action(stage, "F", first)] = tuple(pending)
            pending = []
    return {**found, None: tuple(pending)}
