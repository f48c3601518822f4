"""Check the invariants of the graph of an asynchronous window before it runs."""

from __future__ import annotations

import itertools
from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

import networkx as nx

from graph_passes.analysis.variable_use import find_variables
from graph_passes.errors import GraphError
from graph_passes.ir.graph import Graph
from graph_passes.ir.names import BACKWARD_OPS, nodes_of
from graph_passes.ir.ops import OpName
from graph_passes.passes.base import Contract
from graph_passes.passes.update_groups import last_backwards, update_name
from graph_passes.passes.use_versions import action_name, stored_versions, version_name
from graph_passes.passes.verify_pipeline import verify_inlined
from graph_passes.schedules.schedule import Action
from graph_passes.schedules.weight_versions import Versions


@dataclass(frozen=True)
class VerifyWindow:
    """Check the order of calls, the weights that each uses, and the updates, of a window of ``versions``.

    ``trained``: the names of the trained variables.
    """

    versions: Versions
    trained: frozenset[str]
    name: str = "verify_window"
    contract: ClassVar[Contract] = Contract(requires=frozenset({OpName.FORWARD, OpName.MINIBATCH}))

    def __call__(self, graph: Graph) -> Graph:
        verify_window(graph, self.versions, self.trained)
        return graph


def verify_window(graph: Graph, versions: Versions, trained: Set[str]) -> None:
    """Raise GraphError unless the graph is acyclic, ordered as the window, and each call uses its version.

    A version is stored before the calls that use it, after the update that makes it and before the next one, and no
    later version takes its slot before its last call has run. Every gradient reaches the update of its group.
    """
    edges: nx.DiGraph[str] = nx.DiGraph()
    edges.add_nodes_from(node.name for node in graph.nodes)
    edges.add_edges_from((source, node.name) for node in graph.nodes for source in node.predecessors())
    if not nx.is_directed_acyclic_graph(edges):
        cycle = nx.find_cycle(edges)
        raise GraphError("the graph of the window has a cycle: " + " -> ".join(source for source, _ in cycle))
    _verify_order(graph, versions)
    _verify_versions(graph, versions, trained)
    _verify_newest(graph, versions, edges)
    _verify_updates(graph, versions, edges)
    verify_inlined(graph)
    for node in graph.nodes:
        if not node.device:
            raise GraphError(f"node {node.name!r} has no device")


def _verify_order(graph: Graph, versions: Versions) -> None:
    """Check that each two neighbours in the order of a replica are joined by an edge, and that all calls are there."""
    scheduled: set[str] = set()
    for (_, replica), actions in versions.window.rows.items():
        names = [action_name(action, replica) for action in actions]
        scheduled.update(names)
        for first, second in itertools.pairwise(names):
            if not _runs_after(graph, second, first):
                raise GraphError(f"no edge makes {second!r} run after {first!r}, as the window's order says")
    for node in nodes_of(graph, OpName.FORWARD, *BACKWARD_OPS):
        if node.name not in scheduled:
            raise GraphError(f"{node.name!r} is not in the window's order")


def _runs_after(graph: Graph, second: str, first: str) -> bool:
    """Return whether an edge joins two calls, directly or through what runs once a minibatch between them."""
    pending, seen = list(graph.node(second).predecessors()), set[str]()
    while pending:
        name = pending.pop()
        if name == first:
            return True
        if name not in seen and graph.node(name).op == OpName.RUN_ONCE:
            pending += graph.node(name).predecessors()
        seen.add(name)
    return False


def _verify_versions(graph: Graph, versions: Versions, trained: Set[str]) -> None:
    """Check the stored versions, and that each call has the slot and waits for the version that it is to use."""
    window, variables = versions.window, find_variables(graph)
    stored = stored_versions(graph)
    for (stage, replica), actions in window.rows.items():
        names = {name for name in variables.used(stage) if name in trained}
        slots = versions.slots[stage] if names else 0
        if not slots:
            if (stage, replica) in stored:
                raise GraphError(f"stage {stage} stores versions of its weights, and no call uses old ones")
            continue
        for node in stored.get((stage, replica), ()):
            if set(node.strings("variables")) != names:
                raise GraphError(f"{node.name!r} stores {sorted(node.strings('variables'))}, not {sorted(names)}")
        last: dict[int, str] = {}
        for action in actions:
            version, name = versions.used[action], action_name(action, replica)
            call, store = graph.node(name), version_name(stage, replica, version)
            last[version] = name
            if not call.has("version") or call.integer("version") != version % slots:
                raise GraphError(f"{name!r} must use version {version} of the weights, in slot {version % slots}")
            if store not in set(call.predecessors()):
                raise GraphError(f"no edge makes {name!r} wait for {store!r}, the weights that it uses")
        for version in last:
            _verify_store(graph, versions, (stage, replica), version, last)


def _verify_store(graph: Graph, versions: Versions, place: tuple[int, int], version: int, last: dict[int, str]) -> None:
    """Check when a version is stored; ``last``: by version, the last call that uses it."""
    stage, replica = place
    window, slots = versions.window, versions.slots[stage]
    store = graph.node(version_name(stage, replica, version))
    waits = set(store.predecessors())
    if version and update_name(window, stage, version - 1) not in waits:
        raise GraphError(f"{store.name!r} does not wait for the update that makes this version")
    for earlier, call in last.items():
        if earlier < version and earlier % slots == version % slots and call not in waits:
            raise GraphError(
                f"{store.name!r} overwrites version {earlier}, and does not wait for {call!r}, its last use"
            )
    if version < len(window.updates[stage]):
        update = graph.node(update_name(window, stage, version))
        if store.name not in set(update.predecessors()):
            raise GraphError(f"{update.name!r} does not wait for {store.name!r}, which reads what it changes")


def _verify_newest(graph: Graph, versions: Versions, edges: nx.DiGraph[str]) -> None:
    """Check that a call which uses the weights themselves runs between the updates that it is to run between."""
    window = versions.window
    for (stage, replica), actions in window.rows.items():
        updates = [update_name(window, stage, i) for i in range(len(window.updates[stage]))]
        if versions.slots[stage] or updates[0] not in graph.by_name:
            continue
        for action in actions:
            version, name = versions.used[action], action_name(action, replica)
            if version and updates[version - 1] not in nx.ancestors(edges, name):
                raise GraphError(f"{name!r} must run after {updates[version - 1]!r}, whose weights it uses")
            if version < len(updates) and name not in nx.ancestors(edges, updates[version]):
                raise GraphError(f"{updates[version]!r} must run after {name!r}, which uses what it changes")


def _verify_updates(graph: Graph, versions: Versions, edges: nx.DiGraph[str]) -> None:
    """Check that a stage's updates run one after the other, each with all gradients of its group."""
    window = versions.window
    for stage, groups in enumerate(window.updates):
        previous: str | None = None
        for index, group in enumerate(groups):
            name = update_name(window, stage, index)
            if name not in graph.by_name:
                continue
            before = nx.ancestors(edges, name)
            controls = {control.source for control in graph.node(name).controls}
            for call in last_backwards(window, stage, index):
                if call not in controls:
                    raise GraphError(f"no control edge makes {name!r} wait for {call!r}, which uses what it changes")
            if previous is not None and previous not in before:
                raise GraphError(f"no path orders {name!r} after {previous!r}, and both change the same weights")
            for m in group:
                for replica in window.replicas_of(stage, m):
                    if action_name(Action(stage, "B", m), replica) not in before:
                        raise GraphError(f"the gradients of micro-batch {m} do not reach {name!r}")
            previous = name
