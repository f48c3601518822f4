"""Cut the traced update of an optimizer into a function for each site, and functions that all sites share.

A site (``Site``) is a stage, or a replica of a stage whose update is sharded (see ``dapple_tf.sharding``).

Any optimizer can be cut: its ``apply`` is traced once, on all variables, so that it steps once for any number of
stages. A write belongs to the stage of the variable that it updates, a slot to the stage whose updates read it. What
several stages read (step counter, products of betas) is shared, and runs before or after the stages' updates, as in the
optimizer. What the optimizer computes from the gradients of several stages (are they all finite?) is cut into terms of
the stages and their combination (see ``analysis.update_terms``), which all updates take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.layers import written_variables
from dapple_tf.graph_passes.analysis.update_terms import UpdateTerms, find_terms, term_nodes
from dapple_tf.graph_passes.ir.extract import extract_function
from dapple_tf.graph_passes.ir.graph import Effect, Function, Graph, Node, Port, Role, Value, ancestors
from dapple_tf.graph_passes.ir.names import Site
from dapple_tf.graph_passes.ir.ops import OpName

_ALONE = "use an optimizer that updates each variable by itself"
_CONDITION = "let no op use what this tf.cond returns (return nothing from its branches), so that it can be cut"
_ARGUMENT_ROLES: Mapping[str, Role] = {
    "gradient": "gradient",
    "slices": "slices",
    "indices": "indices",
    "whole": "whole",
}


@dataclass(frozen=True)
class Updates:
    """The update functions of the stages, by site, and the shared ones that run before and after them, or None.

    ``terms``: the functions of the stages' terms, by site; ``combine``: the function that combines them, or None.
    ``returned``: the role and the name of the ports whose values the step returns.
    """

    before: Function | None
    stages: tuple[tuple[Site, Function], ...]
    after: Function | None
    terms: tuple[tuple[Site, Function], ...] = ()
    combine: Function | None = None
    returned: tuple[tuple[Role, str], ...] = ()

    @property
    def functions(self) -> tuple[Function, ...]:
        """All functions, in the order in which they run."""
        shared = (self.combine, self.before, self.after)
        combine, before, after = ((() if function is None else (function,)) for function in shared)
        return (*(f for _, f in self.terms), *combine, *before, *(f for _, f in self.stages), *after)


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

    Raises PartitionError if one op updates the variables of several sites, if what a site writes depends on a
    variable of another one, or if terms cannot be cut (see ``find_terms``).
    """
    graph = _remove_identity_n(graph)
    early, late = _sort_returned(graph)
    owner = dict(owner) | _owned_by_readers(graph, owner, readers)
    terms = find_terms(graph, owner, early, readers.keys() - owner.keys(), state)
    writes, shared = _sort_writes(graph, owner, terms, readers.keys() - owner.keys())
    all_writes = set(terms.needs)
    before = {name for name in shared if any(name in terms.needs[w] for group in writes.values() for w in group)}
    after = shared - before
    handed = _handed_over(graph, before)
    sites = {value: _site_of_returned(graph, value, writes, shared) for value in late}

    def update_function(name: str, own: set[str], site: Site | None) -> Function:
        results = [value for value, of in sites.items() if of == site]
        return _update_function(name, graph, own, all_writes - own, terms, results, handed)

    used = sorted({*writes, *(site for site in sites.values() if site is not None)})
    stages = tuple((site, update_function(site.at(OpName.UPDATE), writes.get(site, set()), site)) for site in used)
    for site, function in stages:
        _check_order(graph, function, before, f"the part of the optimizer of {site}")
    last = update_function("optimizer/after", after, None) if after or None in sites.values() else None
    taken = {port.name for function in (*(f for _, f in stages), *filter(None, [last])) for port in function.inputs}
    given = [value for name in sorted(handed) for value in graph.node(name).values() if str(value) in taken]
    updates = Updates(
        _update_function("optimizer/before", graph, before, all_writes - before, terms, given) if before else None,
        stages,
        last,
        tuple((site, _terms_function(graph, terms, site)) for site in sorted({of for _, of in terms.partial})),
        _combine_function(graph, terms) if terms.combined else None,
        tuple(_returned_port(value, sites) for value in graph.outputs),
    )
    if updates.after is not None:
        _check_order(graph, updates.after, all_writes - after, "what the stages share of the optimizer")
    _check_variables(updates, owner)
    return updates


def _sort_returned(graph: Graph) -> tuple[list[Value], list[Value]]:
    """Return the outputs of an update that depend on nothing that it writes, and the others."""
    acting = {node.name for node in graph.nodes if node.effect in (Effect.WRITE, Effect.SIDE)}
    early: list[Value] = []
    late: list[Value] = []
    for value in graph.outputs:
        (late if acting & ancestors(graph, [value.node]) else early).append(value)
    return early, late


