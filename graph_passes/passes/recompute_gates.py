"""When activations are made again: a gate before each run of re-computed layers.

The gate of a run (see ``remake``) waits for the first gradients that backward takes beside what the run makes; what
enters the run waits for the gate, by an edge of control (TensorFlow takes an IdentityN of both apart). So a run is made
again when its gradient is there, not before: of several runs one after the other is made again. And TensorFlow does not
see the two computations as one where it inlines both functions: one of them waits.

Where a call is inlined, its inputs wait for the edges of control that lead to it: so a gradient that is known before
forward has run (the loss's own) does not open a gate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from graph_passes.ir.graph import Control, Node, TensorType, Value, attributes, topological


def add_recompute_gates(
    nodes: Sequence[Node], runs: Sequence[Set[str]], entries: Mapping[str, Set[str]]
) -> tuple[Node, ...]:
    """The nodes with a gate before each run, behind which it takes the ``entries`` (inputs by role) that it needs."""
    incoming = {*entries.get("gradient", ()), *entries.get("seed", ())}
    gated = {name for role, names in entries.items() if role != "variable" for name in names}
    graded = _reached(nodes, incoming)
    types = {value: kind for node in nodes for value, kind in zip(node.values(), node.outputs, strict=True)}
    added: list[Node] = []
    behind: dict[str, dict[Value, Value]] = {}
    for index, run in enumerate(runs):
        entering = tuple(dict.fromkeys(v for n in nodes if n.name in run for v in n.inputs if v.node in gated))
        # A run's gate must not wait for the run, nor for one before it, whose gate may wait for this run.
        tainted = _reached(nodes, set().union(*runs[: index + 1]))
        waits = _meetings(nodes, run, graded, tainted) or tuple(map(Value, sorted(incoming)))
        if entering and waits:
            gate = _make_gate(f"recompute{index}/gate", waits, types)
            entered = [_enter(f"recompute{index}/enter{i}", v, types[v], gate) for i, v in enumerate(entering)]
            added += [gate, *entered]
            for name in run:
                behind[name] = {value: Value(node.name) for value, node in zip(entering, entered, strict=True)}
    return topological([*(_reroute(node, behind.get(node.name, {})) for node in nodes), *added])


def _make_gate(name: str, waits: tuple[Value, ...], types: Mapping[Value, TensorType]) -> Node:
    kinds = tuple(types[value] for value in waits)
    return Node(name, "IdentityN", waits, kinds, attributes({"T": tuple(kind.dtype for kind in kinds)}))


def _enter(name: str, value: Value, kind: TensorType, gate: Node) -> Node:
    """The value, behind the gate."""
    controls = (Control(gate.name, "recompute: its gradients have come"),)
    return Node(name, "Identity", (value,), (kind,), attributes({"T": kind.dtype}), controls)


def _meetings(nodes: Sequence[Node], run: Set[str], graded: Set[str], tainted: Set[str]) -> tuple[Value, ...]:
    """The gradients that meet what ``run`` makes, or what is computed from that alone."""
    alone = set(run)
    found: dict[Value, None] = {}
    for node in nodes:
        if alone.isdisjoint(value.node for value in node.inputs):
            continue
        if node.name in graded:
            found |= dict.fromkeys(v for v in node.inputs if v.node in graded and v.node not in tainted)
        else:
            alone.add(node.name)
    return tuple(found)


def _reached(nodes: Sequence[Node], roots: Set[str]) -> set[str]:
    """``roots`` and all nodes that depend on them."""
    found = set(roots)
    for node in nodes:
        if not found.isdisjoint(node.predecessors()):
            found.add(node.name)
    return found


def _reroute(node: Node, through: Mapping[Value, Value]) -> Node:
    return dataclasses.replace(node, inputs=tuple(through.get(value, value) for value in node.inputs))
