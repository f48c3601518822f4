"""The order in which TensorFlow's executor runs the ops of a function."""

from __future__ import annotations

from collections import deque

from graph_passes.ir.graph import Graph, Node


def execution_order(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes in the order of one executor thread: nodes without inputs, then first ready, first run.

    This differs from the order of the graph: all weight gradients that are ready at a point are computed one after the
    other, and their inputs stay live. Several threads follow the same order approximately.
    """
    followers: dict[str, list[Node]] = {node.name: [] for node in graph.nodes}
    pending: dict[str, int] = {}
    for node in graph.nodes:
        sources = dict.fromkeys(node.predecessors())
        pending[node.name] = len(sources)
        for source in sources:
            followers[source].append(node)
    ready = deque(node for node in graph.nodes if not pending[node.name])
    order = []
    while ready:
        node = ready.popleft()
        order.append(node)
        for follower in followers[node.name]:
            pending[follower.name] -= 1
            if not pending[follower.name]:
                ready.append(follower)
    return tuple(order)
