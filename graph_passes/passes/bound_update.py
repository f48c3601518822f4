"""Update the variables of a stage in groups, one after the other, so that few temporary tensors exist at once.

TensorFlow runs an op as soon as its inputs are there. An optimizer's update of one variable needs no other variable
(Adam: two moments, then the weight), so the temporary tensors of all variables of a stage may exist at the same time:
for Adam as much as twice the weights. Control edges from one group of variables to the next one limit them to what one
group takes. An edge only makes ops wait, so all values stay the same.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from dapple_tf.graph_passes.ir.graph import Attr, Control, Effect, Function, Graph, Node, ancestors

GROUP_BYTES = 64 * 2**20
"""The most bytes that a group writes, slots included: enough work for all threads of a device."""

_END_OP = "NoOp"
_AFTER = "memory: the variables of the group before are updated"


def bound_update(function: Function, group_bytes: int = GROUP_BYTES) -> Function:
    """Return an update function that updates its variables in groups, one after the other.

    A group writes at most ``group_bytes``, or it is one variable with its slots. If the new value of a variable depends
    on that of another one, both are in the same group. Nodes that several groups need run once, as soon as their inputs
    are there. The function is returned unchanged if it has only one group, or writes under several conditions.
    """
    graph = function.graph
    needs = {node.name: ancestors(graph, [node.name]) for node in graph.nodes if node.effect == Effect.WRITE}
    groups = _cut(graph, _find_units(needs), group_bytes)
    guards = {graph.node(name).get("guard") for name in needs}
    if len(groups) < 2 or len(guards) > 1:
        return function
    (guard,) = guards
    ends = [_end(number, group, needs, guard) for number, group in enumerate(groups[:-1])]
    first: dict[str, str] = {}
    for end, waiting in zip(ends, _find_first(graph, groups, needs, guard)[1:], strict=True):
        first |= dict.fromkeys(waiting, end.name)
    nodes = (node.after(first[node.name], _AFTER) if node.name in first else node for node in graph.nodes)
    return dataclasses.replace(function, graph=graph.replace(nodes=(*nodes, *ends)).sorted())


def _find_units(needs: Mapping[str, Set[str]]) -> list[list[str]]:
    """Return the writes in lists: a write is in the same list as the writes that it needs.

    ``needs``: the nodes that each write needs, by the name of the write, in the order of the graph.
    """
    position = {name: i for i, name in enumerate(needs)}
    unit_of: dict[str, list[str]] = {}
    for name, needed in needs.items():
        joined = {other for write in needed if write in unit_of for other in unit_of[write]}
        unit = sorted({*joined, name}, key=position.__getitem__)
        unit_of |= dict.fromkeys(unit, unit)
    return list({id(unit): unit for unit in unit_of.values()}.values())


def _cut(graph: Graph, units: Iterable[Sequence[str]], group_bytes: int) -> list[list[str]]:
    """Return groups of units, in their order, each of which writes at most ``group_bytes``, or is one larger unit."""
    groups: list[list[str]] = []
    size = 0
    for unit in units:
        own = sum(_written_bytes(graph, name) for name in unit)
        if not groups or size + own > group_bytes:
            groups.append([])
            size = 0
        groups[-1] += unit
        size += own
    return groups


def _written_bytes(graph: Graph, name: str) -> int:
    """Return the bytes of the tensors that a write takes, resources left out; an unknown dimension counts as 1."""
    kinds = map(graph.type_of, graph.node(name).inputs)
    return sum(kind.bytes() for kind in kinds if not kind.dtype.handle)


def _end(number: int, group: Sequence[str], needs: Mapping[str, Set[str]], guard: Attr | None) -> Node:
    """Return the node that waits for the last writes of a group."""
    earlier = {other for name in group for other in needs[name] if other != name}
    controls = tuple(Control(name, "memory: the group ends") for name in group if name not in earlier)
    end = Node(f"updated/{number}", _END_OP, controls=controls)
    return end if guard is None else end.with_attrs(guard=guard)


def _find_first(
    graph: Graph, groups: Sequence[Sequence[str]], needs: Mapping[str, Set[str]], guard: Attr | None
) -> list[list[str]]:
    """Return for each group the nodes with which it begins: they take nothing from other nodes that only it needs.

    Inputs of the function and constants take no memory of the group, and need not wait. A node outside of the condition
    that guards the writes cannot wait for them.
    """
    members = [set[str]().union(*(needs[name] for name in group)) for group in groups]
    groups_with = Counter(name for names in members for name in names)
    movable = {node.name for node in graph.nodes if node.op[0].isupper() and node.op != "Const"}
    movable = {name for name in movable if graph.node(name).get("guard") == guard}
    own = [{name for name in names if groups_with[name] == 1 and name in movable} for names in members]
    return [[name for name in names if names.isdisjoint(graph.node(name).predecessors())] for names in own]
