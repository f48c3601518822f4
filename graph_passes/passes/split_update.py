"""Cut the traced update of an optimizer into a function for each site, and functions that all sites share.

A site (``Site``) is a stage, or a replica of a stage whose update is sharded (see ``dapple_tf.sharding``).

Any optimizer can be cut: its ``apply`` is traced once, on all variables, so that it steps once for any number of
stages. A write belongs to the stage of the variable that it updates, a slot to the stage whose updates read it. Writes
of what several stages read (step counter, products of betas) are shared, and run before or after the stages' updates,
as in the optimizer. What the optimizer computes from the gradients of several stages (are they all finite?) is cut into
terms of the stages and their combination (see ``analysis.update_terms``), which all updates take. The update of a stage
updates its variables in groups (see ``bound_update``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.layers import written_variables
from dapple_tf.graph_passes.analysis.update_rounds import Kinds, Sends, find_times, part_rounds, send_values
from dapple_tf.graph_passes.analysis.update_terms import UpdateTerms, find_terms
from dapple_tf.graph_passes.ir.extract import extract_function, results_of
from dapple_tf.graph_passes.ir.graph import ROLE_OF_NAME, Effect, Function, Graph, Role, Value, ancestors
from dapple_tf.graph_passes.ir.names import Site, of_round
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.bound_update import bound_update

_ALONE = "use an optimizer that updates each variable by itself"
_CONDITION = "let no op use what this tf.cond returns (return nothing from its branches), so that it can be cut"


@dataclass(frozen=True)
class Updates:
    """The update functions of the stages, by site, and the shared ones that run before and after them, or None.

    ``terms``: the functions of the stages' terms, by site; ``combine``: the function that combines them, or None.
    ``returned``: the role and the name of the ports whose values the step returns. ``later``: the updates of the next
    round, which runs when these are done (see ``analysis.update_rounds``); None where there is none.
    """

    before: Function | None
    stages: tuple[tuple[Site, Function], ...]
    after: Function | None
    terms: tuple[tuple[Site, Function], ...] = ()
    combine: Function | None = None
    returned: tuple[tuple[Role, str], ...] = ()
    later: Updates | None = None

    @property
    def rounds(self) -> tuple[Updates, ...]:
        """These updates, and those that run later, in order."""
        return (self, *(() if self.later is None else self.later.rounds))

    @property
    def functions(self) -> tuple[Function, ...]:
        """All functions, in the order in which they run."""
        found: list[Function] = []
        for part in self.rounds:
            shared = (part.combine, part.before, part.after)
            combine, before, after = ((() if function is None else (function,)) for function in shared)
            found += (*(f for _, f in part.terms), *combine, *before, *(f for _, f in part.stages), *after)
        return tuple(found)

    def of_site(self, site: Site) -> tuple[Function, ...]:
        """Return the functions that update the variables of a site, in the order in which they run."""
        return tuple(function for part in self.rounds for place, function in part.stages if place == site)


@dataclass(frozen=True)
class _Round:
    """The facts about one round. ``graph``: its update; ``owner`` gives the site of each variable.

    ``shared``: variables that all sites hold and write. ``state``: the variables that forward writes. ``handed``: the
    values that the round gives to the next one, each with the site that has it. ``number``: the number of the round,
    from 0.
    """

    graph: Graph
    owner: Mapping[str, Site]
    shared: Set[str]
    state: Set[str] = frozenset()
    handed: tuple[tuple[Value, Site | None], ...] = ()
    number: int = 0


def cut_updates(
    graph: Graph,
    owner: Mapping[str, Site],
    readers: Mapping[str, Site] = MappingProxyType({}),
    state: Set[str] = frozenset(),
) -> Updates:
    """Cut ``graph`` by the ``owner`` of each variable of the model.

    Its arguments are gradients: the attribute ``port`` names the variable; ``role`` is slices or indices, and may be
    left out for a dense gradient. Arguments whose role is whole are outputs of the step, by number. Its outputs are
    what the step returns. Conditions that write variables are open (see ``ir.conditions``). ``readers``: the first
    site that reads each variable that belongs to the update, and that the model reads too. ``state``: the variables
    that forward writes.

    Raises PartitionError if one op updates variables of several sites, or if a write of a site depends on a variable of
    another site whose value cannot be sent to it.
    """
    graph = _remove_identity_n(graph)
    owner = dict(owner) | _owned_by_writers(graph, owner, readers)
    return _cut_rounds(_Round(graph, owner, readers.keys() - owner.keys(), state))


def _cut_rounds(this: _Round) -> Updates:
    """Return the updates of a round, and of those that must come after it."""
    graph = this.graph
    terms = find_terms(graph, this.owner, (), this.shared)
    writes, shared = _sort_writes(graph, this.owner, terms, this.shared)
    place_of: dict[str, Site | None] = {name: site for site, group in writes.items() for name in group}
    place_of |= dict.fromkeys(shared)
    sends = send_values(graph, terms.kinds, place_of)
    terms = find_terms(sends.graph, this.owner, (), this.shared)
    times = find_times(sends, terms.kinds, this.state)
    before = _shared_before(terms, writes, shared)
    kinds, late = terms.kinds, frozenset(times.late)
    after = shared - before  # what a site returns may need these, which all sites do after their own writes
    late_outputs = {
        value
        for value in graph.outputs
        if value.node in late or (isinstance(kinds[value.node], Site) and after & ancestors(graph, [value.node]))
    }
    if not late_outputs and not late.intersection(place_of):
        return _cut_round(this, sends, kinds, times.in_update, writes, shared)
    rounds = part_rounds(graph, late, late_outputs, kinds, place_of)
    targets = {name: graph.node(name).strings("writes") for name in place_of if graph.node(name).has("writes")}
    owned = {
        target: site for name, names in targets.items() for target in names if (site := place_of[name]) is not None
    }
    common = {target for name, names in targets.items() for target in names if place_of[name] is None}
    owner, held = owned | dict(this.owner), this.shared | (common - this.owner.keys())
    first = _cut_rounds(
        dataclasses.replace(this, graph=rounds.now, owner=owner, shared=held, handed=(*this.handed, *rounds.handed))
    )
    of_handed = {str(value): site for value, site in rounds.handed if site is not None}
    number = this.number + len(first.rounds)
    rest = _cut_rounds(_Round(rounds.later, owner | of_handed, held, handed=this.handed, number=number))
    returned = dict(zip(rounds.now.outputs, first.returned, strict=True))
    returned |= dict(zip(rounds.later.outputs, rest.returned, strict=True))
    given = tuple(returned[value] for value in graph.outputs)
    return dataclasses.replace(_followed_by(first, rest), returned=given)


def _followed_by(first: Updates, later: Updates) -> Updates:
    rest = later if first.later is None else _followed_by(first.later, later)
    return dataclasses.replace(first, later=rest)


def _shared_before(terms: UpdateTerms, writes: Mapping[Site, Set[str]], shared: Set[str]) -> frozenset[str]:
    """Return the shared writes that writes of sites need: these run before the updates of the sites."""
    return frozenset(name for name in shared if any(name in terms.needs[w] for group in writes.values() for w in group))


def _cut_round(
    this: _Round, sends: Sends, kinds: Kinds, in_update: Set[str], writes: Mapping[Site, set[str]], shared: set[str]
) -> Updates:
    """Return the updates of one round, after which nothing is left to do. ``in_update``: see ``Times``."""
    graph, owner = sends.graph, this.owner
    handed = dict(this.handed)
    early: list[Value] = []  # outputs that are given to all sites, as terms are
    sites: dict[Value, Site | None] = {}  # the others, with the site whose update gives them; None: they all do
    for value in graph.outputs:
        kind = kinds[value.node]
        if kind is not None and (value in handed or value.node in in_update):
            place = handed.get(value, kind)
            sites[value] = place if isinstance(place, Site) else None
        else:
            early.append(value)
    terms = find_terms(graph, owner, early, this.shared, sends.sent.values())
    all_writes = set(terms.needs)
    before = set(_shared_before(terms, writes, shared))
    after = shared - before
    overwritten = _handed_over(graph, before)

    def update_function(name: str, own: set[str], site: Site | None, results: Sequence[Value]) -> Function:
        role: Role = "combined" if site is None else "partial"
        taken = frozenset() if own is before else overwritten
        return _update_function(of_round(this.number, name), graph, own, all_writes - own, terms, role, results, taken)

    results_of = {
        site: [value for value, of in sites.items() if of == site] for site in (*sites.values(), *writes, None)
    }
    used = sorted({*writes, *(site for site in sites.values() if site is not None)})
    stages = tuple(
        (site, bound_update(update_function(site.at(OpName.UPDATE), writes.get(site, set()), site, results_of[site])))
        for site in used
    )
    for site, function in stages:
        _check_order(graph, function, before, f"the part of the optimizer of {site}")
    last = update_function("optimizer/after", after, None, results_of[None]) if after or results_of[None] else None
    taken = {port.name for function in (*(f for _, f in stages), *filter(None, [last])) for port in function.inputs}
    given = [value for name in sorted(overwritten) for value in graph.node(name).values() if str(value) in taken]
    updates = Updates(
        update_function("optimizer/before", before, None, given) if before else None,
        stages,
        last,
        tuple((s, _terms_function(graph, terms, s, this.number)) for s in sorted({of for _, of in terms.partial})),
        _combine_function(graph, terms, this.number) if terms.combined else None,
        tuple(("combined" if sites.get(value) is None else "partial", str(value)) for value in graph.outputs),
    )
    if updates.after is not None:
        _check_order(graph, updates.after, all_writes - after, "what the stages share of the optimizer")
    _check_variables(updates, owner)
    return updates


def _owned_by_writers(graph: Graph, owner: Mapping[str, Site], readers: Mapping[str, Site]) -> dict[str, Site]:
    """Return the sites of variables that are written with values which sites compute.

    A variable of ``readers`` belongs to the site that reads it. Any other variable belongs to the site that computes
    its values, if only writes of this site need it. Variables that all sites can compute are not returned.
    """
    terms = find_terms(graph, owner)
    written: dict[str, set[Site]] = {}  # by variable, the sites that compute the values written to it
    needed: dict[str, set[Site | None]] = {}  # by variable, the sites of the writes that need it
    for name, needs in terms.needs.items():
        node = graph.node(name)
        targets = node.written
        sites = {site for source in needs if (site := _site_of(graph, owner, source)) is not None}
        for target in targets:
            if target not in owner:
                written.setdefault(target, set()).update(sites)
        users: set[Site | None] = {*sites, *(owner[target] for target in targets if target in owner)}
        for source in needs:
            if graph.node(source).op == "variable" and source not in owner:
                needed.setdefault(source, set()).update(users or {None})
    found = {}
    for target, sites in written.items():
        if sites and target in readers:
            found[target] = readers[target]
        elif len(sites) == 1 and needed.get(target, set()) <= sites:
            found[target] = next(iter(sites))
    return found


def _site_of(graph: Graph, owner: Mapping[str, Site], name: str) -> Site | None:
    """Return the site of a variable or a gradient; None for any other node."""
    node = graph.node(name)
    if node.op == "arg":
        return owner.get(node.string("port")) if node.get("role") != "whole" else None
    return owner.get(name) if node.op == "variable" else None


def _sort_writes(
    graph: Graph, owner: Mapping[str, Site], terms: UpdateTerms, read_by_model: Set[str]
) -> tuple[dict[Site, set[str]], set[str]]:
    """Return the nodes with effects that belong to each site, and those that the sites share.

    ``read_by_model``: variables that sites share, since forward reads them too.
    """
    writes: dict[Site, set[str]] = {}
    shared: set[str] = set()
    for name, needs in terms.needs.items():
        node = graph.node(name)
        targets = node.written
        owners = {owner[target] for target in targets if target in owner}
        if len(owners) > 1:
            raise PartitionError(
                f"the optimizer's op {name!r} ({node.op}) updates variables of "
                f"{' and '.join(map(str, sorted(owners)))} at once, so "
                f"it cannot run where they live: {_CONDITION if node.op == 'If' else _ALONE}",
                name,
            )
        if not owners:
            found = {site for target in targets for site in terms.slots.get(target, set())}
            read = {owner[n] for n in needs if graph.node(n).op == "variable" and n in owner}
            owners = set() if read_by_model & set(targets) else found or read
        if len(owners) == 1:
            writes.setdefault(owners.pop(), set()).add(name)
        else:
            shared.add(name)
    while moved := _needed_by_shared(graph, owner, terms, writes, shared) | _of_several(graph, owner, writes, shared):
        for group in writes.values():
            group -= moved
        shared |= moved
    return {site: group for site, group in writes.items() if group}, shared


def _needed_by_shared(
    graph: Graph, owner: Mapping[str, Site], terms: UpdateTerms, writes: Mapping[Site, Set[str]], shared: Set[str]
) -> set[str]:
    """Return those writes of sites that every site can do itself, to variables that shared nodes read."""
    read = {source for name in shared for source in terms.needs[name] if graph.node(source).op == "variable"}
    return {
        name
        for group in writes.values()
        for name in group
        if read.intersection(graph.node(name).written)
        and all(_site_of(graph, owner, source) is None for source in terms.needs[name])
    }


def _of_several(graph: Graph, owner: Mapping[str, Site], writes: Mapping[Site, Set[str]], shared: Set[str]) -> set[str]:
    """Return those writes of sites to variables that no site owns, and that other sites or shared nodes write too."""
    places: dict[str, set[Site | None]] = {}
    for site, group in [*writes.items(), (None, shared)]:
        for name in group:
            for target in graph.node(name).written:
                places.setdefault(target, set()).add(site)
    several = {target for target, found in places.items() if len(found) > 1 and target not in owner}
    return {name for group in writes.values() for name in group if several.intersection(graph.node(name).written)}


def _remove_identity_n(graph: Graph) -> Graph:
    """Return the graph without IdentityN nodes. Keras passes all gradients through one, which connects all stages."""
    same: dict[Value, Value] = {}
    nodes = []
    for node in graph.nodes:
        node = node.replace_inputs(same)
        if node.op == "IdentityN" and not node.controls:
            same.update(zip(node.values(), node.inputs, strict=True))
        else:
            nodes.append(node)
    return graph.replace(nodes=tuple(nodes), outputs=tuple(same.get(value, value) for value in graph.outputs))


def _handed_over(graph: Graph, before: Set[str]) -> frozenset[str]:
    """Return the nodes whose values the shared update that runs first gives to all others.

    These are its writes that have results (a generator's numbers), and reads of what it overwrites. There are none in a
    condition, whose branches return nothing.
    """
    written: dict[str, set[str]] = {}
    for name in before:
        for target in graph.node(name).written:
            written.setdefault(target, set()).add(name)
    found = {name for name in before if graph.node(name).outputs}
    acting = {node.name for node in graph.nodes if node.effect in (Effect.WRITE, Effect.SIDE)}
    for node in graph.nodes:
        writers = set().union(*(written.get(value.node, set()) for value in node.inputs))
        if node.effect == Effect.READ and writers:
            needed = ancestors(graph, [node.name])
            if not writers <= needed and needed & acting <= before:
                found.add(node.name)
    return frozenset(name for name in found if not graph.node(name).has("guard"))


def _update_function(
    name: str,
    graph: Graph,
    writes: set[str],
    done: set[str],
    terms: UpdateTerms,
    role: Role,
    returned: Sequence[Value],
    handed: Set[str] = frozenset(),
) -> Function:
    """Return the function of the nodes ``writes`` and all that they need, without the writes ``done`` before it.

    ``returned``: values that it gives, with this ``role``. ``handed``: nodes whose values it takes from the update
    before all others.
    """
    roots = [*writes, *(value.node for value in returned)]
    members = ancestors(graph, roots, stop=done | terms.combining | handed)

    def port_of(value: Value) -> tuple[Role, str] | None:
        found = _input_port(graph, value)
        if found is None and value.node in terms.combining | handed:
            return "combined", str(value)
        if found is None and value.node not in members:
            raise PartitionError(
                f"the optimizer's {name} needs {value}, the result of an update that belongs to another function: use "
                "an optimizer whose updates read variables only",
                value.node,
            )
        return found

    return extract_function(name, graph, members, port_of, results_of(graph, role, returned))


def _input_port(graph: Graph, value: Value) -> tuple[Role, str] | None:
    """Return the port of a gradient or a variable; None for any other value."""
    source = graph.node(value.node)
    if source.op == "arg":
        return ROLE_OF_NAME[source.get("role", "gradient")], source.string("port")
    return ("variable", source.name) if source.op == "variable" else None


def _term_nodes(graph: Graph, values: Sequence[Value], stop: Set[str] = frozenset()) -> set[str]:
    """Return the nodes that compute terms. They have no effects, so they may run outside of a condition."""
    return ancestors(graph, (value.node for value in values), stop, by_controls=False)


def _terms_function(graph: Graph, terms: UpdateTerms, site: Site, number: int) -> Function:
    """Return the function that computes the terms of one site which all sites need."""
    values = [value for value, of in terms.partial if of == site]
    members = _term_nodes(graph, values)
    name, results = of_round(number, site.at(OpName.UPDATE_TERMS)), results_of(graph, "partial", values)
    return extract_function(name, _unguarded(graph), members, lambda value: _input_port(graph, value), results)


def _combine_function(graph: Graph, terms: UpdateTerms, number: int) -> Function:
    """Return the function that combines the terms of the stages."""
    partial = {value for value, _ in terms.partial}
    members = _term_nodes(graph, terms.combined, {value.node for value in partial})

    def port_of(value: Value) -> tuple[Role, str] | None:
        return ("partial", str(value)) if value in partial else _input_port(graph, value)

    name, results = of_round(number, "optimizer/combine"), results_of(graph, "combined", terms.combined)
    return extract_function(name, _unguarded(graph), members, port_of, results)


def _unguarded(graph: Graph) -> Graph:
    """Return the graph with nothing guarded by a condition: terms have no effects and may be computed at any time."""
    return graph.replace(nodes=tuple(node.without("guard") for node in graph.nodes))


def _check_variables(updates: Updates, owner: Mapping[str, Site]) -> None:
    """Raise PartitionError where a function uses a variable that belongs to a site where the function does not run."""
    at_site = {function.name: site for site, function in (*updates.stages, *updates.terms)}
    owner = {name: site for site, function in updates.stages for name in written_variables(function.graph)} | dict(
        owner
    )
    for function in updates.functions:
        for _, port in function.input_ports("variable"):
            here = at_site.get(function.name)
            if owner.get(port.name, here) != here:
                where = "an update that all stages share" if here is None else f"an update of {here}"
                raise PartitionError(
                    f"the optimizer uses the variable {port.name!r}, which {owner[port.name]} holds, in {where}: "
                    "use an optimizer that updates each variable by itself, or by numbers that it computes from the "
                    "gradients or variables of all stages before it writes any",
                    _user_of(function, port.name),
                )


def _user_of(function: Function, variable: str) -> str:
    """Return the name of the first node of the function that uses this variable."""
    place = next(i for i, port in function.input_ports("variable") if port.name == variable)
    argument = function.graph.inputs[place]
    return next(node.name for node in function.graph.nodes if any(v.node == argument for v in node.inputs))


def _check_order(graph: Graph, function: Function, earlier: Set[str], part: str) -> None:
    """Raise PartitionError where a part of the update reads a variable whose old value an earlier part overwrites.

    ``part``: names the ``function`` in the error. ``earlier``: the nodes of parts that run before it.
    """
    overwritten = {target: name for name in sorted(earlier) for target in graph.node(name).written}
    for node in function.graph.nodes:
        if node.effect != Effect.READ:
            continue
        original = graph.node(node.name)
        for target in (value.node for value in original.inputs if value.node in overwritten):
            if overwritten[target] not in ancestors(graph, [node.name]):
                raise PartitionError(
                    f"{part} reads {target!r} ({node.name!r}) before the optimizer writes it "
                    f"({overwritten[target]!r}), and other parts read it after: use an optimizer that writes what all "
                    "variables share before or after it updates them",
                    node.name,
                )