def _owned_by_readers(graph: Graph, owner: Mapping[str, Site], readers: Mapping[str, Site]) -> dict[str, Site]:
    """Return those of ``readers`` whose variable is written with a value that some site computes.

    Such a variable lives where it is read. All sites can write what they share.
    """
    if not readers:
        return {}
    terms = find_terms(graph, owner)
    found = {}
    for name, needs in terms.needs.items():
        node = graph.node(name)
        targets = [
            target for target in (node.strings("writes") if node.effect == Effect.WRITE else ()) if target in readers
        ]
        if targets and any(_site_of(graph, owner, source) is not None for source in needs):
            found.update({target: readers[target] for target in targets})
    return found


def _site_of(graph: Graph, owner: Mapping[str, Site], name: str) -> Site | None:
    """Return the site of a variable or a gradient; None for any other node."""
    node = graph.node(name)
    if node.op == "arg":
        return owner.get(node.string("port")) if _role(node) != "whole" else None
    return owner.get(name) if node.op == "variable" else None


def _site_of_returned(graph: Graph, value: Value, writes: Mapping[Site, Set[str]], shared: Set[str]) -> Site | None:
    """Return the site whose update gives a returned value, None for the update that all sites share."""
    needed = ancestors(graph, [value.node])
    sites = [site for site, names in writes.items() if needed & names]
    if len(sites) > 1 or (sites and needed & shared):
        raise PartitionError(
            f"the step returns {value}, which it computes from variables of {_name_sites(sites)} after it has "
            "updated them: compute it from the variables after the step",
            value.node,
        )
    return sites[0] if sites else None


def _name_sites(sites: Iterable[Site]) -> str:
    return " and ".join(map(str, sorted(sites)))


def _returned_port(value: Value, sites: Mapping[Value, Site | None]) -> tuple[Role, str]:
    return ("partial" if sites.get(value) is not None else "combined"), str(value)


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
        targets = node.strings("writes") if node.effect == Effect.WRITE else ()
        owners = {owner[target] for target in targets if target in owner}
        if len(owners) > 1:
            raise PartitionError(
                f"the optimizer's op {name!r} ({node.op}) updates variables of {_name_sites(owners)} at once, so "
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
    while moved := _needed_by_shared(graph, owner, terms, writes, shared):
        for group in writes.values():
            group -= moved
        shared |= moved
    return {site: group for site, group in writes.items() if group}, shared


def _needed_by_shared(
    graph: Graph, owner: Mapping[str, Site], terms: UpdateTerms, writes: Mapping[Site, Set[str]], shared: Set[str]
) -> set[str]:
    """Return the writes of sites, of variables that what they share reads, which all sites can do themselves."""
    read = {source for name in shared for source in terms.needs[name] if graph.node(source).op == "variable"}
    return {
        name
        for group in writes.values()
        for name in group
        if read.intersection(graph.node(name).strings("writes") if graph.node(name).effect == Effect.WRITE else ())
        and all(_site_of(graph, owner, source) is None for source in terms.needs[name])
    }


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
    return graph.replace(nodes=tuple(nodes), outputs=tuple(same.get(value, value) for value in graph.outputs))


def _handed_over(graph: Graph, before: Set[str]) -> frozenset[str]:
    """Return the nodes whose values the shared update before all others gives them.

    These are its writes that have results (a generator's numbers), and reads of what it overwrites. In a condition
    there are none: its branches give no values.
    """
    written: dict[str, set[str]] = {}
    for name in before:
        node = graph.node(name)
        for target in node.strings("writes") if node.effect == Effect.WRITE else ():
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
    returned: Sequence[Value],
    handed: Set[str] = frozenset(),
) -> Function:
    """Return the function of the nodes ``writes`` and all that they need, but for the writes ``done`` before it.

    ``returned``: values that it gives. ``handed``: nodes whose values it takes from the update before all others.
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

    role: Role = "combined" if name.startswith("optimizer/") else "partial"
    ports = [Port(role, str(value), graph.type_of(value)) for value in returned]
    return extract_function(name, graph, members, port_of, ports, returned)


def _input_port(graph: Graph, value: Value) -> tuple[Role, str] | None:
    """Return the port of a gradient or a variable; None for any other value."""
    source = graph.node(value.node)
    if source.op == "arg":
        return _ARGUMENT_ROLES[_role(source)], source.string("port")
    return ("variable", source.name) if source.op == "variable" else None


def _role(node: Node) -> str:
    return node.string("role") if node.has("role") else "gradient"


def _terms_function(graph: Graph, terms: UpdateTerms, site: Site) -> Function:
    """Return the function that computes the terms of one site which all sites need."""
    values = [value for value, of in terms.partial if of == site]
    members = term_nodes(graph, values, set())
    ports = [Port("partial", str(value), graph.type_of(value)) for value in values]
    name = site.at(OpName.UPDATE_TERMS)
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


def _check_variables(updates: Updates, owner: Mapping[str, Site]) -> None:
    """Raise PartitionError where a function uses a variable that lives at a site where it does not run."""
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
                    "variables share before or after it updates them",
                    node.name,
                )
