"""Copies of variables: refreshed before a replica's first forward, committed when the step has succeeded.

A variable has one owner; its value is sent once a step to the other devices that use it (other replicas,
other stages for tied weights). What forward writes (batch norm, counters, seed states) is written to a copy,
in micro-batch order; ``commit`` stores the result at the owner: floats averaged over the replicas, others as
replica 0 has them. A step that fails half-way thus changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.ir import Graph, Node, attributes
from graph_passes.names import at, nodes_of, replica_counts
from graph_passes.variables import find_variables


@dataclass(frozen=True)
class Mirror:
    """Add the ``refresh`` and ``commit`` nodes."""

    name: str = "mirror"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return mirror_variables(graph)


def mirror_variables(graph: Graph) -> Graph:
    """The graph with a ``refresh`` before the first forward of every replica that works on copies.

    The first backward (both parts of it, where it is split) waits for it by an edge of its own: where TensorFlow
    inlines the calls, backward's reads of a copy do not wait for forward.
    """
    variables = find_variables(graph)
    added: dict[str, Node] = {}
    commits: list[Node] = []
    for stage, replicas in enumerate(replica_counts(graph)):
        for replica in range(replicas):
            names = variables.mirrored(stage, replica)
            if names:
                attrs = attributes({"replica": replica, "stage": stage, "variables": names})
                refresh = Node(at(stage, replica, what="refresh"), "refresh", attrs=attrs)
                added |= {at(stage, replica, 0, what): refresh for what in ("forward", "backward", "weights")}
        state = tuple(name for name in variables.owned(stage) if name in variables.state)
        if state:
            attrs = attributes({"replica": 0, "replicas": replicas, "stage": stage, "variables": state})
            commits.append(Node(at(stage, what="commit"), "commit", attrs=attrs))
    for i, commit in enumerate(commits):
        for node in nodes_of(graph, "forward"):
            if node.integer("stage") == commit.integer("stage"):
                commit = commit.after(node.name, "commit: every forward has written its copy")
        commits[i] = commit
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name in added:
            refresh = added[node.name]
            if node.op == "forward":
                nodes.append(refresh)
            node = node.after(refresh.name, "refresh: the copies of variables hold this step's values")
        nodes.append(node)
    return graph.replace(nodes=(*nodes, *commits))
