"""Re-computation: backward makes a stage's activations again instead of keeping them (DAPPLE, section VI.E).

What is repeated, and what for: see ``remake``; when: see ``gates``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass

from graph_passes.analysis.recomputation import Recomputation, find_recomputation
from graph_passes.errors import GraphError
from graph_passes.ir.extract import ROLES
from graph_passes.ir.graph import (
    Effect,
    Function,
    Graph,
    Node,
    Port,
    Value,
    ancestors,
    attributes,
    topological,
)
from graph_passes.ir.names import at
from graph_passes.passes.recompute_gates import add_recompute_gates


@dataclass(frozen=True)
class Recompute:
    """Make ``runs`` again in backward: for each stage, its runs in order, each as the names of its nodes."""

    runs: tuple[tuple[frozenset[str], ...], ...]
    name: str = "recompute"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return recompute_stages(graph, self.runs)


def find_runs(layers: Collection[int], first: int, end: int) -> tuple[range, ...]:
    """The rows of neighbours among ``layers`` that are in a stage of the layers ``first`` to ``end`` (exclusive)."""
    runs: list[range] = []
    for layer in sorted(layers):
        if first <= layer < end:
            start = runs.pop().start if runs and runs[-1].stop == layer else layer
            runs.append(range(start, layer + 1))
    return tuple(runs)


def recompute_stages(graph: Graph, runs: Sequence[Sequence[Set[str]]]) -> Graph:
    """The graph whose stage functions do so. Raises GraphError where the stages have been called already."""
    if any(node.has("function") for node in graph.nodes):
        raise GraphError("re-computation changes what a stage's functions take: it comes before they are called")
    changed: dict[str, Function] = {}
    for stage, chosen in enumerate(runs):
        if chosen:
            forward, backward = (graph.function(at(stage, what=what)) for what in ("forward", "backward"))
            remade = find_recomputation(forward, chosen)
            changed[forward.name] = keep_less(forward, remade.stash)
            changed[backward.name] = make_again(forward, backward, remade)
    return graph.replace(functions=tuple(changed.get(function.name, function) for function in graph.functions))


def keep_less(forward: Function, stash: Sequence[Value]) -> Function:
    """The forward function with this stash, less what it then computes for nothing."""
    graph = forward.graph
    results = [pair for pair in zip(forward.outputs, graph.outputs, strict=True) if pair[0].role != "stash"]
    results += [(Port("stash", str(value), graph.type_of(value)), value) for value in stash]
    values = tuple(value for _, value in results)
    acting = [node.name for node in graph.nodes if node.effect in (Effect.WRITE, Effect.SIDE)]
    live = ancestors(graph, [*(value.node for value in values), *acting]).union(graph.inputs)
    body = graph.replace(nodes=tuple(node for node in graph.nodes if node.name in live), outputs=values)
    return dataclasses.replace(forward, graph=body, outputs=tuple(port for port, _ in results))


def make_again(forward: Function, backward: Function, remade: Recomputation) -> Function:
    """The backward function that takes this stash only, and repeats forward's nodes behind gates."""
    inputs = _Inputs(forward, backward, remade.stash)
    own = backward.graph.by_name
    again = remade.free.union(*remade.runs)
    added = [
        dataclasses.replace(
            node,
            inputs=tuple(map(inputs.enter, node.inputs)),
            controls=tuple(c for c in node.controls if c.source in again),
        )
        for node in forward.graph.nodes
        if node.name in again and node.name not in own
    ]
    kept = [
        dataclasses.replace(node, inputs=tuple(map(inputs.without_stash, node.inputs)))
        for node in backward.graph.nodes
        if node.name not in backward.graph.inputs
    ]
    outputs = tuple(map(inputs.without_stash, backward.graph.outputs))
    ports = inputs.ports()
    nodes = topological([*(node for _, node in ports), *added, *kept])
    entries = {port.role: {node.name for other, node in ports if other.role == port.role} for port, _ in ports}
    gated = add_recompute_gates(nodes, remade.runs, entries)
    graph = Graph(backward.name, gated, tuple(node.name for _, node in ports), outputs)
    return Function(backward.name, graph, tuple(port for port, _ in ports), backward.outputs)


class _Inputs:
    """The inputs of the new backward function: the old ones less the stash that is made again, and new ones."""

    def __init__(self, forward: Function, backward: Function, stash: Sequence[Value]) -> None:
        self.forward = forward
        self.stash = {str(value): value for value in stash}
        self.given = {
            (port.role, port.name): (port, backward.graph.node(name))
            for port, name in zip(backward.inputs, backward.graph.inputs, strict=True)
        }
        values = zip(forward.outputs, forward.graph.outputs, strict=True)
        made = {port.name: value for port, value in values if port.role == "stash" and port.name not in self.stash}
        self.remade = {Value(self.given.pop(("stash", name))[1].name): value for name, value in made.items()}
        self.entries = dict(zip(forward.graph.inputs, forward.inputs, strict=True))
        self.numbers = itertools.count(len(backward.inputs))

    def enter(self, value: Value) -> Value:
        """Forward's ``value`` as a node that is made again takes it, before gates."""
        if value.node in self.entries:
            port = self.entries[value.node]
        elif str(value) in self.stash:
            port = Port("stash", str(value), self.forward.graph.type_of(value))
        else:
            return value
        key = (port.role, port.name)
        if key not in self.given:
            name = f"{port.role}/{next(self.numbers)}"
            self.given[key] = port, Node(name, port.role, (), (port.type,), attributes({"port": port.name}))
        return Value(self.given[key][1].name)

    def without_stash(self, value: Value) -> Value:
        """What backward's own nodes take in place of ``value``."""
        return self.remade.get(value, value)

    def ports(self) -> list[tuple[Port, Node]]:
        """All inputs, in the order of a function's."""
        return sorted(self.given.values(), key=lambda entry: ROLES.index(entry[0].role))
