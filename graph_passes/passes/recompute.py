"""Recomputation: backward recomputes activations of a stage instead of keeping them (DAPPLE, section VI.E).

``analysis.recomputation`` finds what is recomputed, ``recompute_gates`` sets when.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from graph_passes.analysis.recomputation import Recomputation, find_recomputation
from graph_passes.errors import GraphError
from graph_passes.ir.graph import (
    ROLES,
    Effect,
    Function,
    Graph,
    Node,
    Port,
    Role,
    Value,
    ancestors,
    attributes,
    topological,
)
from graph_passes.ir.names import at
from graph_passes.ir.ops import OpName
from graph_passes.passes.base import Contract
from graph_passes.passes.recompute_gates import add_recompute_gates


@dataclass(frozen=True)
class Recompute:
    """Recompute ``runs`` in backward: for each stage its runs in order, each as the names of its nodes.

    ``written``: see ``find_recomputation``.
    """

    runs: tuple[tuple[frozenset[str], ...], ...]
    written: frozenset[str] = frozenset()
    name: str = "recompute"
    contract: ClassVar[Contract] = Contract(forbids=frozenset({OpName.FORWARD, OpName.BACKWARD}))

    def __call__(self, graph: Graph) -> Graph:
        return recompute_stages(graph, self.runs, self.written)


def find_runs(layers: Collection[int], first: int, end: int) -> tuple[range, ...]:
    """Return the runs of consecutive ``layers`` within a stage of the layers ``first`` to ``end`` (exclusive)."""
    runs: list[range] = []
    for layer in sorted(layers):
        if first <= layer < end:
            start = runs.pop().start if runs and runs[-1].stop == layer else layer
            runs.append(range(start, layer + 1))
    return tuple(runs)


def recompute_stages(graph: Graph, runs: Sequence[Sequence[Set[str]]], written: Set[str] = frozenset()) -> Graph:
    """Return the graph whose stage functions recompute ``runs``. Raises GraphError if it calls them already.

    ``written``: see ``find_recomputation``.
    """
    if any(node.has("function") for node in graph.nodes):
        raise GraphError(
            "recomputation changes the inputs of stage functions: run it before the pass that calls the functions"
        )
    changed: dict[str, Function] = {}
    for stage, stage_runs in enumerate(runs):
        if stage_runs:
            forward, backward = (graph.function(at(stage, what=op)) for op in (OpName.FORWARD, OpName.BACKWARD))
            recomputation = find_recomputation(forward, stage_runs, written)
            changed[forward.name] = reduce_stash(forward, recomputation.stash)
            changed[backward.name] = recompute_in_backward(forward, backward, recomputation)
    return graph.replace(functions=tuple(changed.get(function.name, function) for function in graph.functions))


def reduce_stash(forward: Function, stash: Sequence[Value]) -> Function:
    """Return the forward function with this stash, without the nodes whose results are no longer used."""
    graph = forward.graph
    results = [pair for pair in zip(forward.outputs, graph.outputs, strict=True) if pair[0].role != "stash"]
    results += [(Port("stash", str(value), graph.type_of(value)), value) for value in stash]
    values = tuple(value for _, value in results)
    acting = [node.name for node in graph.nodes if node.effect in (Effect.WRITE, Effect.SIDE)]
    live = ancestors(graph, [*(value.node for value in values), *acting]).union(graph.inputs)
    body = graph.replace(nodes=tuple(node for node in graph.nodes if node.name in live), outputs=values)
    return dataclasses.replace(forward, graph=body, outputs=tuple(port for port, _ in results))


def recompute_in_backward(forward: Function, backward: Function, recomputation: Recomputation) -> Function:
    """Return the backward function that takes this stash, and repeats nodes of forward behind recompute gates."""
    inputs = _Inputs(forward, backward, recomputation.stash)
    own = backward.graph.by_name
    repeated = recomputation.free.union(*recomputation.runs)
    added = [
        dataclasses.replace(
            node,
            inputs=tuple(map(inputs.for_repeated, node.inputs)),
            controls=tuple(c for c in node.controls if c.source in repeated),
        )
        for node in forward.graph.nodes
        if node.name in repeated and node.name not in own
    ]
    kept = [
        dataclasses.replace(node, inputs=tuple(map(inputs.for_backward, node.inputs)))
        for node in backward.graph.nodes
        if node.name not in backward.graph.inputs
    ]
    outputs = tuple(map(inputs.for_backward, backward.graph.outputs))
    ports = inputs.ports()
    nodes = topological([*(node for _, node in ports), *added, *kept])
    entries: dict[Role, set[str]] = {}
    for port, node in ports:
        entries.setdefault(port.role, set()).add(node.name)
    gated = add_recompute_gates(nodes, recomputation.runs, entries)
    graph = Graph(backward.name, gated, tuple(node.name for _, node in ports), outputs)
    return Function(backward.name, graph, tuple(port for port, _ in ports), backward.outputs)


class _Inputs:
    """The inputs of the new backward function: the old ones without the stash that is recomputed, and new ones.

    ``by_port``: port and input node, by role and name. ``recomputed``: for each old stash input that is recomputed, the
    value that takes its place.
    """

    def __init__(self, forward: Function, backward: Function, stash: Sequence[Value]) -> None:
        self.forward = forward
        self.stash = {str(value): value for value in stash}
        self.by_port = {
            (port.role, port.name): (port, backward.graph.node(name))
            for port, name in zip(backward.inputs, backward.graph.inputs, strict=True)
        }
        results = zip(forward.outputs, forward.graph.outputs, strict=True)
        gone = {port.name: value for port, value in results if port.role == "stash" and port.name not in self.stash}
        self.recomputed = {Value(self.by_port.pop(("stash", name))[1].name): value for name, value in gone.items()}
        self.forward_ports = dict(zip(forward.graph.inputs, forward.inputs, strict=True))
        self.numbers = itertools.count(len(backward.inputs))

    def for_repeated(self, value: Value) -> Value:
        """Return what a repeated node takes in place of forward's ``value``, before gates."""
        if value.node in self.forward_ports:
            port = self.forward_ports[value.node]
        elif str(value) in self.stash:
            port = Port("stash", str(value), self.forward.graph.type_of(value))
        else:
            return value
        key = (port.role, port.name)
        if key not in self.by_port:
            name = f"{port.role}/{next(self.numbers)}"
            self.by_port[key] = port, Node(name, port.role, (), (port.type,), attributes({"port": port.name}))
        return Value(self.by_port[key][1].name)

    def for_backward(self, value: Value) -> Value:
        """Return what a node of backward takes in place of ``value``."""
        return self.recomputed.get(value, value)

    def ports(self) -> list[tuple[Port, Node]]:
        """Return all inputs, sorted by role."""
        return sorted(self.by_port.values(), key=lambda entry: ROLES.index(entry[0].role))
