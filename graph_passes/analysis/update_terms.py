"""Cut values that an update computes from the gradients of several stages: a test for finiteness, a global norm.

Such a value is cut in two: each stage computes its *partial* terms, from its own gradients, and what *combines* them
runs once for all stages. So the stages exchange a few numbers, and no gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from dapple_tf.graph_passes.ir.conditions import is_marker
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Value, ancestors
from dapple_tf.graph_passes.ir.names import Site

_HOISTED = (Effect.PURE, Effect.READ)


@dataclass(frozen=True)
class UpdateTerms:
    """The terms of an update.

    ``kinds``: for each node the site that must compute it, "any", or None where it combines several sites' values.
    ``combining``: the nodes that combine terms of several stages (or of several replicas that update variables of one
    stage: see ``shard_optimizer``). ``partial``: the values that they take, each with the site that computes it.
    ``combined``: the results of combining nodes that other nodes take. ``needs``: for each node that writes or has
    another effect, the node itself and all nodes that it depends on, up to those that combine stages. ``slots``: for
    each variable that is not trained, the sites whose updates read it.
    """

    kinds: Mapping[str, Site | str | None]
    combining: frozenset[str] = frozenset()
    partial: tuple[tuple[Value, Site], ...] = ()
    combined: tuple[Value, ...] = ()
    needs: Mapping[str, Set[str]] = field(default_factory=dict)
    slots: Mapping[str, Set[Site]] = field(default_factory=dict)


def find_terms(
    graph: Graph,
    owner: Mapping[str, Site],
    returned: Sequence[Value] = (),
    read_by_model: Set[str] = frozenset(),
    sent: Iterable[tuple[Value, Site]] = (),
) -> UpdateTerms:
    """Return the terms of the update ``graph``, whose conditions are open; ``owner``: the site of each variable.

    ``returned``: values that are given to all stages, as combined terms are. ``read_by_model``: variables that all
    stages share, even if the updates of only one site read them. ``sent``: values that one site gives to others
    unchanged, each with this site.
    """
    # Values of slots of several sites may be combined too. So the sites of slots are found first: a slot belongs to the
    # site whose updates need it, not counting what is needed through a node that takes values of several sites.
    meeting = frozenset(name for name, kind in _kinds(graph, owner, follow=False).items() if kind is None)
    slots = _slot_sites(graph, owner, _find_needs(graph, meeting))
    of_slots = {n: next(iter(found)) for n, found in slots.items() if len(found) == 1 and n not in read_by_model}
    kinds = _kinds(graph, {**of_slots, **owner}, follow=True)
    combining = frozenset(name for name, kind in kinds.items() if kind is None)
    needs = _find_needs(graph, combining)
    slots = _slot_sites(graph, owner, needs)
    partial = dict(sent)
    combined: dict[Value, None] = {}
    for node in graph.nodes:
        for value in node.inputs:
            kind = kinds[value.node]
            if node.name in combining and isinstance(kind, Site):
                partial[value] = kind
            elif node.name not in combining and kind is None:
                combined[value] = None
    for value in returned:
        kind = kinds[value.node]
        if isinstance(kind, Site):
            partial[value] = kind
        combined[value] = None
    return UpdateTerms(kinds, combining, tuple(partial.items()), tuple(combined), needs, slots)


def _kinds(graph: Graph, site_of: Mapping[str, Site], *, follow: bool) -> dict[str, Site | str | None]:
    """Return for each node the site that must compute it, "any", or None where it combines several sites' values.

    A node that takes values of one site and combined ones belongs to the site. ``follow``: whether a node that takes
    combined values, and no value of a site, combines too.
    """
    kinds: dict[str, Site | str | None] = {}
    for node in graph.nodes:
        if node.op == "arg":
            whole = node.get("role") == "whole"
            kinds[node.name] = "any" if whole else site_of.get(node.string("port"), "any")
        elif node.op == "variable":
            kinds[node.name] = site_of.get(node.name, "any")
        else:
            found = {kinds[value.node] for value in node.inputs}
            sites = [kind for kind in found if isinstance(kind, Site)]
            mixed = len(sites) > 1 or (follow and not sites and None in found)
            if mixed and node.effect in _HOISTED and not is_marker(node):
                kinds[node.name] = None
            else:
                kinds[node.name] = sites[0] if len(sites) == 1 else "any"
    return kinds


def _find_needs(graph: Graph, combining: Set[str]) -> dict[str, set[str]]:
    """Return ``UpdateTerms.needs``. What a predicate depends on is found once, however many nodes it guards."""
    markers = {node.name for node in graph.nodes if is_marker(node)}
    of_marker = {name: ancestors(graph, [name], stop=combining) for name in markers}
    needs: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.effect in (Effect.WRITE, Effect.SIDE):
            found = ancestors(graph, [node.name], stop=combining | markers)
            reached = {source for name in found for source in graph.node(name).predecessors()} & markers
            needs[node.name] = found.union(*(of_marker[name] for name in reached))
    return needs


def _slot_sites(graph: Graph, owner: Mapping[str, Site], needs: Mapping[str, Set[str]]) -> dict[str, set[Site]]:
    """Return, for each variable that is not trained, the sites whose updates read it."""
    sites: dict[str, set[Site]] = {}
    for name, needed_by in needs.items():
        updated = {owner[target] for target in graph.node(name).written if target in owner}
        for needed in needed_by:
            if graph.node(needed).op == "variable" and needed not in owner:
                sites.setdefault(needed, set()).update(updated)
    return sites
