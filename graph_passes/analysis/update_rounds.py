"""Find the values that an update sends between stages, and divide the update into rounds if it writes such values.

A write of one stage may take a value of another stage, such as the weight that a moving average follows. Such a value
is *sent*: the stage that has it computes it as a term. Terms are computed before anything is written. So a write that
takes a new value of another stage's variable belongs to a later *round*, and so does a node that combines new values of
several stages. A round begins when the writes of the round before are done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from dataclasses import dataclass

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.layers import variables_of
from dapple_tf.graph_passes.ir.conditions import is_marker
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value, ancestors, make_node
from dapple_tf.graph_passes.ir.names import Site

Kinds = Mapping[str, Site | str | None]
"""For each node the site that must compute it, "any", or None where it combines values of several sites."""

_ACTING = (Effect.WRITE, Effect.SIDE)


@dataclass(frozen=True)
class Sends:
    """An update in which each value that is ``sent`` to other sites is an argument of the role partial.

    ``sent``: the value and the site that computes it, by the name of the argument.
    """

    graph: Graph
    sent: Mapping[str, tuple[Value, Site]]


def send_values(graph: Graph, kinds: Kinds, place_of: Mapping[str, Site | None]) -> Sends:
    """Return the update in which nodes take values of other sites as arguments, unless they combine several sites.

    ``place_of``: the site of each node that writes or has another effect; None where all sites share the node. A node
    that combines values of several sites for a single site runs on that site.
    """
    places: dict[str, Site | str | None] = {
        **kinds,
        **_combined_for_one_site(graph, kinds, place_of),
        **_places_of_conditions(graph, place_of),
        **place_of,
    }
    sent: dict[str, tuple[Value, Site]] = {}
    nodes: list[Node] = []
    made: dict[Value, Node] = {}
    for node in graph.nodes:
        here = places[node.name]
        combines = here is None and kinds[node.name] is None and node.effect not in _ACTING and not is_marker(node)
        inputs = []
        for value in node.inputs:
            there = places[value.node]
            kind = graph.type_of(value)
            if isinstance(there, Site) and here != there and not combines and not kind.dtype.handle:
                if value not in made:
                    made[value] = make_node(f"sent/{len(made)}", "arg", (), [kind], port=str(value), role="partial")
                    nodes.append(made[value])
                    sent[made[value].name] = value, there
                value = Value(made[value].name)
            inputs.append(value)
        nodes.append(dataclasses.replace(node, inputs=tuple(inputs)))
    return Sends(graph.replace(nodes=tuple(nodes)), sent)


def _combined_for_one_site(graph: Graph, kinds: Kinds, place_of: Mapping[str, Site | None]) -> dict[str, Site]:
    """Return the site of each node that combines values of several sites which only one site uses."""
    users: dict[str, set[Site | str | None]] = {node.name: set() for node in graph.nodes}
    for value in graph.outputs:
        users[value.node].add(None)
    for node in reversed(graph.nodes):
        kind = kinds[node.name]
        own: set[Site | str | None] = {place_of.get(node.name)}
        if node.effect not in _ACTING and not is_marker(node):
            own = {kind} if isinstance(kind, Site) else users[node.name]
        for value in node.inputs:
            users[value.node] |= own
    found = {}
    for name, sites in users.items():
        if kinds[name] is None and len(sites) == 1 and isinstance(site := next(iter(sites)), Site):
            found[name] = site
    return found


def _places_of_conditions(graph: Graph, place_of: Mapping[str, Site | None]) -> dict[str, Site | None]:
    """Return the site whose nodes each open condition guards; None where it guards nodes of several sites."""
    guarded: dict[str, set[Site | None]] = {node.name: set() for node in graph.nodes if is_marker(node)}
    for node in graph.nodes:
        around = node
        while node.name in place_of and around.has("guard"):
            around = graph.node(around.strings("guard")[0])
            guarded[around.name].add(place_of[node.name])
    return {name: next(iter(sites)) if len(sites) == 1 else None for name, sites in guarded.items()}


@dataclass(frozen=True)
class Times:
    """When the nodes of an update can be computed.

    ``in_update``: the nodes that can only be computed during the update. No term may depend on them, since terms are
    computed before anything is written, and each from values of its own site. ``late``: the nodes that can only be
    computed when the updates of the round are done.
    """

    in_update: Set[str]
    late: Set[str]


def find_times(sends: Sends, kinds: Kinds, state: Set[str]) -> Times:
    """Return when the nodes of an update can be computed.

    ``kinds``: the kinds of the nodes of the graph in ``sends``. ``state``: the variables that forward writes; they get
    their final values only when the update begins.
    """
    graph = sends.graph
    in_update: set[str] = set()
    late: set[str] = set()
    written: dict[str, frozenset[str]] = {}  # by node, the variables that are written before it
    for node in graph.nodes:
        before = {written[name] for name in node.predecessors()}
        own = frozenset(node.written)
        written[node.name] = own.union(*before) if own or len(before) != 1 else next(iter(before))
        sources = {value.node for value in node.inputs}
        if node.name in sends.sent:
            in_update.add(node.name)
            if sends.sent[node.name][0].node in in_update | late:
                late.add(node.name)
            continue
        read = set(variables_of(graph, node)) if node.effect is Effect.READ else set()
        changed = node.effect not in (Effect.PURE, Effect.READ) or bool(read & (written[node.name] | state))
        combines = kinds[node.name] is None
        if combines or changed or sources & in_update:
            in_update.add(node.name)
        terms = {name for name in sources if kinds[name] is not None} if combines else set[str]()
        if late.intersection(node.predecessors()) or terms & in_update or (combines and changed):
            late.add(node.name)
    return Times(in_update, late)


@dataclass(frozen=True)
class Rounds:
    """An update that is divided into what it does ``now`` and what it does ``later``.

    ``handed``: the values that the first part gives to the second, each with its site, or None where all sites have it.
    In the second part they are arguments, whose ports are named after the values.
    """

    now: Graph
    later: Graph
    handed: tuple[tuple[Value, Site | None], ...]


def part_rounds(
    graph: Graph, late: Set[str], late_outputs: Set[Value], kinds: Kinds, place_of: Mapping[str, Site | None]
) -> Rounds:
    """Divide the update ``graph``: ``late`` names the nodes of its second part, ``late_outputs`` what that returns.

    The first part gives the second part the values that it combines from several sites, the results of its writes, and
    the values that it reads from variables before it overwrites them. Raises PartitionError if it would have to give a
    value that a condition guards, or if the first part would be empty.
    """
    acting = [node.name for node in graph.nodes if node.effect in _ACTING]
    first = {name for name in acting if name not in late}
    places = {**kinds, **place_of}
    writers: dict[str, set[str]] = {}
    for name in first:
        for target in graph.node(name).written:
            writers.setdefault(target, set()).add(name)

    def is_handed(node: Node) -> bool:
        if node.name in first:
            return True
        if node.effect is Effect.READ:
            overwritten = set().union(*(writers.get(name, set()) for name in variables_of(graph, node)))
            if overwritten and not overwritten <= ancestors(graph, [node.name]):
                return True
        return kinds[node.name] is None and node.name not in late

    members, handed = set[str](), dict[Value, Site | None]()
    pending = [*(name for name in acting if name in late), *(value.node for value in late_outputs)]
    while pending:
        node = graph.node(pending.pop())
        if node.name in members:
            continue
        members.add(node.name)
        pending += [control.source for control in node.controls if is_marker(graph.node(control.source))]
        for value in node.inputs:
            if not is_handed(graph.node(value.node)):
                pending.append(value.node)
            elif value not in handed:
                place = places[value.node]
                handed[value] = place if isinstance(place, Site) else None
                _check_unguarded(graph, value)
    if not first and not handed:
        raise PartitionError(
            f"{min(late)!r} depends on itself over several stages, for example because the step runs a forward with "
            "weights that it has changed: use one stage, or run that forward in the next step. To take gradients at "
            "other weights, assign these to the variables, take the gradients, and assign the old weights again",
            min(late),
        )
    inputs = {node.name for node in graph.nodes if node.op in ("arg", "variable")}
    now_outputs = dict.fromkeys([*(v for v in graph.outputs if v not in late_outputs), *handed])
    needed = ancestors(graph, [*first, *(value.node for value in now_outputs)]) | inputs
    now = graph.replace(nodes=tuple(n for n in graph.nodes if n.name in needed), outputs=tuple(now_outputs))
    taken = {value: Value(f"handed/{value.node}/{value.index}") for value in handed}
    roles = ((value, "combined" if place is None else "partial") for value, place in handed.items())
    arguments = [
        make_node(taken[value].node, "arg", (), [graph.type_of(value)], port=str(value), role=role)
        for value, role in roles
    ]
    kept = [
        dataclasses.replace(node.replace_inputs(taken), controls=tuple(c for c in node.controls if c.source in members))
        for node in graph.nodes
        if node.name in members | inputs
    ]
    outputs = tuple(value for value in graph.outputs if value in late_outputs)
    later = graph.replace(nodes=(*arguments, *kept), outputs=outputs)
    return Rounds(now, later, tuple(handed.items()))


def _check_unguarded(graph: Graph, value: Value) -> None:
    if graph.node(value.node).has("guard"):
        raise PartitionError(
            f"the optimizer computes {value} in a condition, and needs it after it has updated variables of other "
            "stages: compute it outside of the condition",
            value.node,
        )
