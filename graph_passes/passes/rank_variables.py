"""What changes where every replica is a process of its own: who keeps a variable, and how its value travels.

Each rank of a stage keeps the stage's variables itself and updates them from equal gradients, so replicas need no
copies. Copies remain of what forward writes (a failed step must change nothing), and of variables that another stage
owns (tied weights), whose values that stage sends at the start of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from graph_passes.analysis.variable_use import Variables, find_variables
from graph_passes.ir.graph import Control, Graph, Node, TensorType, Value, attributes
from graph_passes.ir.names import at, nodes_of


@dataclass(frozen=True)
class RankVariables:
    """Rewrite copies of variables for one process a replica; ``types`` are those of the variables' values."""

    types: tuple[tuple[str, TensorType], ...]
    name: str = "spread"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return rank_variables(graph, dict(self.types))


def rank_variables(graph: Graph, types: Mapping[str, TensorType]) -> Graph:
    """The graph with ``read`` at owners, ``refresh`` from what they send, and state averaged before ``commit``."""
    variables = find_variables(graph)
    nodes: list[Node] = []
    reads: dict[str, Node] = {}
    dropped: set[str] = set()
    for node in graph.nodes:
        if node.op == "refresh":
            refreshed = _refresh(node, variables, types, reads)
            nodes += [] if refreshed is None else [refreshed]
            dropped |= {node.name} if refreshed is None else set()
        elif node.op == "commit" and node.integer("replicas") > 1:
            nodes += _average(graph, node, types)
        elif node.op == "barrier":
            nodes.append(_after_averages(graph, node))
        else:
            nodes.append(node)
    kept = [
        dataclasses.replace(node, controls=tuple(c for c in node.controls if c.source not in dropped)) for node in nodes
    ]
    return graph.replace(nodes=(*reads.values(), *kept)).sorted()


def _refresh(node: Node, variables: Variables, types: Mapping[str, TensorType], reads: dict[str, Node]) -> Node | None:
    """The copies that are still needed: those another stage owns, from its ``read``, and those that forward writes."""
    stage = node.integer("stage")
    foreign = [name for name in node.strings("variables") if variables.owner(name) != stage]
    state = [name for name in node.strings("variables") if name in variables.state and name not in foreign]
    if not foreign and not state:
        return None
    for name in foreign:
        owner = variables.owner(name)
        attrs = attributes({"replica": 0, "stage": owner, "variables": (name,)})
        reads.setdefault(name, Node(at(owner, what=f"read/{name}"), "read", (), (types[name],), attrs))
    inputs = tuple(Value(reads[name].name) for name in foreign)
    return dataclasses.replace(node, inputs=inputs).with_attrs(variables=(*foreign, *state), received=len(foreign))


def _average(graph: Graph, commit: Node, types: Mapping[str, TensorType]) -> list[Node]:
    """``state`` on every replica (what its forwards wrote), ``average`` over them, and the commit of that."""
    stage, names = commit.integer("stage"), commit.strings("variables")
    kinds = tuple(types[name] for name in names)
    states: list[Node] = []
    for replica in range(commit.integer("replicas")):
        attrs = attributes({"replica": replica, "stage": stage, "variables": names})
        state = Node(at(stage, replica, what="state"), "state", (), kinds, attrs)
        for node in nodes_of(graph, "forward"):
            if (node.integer("stage"), node.integer("replica")) == (stage, replica):
                state = state.after(node.name, "state: every forward has written its copy")
        states.append(state)
    inputs = tuple(value for state in states for value in state.values())
    attrs = attributes({"replica": 0, "replicas": len(states), "stage": stage})
    average = Node(at(stage, what="average"), "average", inputs, kinds, attrs)
    controls = tuple(c for c in commit.controls if not _is_forward(graph, c))
    return [*states, average, dataclasses.replace(commit, inputs=average.values(), controls=controls)]


def _after_averages(graph: Graph, barrier: Node) -> Node:
    """The barrier, which opens when all that ``_average`` adds has been averaged: that too may fail."""
    for commit in nodes_of(graph, "commit"):
        if commit.integer("replicas") > 1:
            average = at(commit.integer("stage"), what="average")
            barrier = barrier.after(average, "barrier: no variable changes before all state is averaged")
    return barrier


def _is_forward(graph: Graph, control: Control) -> bool:
    return graph.node(control.source).op == "forward"
