"""Recomputation: backward recomputes activations of a stage instead of keeping them (DAPPLE, section VI.E).

``analysis.recomputation`` finds what is recomputed, ``recompute_gates`` sets when.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.analysis.layers import dependents
from dapple_tf.graph_passes.analysis.recomputation import Recomputation, find_recomputation
from dapple_tf.graph_passes.analysis.variable_use import written_by_loss_head
from dapple_tf.graph_passes.ir.extract import results_of
from dapple_tf.graph_passes.ir.graph import (
    ROLES,
    Control,
    Effect,
    Function,
    Graph,
    Node,
    Port,
    TensorType,
    Value,
    ancestors,
    make_node,
    topological,
)
from dapple_tf.graph_passes.ir.names import at
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract


@dataclass(frozen=True)
class Recompute(BuiltInPass):
    """Recompute ``runs`` in backward: they are the runs of each stage, in order, as sets of names of nodes.

    ``written``: see ``find_recomputation``; what the loss head writes is added to it.
    """

    runs: tuple[tuple[frozenset[str], ...], ...]
    written: frozenset[str] = frozenset()
    contract: ClassVar[Contract] = Contract(forbids=frozenset({OpName.FORWARD, OpName.BACKWARD}))

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph whose stage functions recompute ``runs``. Raises GraphError if it calls them already."""
        if any(node.has("function") for node in graph.nodes):
            raise GraphError(
                "recomputation changes the inputs of stage functions: run it before the pass that calls the functions"
            )
        changed: dict[str, Function] = {}
        for stage, stage_runs in enumerate(self.runs):
            if stage_runs:
                forward, backward = (graph.function(at(stage, what=op)) for op in (OpName.FORWARD, OpName.BACKWARD))
                written = self.written | written_by_loss_head(graph, stage)
                recomputation = find_recomputation(forward, stage_runs, written)
                changed[forward.name] = reduce_stash(forward, recomputation.stash)
                changed[backward.name] = recompute_in_backward(forward, backward, recomputation)
        return graph.replace(functions=tuple(changed.get(function.name, function) for function in graph.functions))


def find_runs(layers: Collection[int], first: int, end: int) -> tuple[range, ...]:
    """Return the runs of consecutive ``layers`` within a stage of the layers ``first`` to ``end`` (exclusive)."""
    runs: list[range] = []
    for layer in sorted(layers):
        if first <= layer < end:
            start = runs.pop().start if runs and runs[-1].stop == layer else layer
            runs.append(range(start, layer + 1))
    return tuple(runs)


def reduce_stash(forward: Function, stash: Sequence[Value]) -> Function:
    """Return the forward function with this stash, without the nodes whose results are no longer used."""
    graph = forward.graph
    results = [result for result in forward.results if result[0].role != "stash"] + results_of(graph, "stash", stash)
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
    graph = Graph(backward.name, nodes, tuple(node.name for _, node in ports), outputs)
    graph = _add_recompute_gates(graph, recomputation.runs)
    return Function(backward.name, graph, tuple(port for port, _ in ports), backward.outputs)


class _Inputs:
    """The inputs of the new backward function: those of the old one without the stash that is recomputed, and new ones.

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
        stashed = ((port.name, value) for port, value in forward.results if port.role == "stash")
        gone = {name: value for name, value in stashed if name not in self.stash}
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
            self.by_port[key] = port, port.node(name)
        return Value(self.by_port[key][1].name)

    def for_backward(self, value: Value) -> Value:
        """Return what a node of backward takes in place of ``value``."""
        return self.recomputed.get(value, value)

    def ports(self) -> list[tuple[Port, Node]]:
        """Return all inputs, sorted by role."""
        return sorted(self.by_port.values(), key=lambda entry: ROLES.index(entry[0].role))


# --- Control when activations are recomputed: a recompute gate before each run of recomputed layers
# The gate of a run (see ``analysis.recomputation``) waits for the first gradients that backward combines with what the
# run computes, and the inputs of the run wait for the gate. So a run is recomputed when its gradient is there and not
# earlier: of several runs, one at a time is in memory. The inputs wait by a control edge, since TensorFlow replaces an
# IdentityN of both by separate ops. The edge also keeps TensorFlow from merging the two computations of the run where
# it inlines forward and backward.
#
# Where a call is inlined, its inputs wait for the control edges of the call. So a gradient that is known before forward
# has run (that of the loss itself) does not open a gate.


def _add_recompute_gates(graph: Graph, runs: Sequence[Set[str]]) -> Graph:
    """Return the graph of a backward function with a recompute gate before each of ``runs`` (names of nodes).

    The inputs of a run pass its gate, except for variables.
    """
    role_of = {name: graph.node(name).op for name in graph.inputs}
    incoming = {name for name, role in role_of.items() if role in ("gradient", "seed")}
    from_gradients = dependents(graph, incoming, by_controls=True)
    added: list[Node] = []
    replaced: dict[str, dict[Value, Value]] = {}  # for each node of a run, the inputs that pass the gate
    for index, run in enumerate(runs):
        taken = dict.fromkeys(value for node in graph.nodes if node.name in run for value in node.inputs)
        entering = [value for value in taken if role_of.get(value.node, "variable") != "variable"]
        # A run's gate must not wait for the run, nor for an earlier run, whose gate may wait for this one.
        circular = dependents(graph, set().union(*runs[: index + 1]), by_controls=True)
        waits = _first_gradients(graph, run, from_gradients, circular) or tuple(map(Value, sorted(incoming)))
        if entering and waits:
            kinds = tuple(map(graph.type_of, waits))
            dtypes = tuple(kind.dtype for kind in kinds)
            gate = make_node(f"recompute{index}/gate", "IdentityN", waits, kinds, T=dtypes)
            passed = [
                _pass(f"recompute{index}/enter{i}", value, graph.type_of(value), gate)
                for i, value in enumerate(entering)
            ]
            added += [gate, *passed]
            for name in run:
                replaced[name] = {value: Value(node.name) for value, node in zip(entering, passed, strict=True)}
    changed = (node.replace_inputs(replaced.get(node.name, {})) for node in graph.nodes)
    return graph.replace(nodes=topological([*changed, *added]))


def _pass(name: str, value: Value, kind: TensorType, gate: Node) -> Node:
    """Return a node that gives ``value`` when ``gate`` has run."""
    controls = [Control(gate.name, "recompute: its gradients have come")]
    return make_node(name, "Identity", [value], [kind], controls, T=kind.dtype)


def _first_gradients(graph: Graph, run: Set[str], from_gradients: Set[str], circular: Set[str]) -> tuple[Value, ...]:
    """Return the gradients that are combined with values of ``run``, or with values computed from these alone."""
    without_gradients = set(run)
    found: dict[Value, None] = {}
    for node in graph.nodes:
        if without_gradients.isdisjoint(value.node for value in node.inputs):
            continue
        if node.name in from_gradients:
            found |= dict.fromkeys(v for v in node.inputs if v.node in from_gradients and v.node not in circular)
        else:
            without_gradients.add(node.name)
    return tuple(found)
