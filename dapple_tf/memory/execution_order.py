"""The order in which TensorFlow's executor runs the ops of a function."""

from __future__ import annotations

from collections import deque

from graph_passes.ir.graph import Graph, Node


def run_order(graph: Graph) -> tuple[Node, ...]:
    """The nodes as one thread of the executor runs them: first those without inputs, then as each becomes ready.

    It is not the order of the graph: the gradients of all weights that are ready at a point are made in turn, and what
    they read stays alive. Several threads keep to it roughly.
    """
    followers: dict[str, list[Node]] = {node.name: [] for node in graph.nodes}
    missing: dict[str, int] = {}
    for node in graph.nodes:
        sources = dict.fromkeys(node.predecessors())
        missing[node.name] = len(sources)
        for source in sources:
            followers[source].append(node)
    ready = deque(node for node in graph.nodes if not missing[node.name])
    order = []
    while ready:
        node = ready.popleft()
        order.append(node)
        for follower in followers[node.name]:
            missing[follower.name] -= 1
            if not missing[follower.name]:
                ready.append(follower)
    return tuple(order)
