"""Cut the traced update of an optimizer into a function for each stage, and functions that all stages share.

Any optimizer can be cut: its ``apply`` is traced once, on all variables, so that it steps once for any number of
stages. A write belongs to the stage of the variable that it updates, a slot to the stage whose updates read it. What
several stages read (step counter, products of betas) is shared, and runs before or after the stages' updates, as in the
optimizer. What the optimizer computes from the gradients of several stages (are they all finite?) is cut into terms of
the stages and their combination (see ``analysis.update_terms``), which all updates take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from dataclasses import dataclass

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.update_terms import UpdateTerms, find_terms, term_nodes
from dapple_tf.graph_passes.ir.extract import extract_function
from dapple_tf.graph_passes.ir.graph import Effect, Function, Graph, Port, Role, Value, ancestors
from dapple_tf.graph_passes.ir.names import at
from dapple_tf.graph_passes.ir.ops import OpName

_ALONE = "use an optimizer that updates each variable by itself"
_CONDITION = "let no op use what this tf.cond returns (return nothing from its branches), so that it can be cut"
_GRADIENT_ROLES: Mapping[str, Role] = {"gradient": "gradient", "slices": "slices", "indices": "indices"}


@dataclass(frozen=True)
class Updates:
    """The update functions of the stages, by stage, and the shared ones that run before and after them, or None.

    ``terms``: the functions of the stages' terms, by stage; ``combine``: the function that combines them, or None.
    """

    before: Function | None
    stages: tuple[tuple[int, Function], ...]
    after: Function | None
    terms: tuple[tuple[int, Function], ...] = ()
    combine: Function | None = None

    @property
    def functions(self) -> tuple[Function, ...]:
        """All functions, in the order in which they run."""
        shared = (self.combine, self.before, self.after)
        combine, before, after = ((() if function is None else (function,)) for function in shared)
        return (*(f for _, f in self.terms), *combine, *before, *(f for _, f in self.stages), *after)


def cut_updates(graph: Graph, owner: Mapping[str, int]) -> Updates:
    """Cut ``graph`` by the ``owner`` of each variable of the model.

    Its arguments are gradients: the attribute ``port`` names the variable; ``role`` is slices or indices, and left out
    for a dense gradient. Conditions that write variables are open (see ``ir.conditions``).

    Raises PartitionError if one op updates the variables of several stages, if what a stage writes depends on a
    variable of another one, or if terms cannot be cut (see ``find_terms``).
    """
    graph = _remove_identity_n(graph)
    terms = find_terms(graph, owner)
    writes, shared = _sort_writes(graph, owner, terms)
    all_writes = set(terms.needs)
    before = {name for name in shared if any(name in terms.needs[w] for group in writes.values() for w in group)}
    after = shared - before

    def update_function(name: str, own: set[str]) -> Function:
        return _update_function(name, graph, own, all_writes - own, terms)

    stages = tuple((stage, update_function(at(stage, what=OpName.UPDATE), writes[stage])) for stage in sorted(writes))
    for stage, function in stages:
        _check_order(graph, function, before, f"stage {stage}'s part of the optimizer")
    updates = Updates(
        update_function("optimizer/before", before) if before else None,
        stages,
        update_function("optimizer/after", after) if after else None,
        tuple((stage, _terms_function(graph, terms, stage)) for stage in sorted({s for _, s in terms.partial})),
        _combine_function(graph, terms) if terms.combined else None,
    )
    if updates.after is not None:
        _check_order(graph, updates.after, all_writes - after, "what the stages share of the optimizer")
    _check_variables(updates, owner)
    return updates


def _sort_writes(graph: Graph, owner: Mapping[str, int], terms: UpdateTerms) -> tuple[dict[int, set[str]], set[str]]:
    """Return the nodes with effects that belong to each stage, and those that the stages share."""
    writes: dict[int, set[str]] = {}
    shared: set[str] = set()
    for name, needs in terms.needs.items():
        node = graph.node(name)
        targets = node.strings("writes") if node.effect == Effect.WRITE else ()
        owners = {owner[target] for target in targets if target in owner}
        if len(owners) > 1:
            raise PartitionError(
                f"the optimizer's op {name!r} ({node.op}) updates variables of stages {sorted(owners)} at once, so "
                f"it cannot run where they live: {_CONDITION if node.op == 'If' else _ALONE}"
            )
        if not owners:
            found = {stage for target in targets for stage in terms.slots.get(target, set())}
            read = {owner[n] for n in needs if graph.node(n).op == "variable" and n in owner}
            owners = found or read
        if len(owners) == 1:
            writes.setdefault(owners.pop(), set()).add(name)
        else:
            shared.add(name)
    return writes, shared


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


def _update_function(name: str, graph: Graph, writes: set[str], done: set[str], terms: UpdateTerms) -> Function:
    """Return the function of the nodes ``writes`` and all that they need, but for the writes ``done`` before it."""
    members = ancestors(graph, writes, stop=done | terms.combining)

    def port_of(value: Value) -> tuple[Role, str] | None:
        found = _input_port(graph, value)
        if found is None and value.node in terms.combining:
            return "combined", str(value)
        if found is None and value.node not in members:
            raise PartitionError(
                f"the optimizer's {name} needs {value}, the result of an update that belongs to another function: use "
                "an optimizer whose updates read variables only"
            )
        return found

    return extract_function(name, graph, members, port_of, (), ())


def _input_port(graph: Graph, value: Value) -> tuple[Role, str] | None:
    """Return the port of a gradient or a variable; None for any other value."""
    source = graph.node(value.node)
    if source.op == "arg":
        role = source.string("role") if source.has("role") else "gradient"
        return _GRADIENT_ROLES[role], source.string("port")
    return ("variable", source.name) if source.op == "variable" else None


def _terms_function(graph: Graph, terms: UpdateTerms, stage: int) -> Function:
    """Return the function that computes the terms of one stage which all stages need."""
    values = [value for value, of in terms.partial if of == stage]
    members = term_nodes(graph, values, set())
    ports = [Port("partial", str(value), graph.type_of(value)) for value in values]
    name = at(stage, what=OpName.UPDATE_TERMS)
    return extract_function(name, _unguarded(graph), members, lambda value: _input_port(graph, value), ports, values)


def _combine_function(graph: Graph, terms: UpdateTerms) -> Function:
    """Return the function that combines the terms of the stages."""
    partial = {value for value, _ in terms.partial}
    members = term_nodes(graph, list(terms.combined), {value.node for value in partial})
    ports = [Port("combined", str(value), graph.type_of(value)) for value in terms.combined]

    def port_of(value: Value) -> tuple[Role, str] | None:
        return ("partial", str(value)) if value in partial else _input_port(graph, value)

    return extract_function("optimizer/combine", _unguarded(graph), members, port_of, ports, terms.combined)


def _unguarded(graph: Graph) -> Graph:
    """Return the graph with nothing guarded by a condition: terms have no effects and may be computed at any time."""
    return graph.replace(
        nodes=tuple(
            dataclasses.replace(node, attrs=tuple((key, value) for key, value in node.attrs if key != "guard"))
            for node in graph.nodes
        )
    )


def _check_variables(updates: Updates, owner: Mapping[str, int]) -> None:
    """Raise PartitionError where a function uses a variable that lives on a stage on which it does not run."""
    at_stage = {function.name: stage for stage, function in (*updates.stages, *updates.terms)}
    for function in updates.functions:
        for _, port in function.input_ports("variable"):
            here = at_stage.get(function.name)
            if owner.get(port.name, here) != here:
                place = "an update that all stages share" if here is None else f"an update of stage {here}"
                raise PartitionError(
                    f"the optimizer uses the variable {port.name!r}, which stage {owner[port.name]} holds, in {place}: "
                    "use an optimizer that updates each variable by itself, or by numbers that it computes from the "
                    "gradients or variables of all stages before it writes any"
                )


def _check_order(graph: Graph, function: Function, earlier: Set[str], part: str) -> None:
    """Raise PartitionError where a part of the update reads a variable whose old value an earlier part overwrites.

    ``part``: names the ``function`` in the error. ``earlier``: the nodes of parts that run before it.
    """
    written = (graph.node(name) for name in sorted(earlier) if graph.node(name).effect == Effect.WRITE)
    overwritten = {target: node.name for node in written for target in node.strings("writes")}
    for node in function.graph.nodes:
        if node.effect != Effect.READ:
            continue
        original = graph.node(node.name)
        for target in (value.node for value in original.inputs if value.node in overwritten):
            if overwritten[target] not in ancestors(graph, [node.name]):
                raise PartitionError(
                    f"{part} reads {target!r} ({node.name!r}) before the optimizer writes it "
                    f"({overwritten[target]!r}), and other parts read it after: use an optimizer that writes what all "
                    "variables share before or after it updates them"
                )
