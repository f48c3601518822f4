"""Copies of variables: refreshed before a replica's first call, committed when the step has succeeded.

A variable has one owner; its value is sent once a step to the other devices that use it (other replicas,
other stages for tied weights). What forward writes (batch norm, counters, seed states) is written to a copy,
in micro-batch order; ``commit`` stores the result at the owner: floats averaged over the replicas, others as
replica 0 has them. A step that fails half-way thus changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.analysis.variable_use import find_variables
from graph_passes.ir.graph import Graph, Node, attributes
from graph_passes.ir.names import at, nodes_of, replica_counts

_CALLS = ("forward", "backward", "weights")


@dataclass(frozen=True)
class CopyVariables:
    """Add the ``refresh`` and ``commit`` nodes."""

    name: str = "mirror"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return copy_variables(graph)


def copy_variables(graph: Graph) -> Graph:
    """The graph with a ``refresh`` for every replica that works on copies.

    Every call of it waits by an edge of its own: a schedule may begin with any micro-batch, and where TensorFlow
    inlines the calls, backward's reads of a copy do not wait for forward.
    """
    variables = find_variables(graph)
    refreshes: dict[tuple[int, int], Node] = {}
    commits: list[Node] = []
    for stage, replicas in enumerate(replica_counts(graph)):
        for replica in range(replicas):
            names = variables.copied(stage, replica)
            if names:
                attrs = attributes({"replica": replica, "stage": stage, "variables": names})
                refreshes[stage, replica] = Node(at(stage, replica, what="refresh"), "refresh", attrs=attrs)
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
        place = (node.integer("stage"), node.integer("replica")) if node.op in _CALLS else None
        if place in refreshes:
            refresh = refreshes[place]
            if node.op == "forward" and not node.integer("micro_batch"):
                nodes.append(refresh)
            node = node.after(refresh.name, "refresh: the copies of variables hold this step's values")
        nodes.append(node)
    return graph.replace(nodes=(*nodes, *commits))
