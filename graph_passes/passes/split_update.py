"""Cut the traced update of an optimizer into one function a stage, and what is shared.

Any optimizer will do: its whole ``apply`` is traced once, on all variables, so that it steps once however
many stages there are. A write belongs to the stage of the variable it updates; a slot to the stage whose
updates read it; what several stages read (step counter, products of betas) is shared, and runs before or
after the stages' updates as the optimizer has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from graph_passes.errors import PartitionError
from graph_passes.ir.extract import extract_function
from graph_passes.ir.graph import Effect, Function, Graph, Value, ancestors
from graph_passes.ir.names import at


@dataclass(frozen=True)
class Updates:
    """``before`` and ``after``: what all stages share (None where there is nothing); ``stages`` by index."""

    before: Function | None
    stages: tuple[tuple[int, Function], ...]
    after: Function | None


def cut_updates(graph: Graph, owner: Mapping[str, int]) -> Updates:
    """Cut ``graph``, whose args are the gradients (named as their variables), by ``owner`` of each variable.

    Raises PartitionError when one op updates the variables of several stages.
    """
    graph = _unbundle(graph)
    closure = {n.name: ancestors(graph, [n.name]) for n in graph.nodes if n.effect in (Effect.WRITE, Effect.SIDE)}
    homes = _slot_stages(graph, owner, closure)
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
            found = {stage for target in targets for stage in homes.get(target, set())}
            read = {owner[n] for n in needs if graph.node(n).op == "variable" and n in owner}
            owners = found or read
        if len(owners) == 1:
            writes.setdefault(owners.pop(), set()).add(name)
        else:
            shared.add(name)
    everything = set(closure)
    before = {name for name in shared if any(name in closure[w] for group in writes.values() for w in group)}
    after = shared - before
    stages = tuple(
        (stage, _function(at(stage, what="update"), graph, writes[stage], everything - writes[stage]))
        for stage in sorted(writes)
    )
    return Updates(
        _function("optimizer/before", graph, before, everything - before) if before else None,
        stages,
        _function("optimizer/after", graph, after, everything - after) if after else None,
    )


def _unbundle(graph: Graph) -> Graph:
    """The graph less its IdentityN nodes: Keras passes all gradients through one, which ties all stages together."""
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
    """For each variable that is not trained, the stages whose updates read it."""
    stages: dict[str, set[int]] = {}
    for name, needs in closure.items():
        node = graph.node(name)
        updated = {owner[t] for t in node.strings("writes") if t in owner} if node.has("writes") else set()
        for needed in needs:
            if graph.node(needed).op == "variable" and needed not in owner:
                stages.setdefault(needed, set()).update(updated)
    return stages


def _function(name: str, graph: Graph, roots: set[str], done: set[str]) -> Function:
    """The writes ``roots`` and all they need, less the writes in ``done``, which have run before."""
    members = ancestors(graph, roots, stop=done)

    def port_of(value: Value) -> tuple[str, str] | None:
        source = graph.node(value.node)
        if source.op == "arg":
            return "gradient", source.string("port")
        if source.op == "variable":
            return "variable", source.name
        if value.node in members:
            return None
        raise PartitionError(f"the optimizer's {name} needs {value}, the result of an update it shares")

    return extract_function(name, graph, members, port_of, (), ())
