"""Cut the traced update of an optimizer into a function for each stage, and functions that all stages share.

Any optimizer can be cut: its ``apply`` is traced once, on all variables, so that it steps once for any number of
stages. A write belongs to the stage of the variable that it updates, a slot to the stage whose updates read it. What
several stages read (step counter, products of betas) is shared, and runs before or after the stages' updates, as in the
optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from graph_passes.errors import PartitionError
from graph_passes.ir.extract import extract_function
from graph_passes.ir.graph import Effect, Function, Graph, Role, Value, ancestors
from graph_passes.ir.names import at
from graph_passes.ir.ops import OpName

_GRADIENT_ROLES: Mapping[str, Role] = {"gradient": "gradient", "slices": "slices", "indices": "indices"}


@dataclass(frozen=True)
class Updates:
    """The update functions of the stages, by stage, and the shared ones that run before and after them, or None."""

    before: Function | None
    stages: tuple[tuple[int, Function], ...]
    after: Function | None


def cut_updates(graph: Graph, owner: Mapping[str, int]) -> Updates:
    """Cut ``graph`` by the ``owner`` of each variable.

    Its arguments are gradients: the attribute ``port`` names the variable; ``role`` is slices or indices, and left out
    for a dense gradient.

    Raises PartitionError if one op updates the variables of several stages.
    """
    graph = _remove_identity_n(graph)
    closure = {n.name: ancestors(graph, [n.name]) for n in graph.nodes if n.effect in (Effect.WRITE, Effect.SIDE)}
    slot_stages = _slot_stages(graph, owner, closure)
    writes: dict[int, set[str]] = {}
    shared: set[str] = set()
    for name, needs in closure.items():
        node = graph.node(name)
        targets = node.strings("writes") if node.effect == Effect.WRITE else ()
        owners = {owner[target] for target in targets if target in owner}
        if len(owners) > 1:
            raise PartitionError(
                f"the optimizer's op {name!r} ({node.op}) updates variables of stages {sorted(owners)} at once, so "
                "it cannot run where they live: use an optimizer that updates each variable by itself"
            )
        if not owners:
            found = {stage for target in targets for stage in slot_stages.get(target, set())}
            read = {owner[n] for n in needs if graph.node(n).op == "variable" and n in owner}
            owners = found or read
        if len(owners) == 1:
            writes.setdefault(owners.pop(), set()).add(name)
        else:
            shared.add(name)
    all_writes = set(closure)
    before = {name for name in shared if any(name in closure[w] for group in writes.values() for w in group)}
    after = shared - before
    stages = tuple(
        (stage, _update_function(at(stage, what=OpName.UPDATE), graph, writes[stage], all_writes - writes[stage]))
        for stage in sorted(writes)
    )
    return Updates(
        _update_function("optimizer/before", graph, before, all_writes - before) if before else None,
        stages,
        _update_function("optimizer/after", graph, after, all_writes - after) if after else None,
    )


def _remove_identity_n(graph: Graph) -> Graph:
    """Return the graph without IdentityN nodes. Keras passes all gradients through one, which connects all stages."""
    same: dict[Value, Value] = {}
    nodes = []
    for node in graph.nodes:
        node = dataclasses.replace(node, inputs=tuple(same.get(value, value) for value in node.inputs))
        if node.op == "IdentityN" and not node.controls:
            same.update(zip(node.values(), node.inputs, strict=True))
        else:
            nodes.append(node)
    return graph.replace(nodes=tuple(nodes))


def _slot_stages(graph: Graph, owner: Mapping[str, int], closure: Mapping[str, set[str]]) -> dict[str, set[int]]:
    """Return, for each variable that is not trained, the stages whose updates read it."""
    stages: dict[str, set[int]] = {}
    for name, needs in closure.items():
        node = graph.node(name)
        updated = {owner[t] for t in node.strings("writes") if t in owner} if node.has("writes") else set()
        for needed in needs:
            if graph.node(needed).op == "variable" and needed not in owner:
                stages.setdefault(needed, set()).update(updated)
    return stages


def _update_function(name: str, graph: Graph, writes: set[str], done: set[str]) -> Function:
    """Return the function of the nodes ``writes`` and all that they need, but for the writes ``done`` before it."""
    members = ancestors(graph, writes, stop=done)

    def port_of(value: Value) -> tuple[Role, str] | None:
        source = graph.node(value.node)
        if source.op == "arg":
            role = source.string("role") if source.has("role") else "gradient"
            return _GRADIENT_ROLES[role], source.string("port")
        if source.op == "variable":
            return "variable", source.name
        if value.node in members:
            return None
        raise PartitionError(
            f"the optimizer's {name} needs {value}, the result of an update that belongs to another function: use an "
            "optimizer whose updates read variables only"
        )

    return extract_function(name, graph, members, port_of, (), ())
