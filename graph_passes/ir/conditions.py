"""Mark the nodes of open conditions (``If``), and close open conditions again.

A condition that writes variables of several stages cannot be cut by stages while its branches are functions. An *open*
condition has no such functions. It consists of a node ``If`` (the *marker*), which has the predicate as its only input
and the attribute ``open``, and of the nodes of both branches, which are nodes of the graph itself. Each node of a
branch has the attribute ``guard``: the name of the marker, and the name of the branch. Every guarded node that has an
effect or is a marker has a control edge from its own marker, so a part of the graph that needs the node also needs the
predicate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dapple_tf.graph_passes.ir.graph import (
    Effect,
    Function,
    FunctionRef,
    Graph,
    Node,
    Port,
    Role,
    Value,
    attributes,
    topological,
)

BRANCHES = ("then_branch", "else_branch")
"""The attributes of ``If`` that name the functions of the branches."""

GUARD_REASON = "condition: runs only where the predicate says so"


def guarded(node: Node, marker: str, branch: str) -> Node:
    """Return ``node`` marked as a node of the branch ``branch`` of the open condition ``marker``."""
    node = node.with_attrs(guard=(marker, branch))
    return node if node.effect == Effect.PURE and not is_marker(node) else node.after(marker, GUARD_REASON)


def is_marker(node: Node) -> bool:
    """Return whether the node is the marker of an open condition."""
    return node.op == "If" and node.has("open")


def fold_conditions(graph: Graph) -> Graph:
    """Return the graph with its outermost open conditions as ``If`` nodes, whose branches are functions of the graph.

    Conditions inside the branches stay open. The branches return nothing: no node outside of a condition may take an
    output of a node that it guards.
    """
    outermost = _outermost(graph)
    if not outermost:
        return graph
    members: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.name in outermost and outermost[node.name] != node.name:
            members.setdefault(outermost[node.name], []).append(node)
    nodes: list[Node] = []
    functions: list[Function] = []
    for node in graph.nodes:
        marker = outermost.get(node.name)
        if marker is None:
            nodes.append(node.replace_controls(outermost))
        elif marker == node.name:
            folded, branches = _fold(graph, node, members.get(node.name, []))
            nodes.append(folded.replace_controls(outermost))
            functions += branches
    return graph.replace(nodes=topological(nodes), functions=(*graph.functions, *functions))


def _outermost(graph: Graph) -> dict[str, str]:
    """Return, for each marker and each guarded node, the outermost marker."""
    found: dict[str, str] = {}

    def of(node: Node) -> str:
        if node.name not in found:
            found[node.name] = of(graph.node(node.strings("guard")[0])) if node.has("guard") else node.name
        return found[node.name]

    for node in graph.nodes:
        if node.has("guard") or is_marker(node):
            of(node)
    return found


def _fold(graph: Graph, marker: Node, members: Sequence[Node]) -> tuple[Node, list[Function]]:
    """Return the ``If`` node of the condition, and the functions of its branches."""
    names = {node.name for node in members}
    entering = list(dict.fromkeys(v for node in members for v in node.inputs if v.node not in names))
    sides = _sides(graph, marker, members)
    functions = [
        _branch(graph, f"{graph.name}/{marker.name}/{side}", [n for n in members if sides[n.name] == side], entering)
        for side in BRANCHES
    ]
    kinds = [graph.type_of(value) for value in entering]
    own = {key: value for key, value in marker.attrs if key != "open"}
    attrs = {side: FunctionRef(function.name) for side, function in zip(BRANCHES, functions, strict=True)}
    writes = dict.fromkeys(name for node in members if node.has("writes") for name in node.strings("writes"))
    controls = {c.source: c for n in members for c in n.controls if c.source not in names and c.source != marker.name}
    folded = dataclasses.replace(
        marker,
        inputs=(*marker.inputs, *entering),
        controls=(*marker.controls, *controls.values()),
        effect=Effect.WRITE,
        attrs=attributes({**own, **attrs, "Tin": tuple(k.dtype for k in kinds), "writes": tuple(writes)}),
    )
    return folded, functions


def _sides(graph: Graph, marker: Node, members: Sequence[Node]) -> dict[str, str]:
    """Return the branch of ``marker`` in which each member is, directly or inside of another open condition."""
    found: dict[str, str] = {}
    for node in members:
        around, side = node.strings("guard")
        while around != marker.name:
            around, side = graph.node(around).strings("guard")
        found[node.name] = side
    return found


def _branch(graph: Graph, name: str, nodes: Sequence[Node], entering: Sequence[Value]) -> Function:
    """Return the function of a branch, which takes the values ``entering``."""
    inside = {node.name for node in nodes}
    inputs: list[tuple[Port, Node]] = []
    for i, value in enumerate(entering):
        kind = graph.type_of(value)
        role: Role = "variable" if kind.dtype.name == "resource" else "carry"
        port = Port(role, str(value), kind)
        inputs.append((port, port.node(f"entering/{i}")))
    by_value = {value: Value(node.name) for value, (_, node) in zip(entering, inputs, strict=True)}
    marker_of = {node.name: node for node in nodes if is_marker(node)}
    body = []
    for node in nodes:
        if node.strings("guard")[0] not in marker_of:  # guarded by the condition that is folded
            node = node.without("guard")
        controls = tuple(control for control in node.controls if control.source in inside)
        body.append(dataclasses.replace(node.replace_inputs(by_value), controls=controls))
    ordered = topological([*(node for _, node in inputs), *body])
    return Function(name, Graph(name, ordered, tuple(n.name for _, n in inputs)), tuple(p for p, _ in inputs), ())
