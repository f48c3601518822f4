"""Control when activations are recomputed: a recompute gate before each run of recomputed layers.

The gate of a run (see ``analysis.recomputation``) waits for the first gradients that backward combines with what the
run computes, and the inputs of the run wait for the gate. So a run is recomputed when its gradient is there and not
earlier: of several runs, one at a time is in memory. The inputs wait by a control edge, since TensorFlow takes an
IdentityN of both apart. The edge also keeps TensorFlow from merging the two computations of the run where it inlines
forward and backward.

Where a call is inlined, its inputs wait for the control edges of the call. So a gradient that is known before forward
has run (that of the loss itself) does not open a gate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from graph_passes.ir.graph import Control, Node, Role, TensorType, Value, attributes, topological


def add_recompute_gates(
    nodes: Sequence[Node], runs: Sequence[Set[str]], entries: Mapping[Role, Set[str]]
) -> tuple[Node, ...]:
    """Return the nodes of a backward function with a recompute gate before each of ``runs`` (names of nodes).

    ``entries``: the function's input nodes by role. Those that a run takes, but for variables, pass the run's gate.
    """
    incoming = {*entries.get("gradient", ()), *entries.get("seed", ())}
    gated = {name for role, names in entries.items() if role != "variable" for name in names}
    from_gradients = _dependents(nodes, incoming)
    types = {value: kind for node in nodes for value, kind in zip(node.values(), node.outputs, strict=True)}
    added: list[Node] = []
    replaced: dict[str, dict[Value, Value]] = {}  # for each node of a run, the inputs that pass the gate
    for index, run in enumerate(runs):
        entering = tuple(dict.fromkeys(v for n in nodes if n.name in run for v in n.inputs if v.node in gated))
        # A run's gate must not wait for the run, nor for an earlier run, whose gate may wait for this one.
        circular = _dependents(nodes, set().union(*runs[: index + 1]))
        waits = _first_gradients(nodes, run, from_gradients, circular) or tuple(map(Value, sorted(incoming)))
        if entering and waits:
            gate = _make_gate(f"recompute{index}/gate", waits, types)
            passed = [_pass(f"recompute{index}/enter{i}", v, types[v], gate) for i, v in enumerate(entering)]
            added += [gate, *passed]
            for name in run:
                replaced[name] = {value: Value(node.name) for value, node in zip(entering, passed, strict=True)}
    return topological([*(_replace_inputs(node, replaced.get(node.name, {})) for node in nodes), *added])


def _make_gate(name: str, waits: tuple[Value, ...], types: Mapping[Value, TensorType]) -> Node:
    kinds = tuple(types[value] for value in waits)
    return Node(name, "IdentityN", waits, kinds, attributes({"T": tuple(kind.dtype for kind in kinds)}))


def _pass(name: str, value: Value, kind: TensorType, gate: Node) -> Node:
    """Return a node that gives ``value`` when ``gate`` has run."""
    controls = (Control(gate.name, "recompute: its gradients have come"),)
    return Node(name, "Identity", (value,), (kind,), attributes({"T": kind.dtype}), controls)


def _first_gradients(
    nodes: Sequence[Node], run: Set[str], from_gradients: Set[str], circular: Set[str]
) -> tuple[Value, ...]:
    """Return the gradients that are combined with values of ``run``, or with values computed from these alone."""
    without_gradients = set(run)
    found: dict[Value, None] = {}
    for node in nodes:
        if without_gradients.isdisjoint(value.node for value in node.inputs):
            continue
        if node.name in from_gradients:
            found |= dict.fromkeys(v for v in node.inputs if v.node in from_gradients and v.node not in circular)
        else:
            without_gradients.add(node.name)
    return tuple(found)


def _dependents(nodes: Sequence[Node], roots: Set[str]) -> set[str]:
    """Return ``roots`` and all nodes that depend on them."""
    found = set(roots)
    for node in nodes:
        if not found.isdisjoint(node.predecessors()):
            found.add(node.name)
    return found


def _replace_inputs(node: Node, by: Mapping[Value, Value]) -> Node:
    return dataclasses.replace(node, inputs=tuple(by.get(value, value) for value in node.inputs))
