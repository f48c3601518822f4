"""Check the invariants of the graph of an asynchronous window before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, topological
from dapple_tf.graph_passes.ir.names import BACKWARD_OPS, at, nodes_of, of_minibatch, site_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.order import call_name
from dapple_tf.graph_passes.passes.verify_pipeline import verify_commits, verify_devices, verify_edge, verify_rows
from dapple_tf.graph_passes.passes.windows.update_groups import last_backwards, update_name
from dapple_tf.graph_passes.passes.windows.use_versions import calls_of, version_name
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.weight_versions import Versions
from dapple_tf.graph_passes.schedules.window import Window


@dataclass(frozen=True)
class VerifyWindow(BuiltInPass):
    """Check the order of calls, the weights that each uses, and the updates, of a window of ``versions``.

    ``trained``: the names of the trained variables.
    """

    versions: Versions
    trained: frozenset[str]
    contract: ClassVar[Contract] = Contract(requires=frozenset({OpName.FORWARD, OpName.MINIBATCH}))

    def __call__(self, graph: Graph) -> Graph:
        """Raise GraphError unless the graph is acyclic, ordered as the window says, and each call uses its version.

        A version is stored before the calls that use it, after the update that makes it and before the next one, and no
        later version takes its slot before its last call has run. Each update has the gradients of its group and no
        others, and comes after the update before it. Takes time in proportion to the edges, so that it can run before
        each launch.
        """
        nodes = topological(graph.nodes)
        versions, window, variables = self.versions, self.versions.window, find_variables(graph)
        rows = [
            [name for action in actions for name in calls_of(graph, window, action, replica)]
            for (_, replica), actions in window.rows.items()
        ]
        verify_rows(graph, rows, "the window's order", (OpName.RUN_ONCE, OpName.FORWARD, *BACKWARD_OPS))
        for stage in range(window.stages):
            names = {name for name in variables.used(stage) if name in self.trained}
            if names and not versions.slots[stage]:
                _verify_newest(graph, versions, stage, nodes)
            if names:
                _verify_updates(graph, window, stage)
            for replica in range(window.replicas[stage]):
                _verify_sums(graph, window, (stage, replica))
                _verify_versions(graph, versions, (stage, replica), names if versions.slots[stage] else set())
        for node in graph.nodes:
            if node.has("inline"):
                raise GraphError(f"{node.name!r} is inlined: an update would not wait for all of its reads")
        verify_commits(graph)
        verify_devices(graph)
        return graph


def _waits(node: Node, source: str) -> bool:
    return source in set(node.predecessors())


def _verify_versions(graph: Graph, versions: Versions, place: tuple[int, int], names: Set[str]) -> None:
    """Check the versions that a replica stores of its weights ``names``, and that each call waits for its version."""
    stage, replica = place
    slots, last = versions.slots[stage], dict[int, str]()  # by version, the last call that uses it
    for action in versions.window.rows[place] if names else ():
        version = versions.used[action]
        needed = version_name(stage, replica, version)
        for name in calls_of(graph, versions.window, action, replica):
            call, last[version] = graph.node(name), name
            if call.get("version") != version % slots:
                raise GraphError(f"{name!r} must use version {version} of the weights, in slot {version % slots}")
            if not _waits(call, needed):
                raise GraphError(f"no edge makes {name!r} wait for {needed!r}, the weights that it uses")
    wanted = {version_name(stage, replica, version) for version in last}
    for node in nodes_of(graph, OpName.STORE_VERSION):
        if site_of(node) != place:
            continue
        if node.name not in wanted:
            raise GraphError(f"{node.name!r} stores a version of the weights that no call uses")
        if set(node.strings("variables")) != names:
            raise GraphError(f"{node.name!r} stores {sorted(node.strings('variables'))}, not {sorted(names)}")
    held: dict[int, int] = {}  # by slot, the last version that was stored there
    for version in sorted(last):
        slot = version % slots
        store = graph.node(version_name(stage, replica, version))
        _verify_store(graph, versions.window, stage, version, store, slot)
        if slot in held and not _waits(store, last[held[slot]]):
            raise GraphError(
                f"{store.name!r} overwrites version {held[slot]}, and does not wait for {last[held[slot]]!r}, its last "
                "use"
            )
        held[slot] = version


def _verify_store(graph: Graph, window: Window, stage: int, version: int, store: Node, slot: int) -> None:
    """Check where a version is stored, and that this happens between the update that makes it and the next one."""
    if store.integer("version") != slot:
        raise GraphError(f"{store.name!r} stores version {version} in slot {store.integer('version')}, not {slot}")
    if version and not _waits(store, update_name(window, stage, version - 1)):
        raise GraphError(f"{store.name!r} does not wait for the update that makes this version")
    if version < len(window.updates[stage]):
        update = graph.node(update_name(window, stage, version))
        if not _waits(update, store.name):
            raise GraphError(f"{update.name!r} does not wait for {store.name!r}, which reads what it changes")


def _verify_newest(graph: Graph, versions: Versions, stage: int, nodes: Sequence[Node]) -> None:
    """Check that calls that use the weights themselves run after the update that makes their version, before the next.

    ``nodes``: the nodes of the graph in a topological order. A stage that stores no versions has one replica.
    """
    window = versions.window
    updates = [update_name(window, stage, i) for i in range(len(window.updates[stage]))]
    uses = [
        (name, versions.used[action]) for action in window.rows[stage, 0] for name in calls_of(graph, window, action, 0)
    ]
    runs_before = Precedence(nodes, [*updates, *(name for name, _ in uses)])
    for name, version in uses:
        if version and not runs_before(updates[version - 1], name):
            raise GraphError(f"{name!r} must run after {updates[version - 1]!r}, whose weights it uses")
        if version < len(updates) and not runs_before(name, updates[version]):
            raise GraphError(f"{updates[version]!r} must run after {name!r}, which uses what it changes")


def _verify_updates(graph: Graph, window: Window, stage: int) -> None:
    """Check that a stage's updates run one after the other, each counted, and with the gradients of its group."""
    previous: str | None = None
    for index, group in enumerate(window.updates[stage]):
        update = graph.node(update_name(window, stage, index))
        last = window.last_minibatch(stage, index)
        count = graph.node(of_minibatch(last, at(stage, what=OpName.COUNT_UPDATE)))
        if count.integer("offset") != last:
            raise GraphError(f"{count.name!r} counts {count.integer('offset')} minibatches of the window, not {last}")
        for first, second in ((previous, count), (count.name, update)):
            if first is not None:
                verify_edge(second, first)
        previous = update.name
        controls = {control.source for control in update.controls}
        for call in last_backwards(window, stage, index):
            if call not in controls:
                raise GraphError(f"no control edge makes {update.name!r} wait for {call!r}, which uses what it changes")
        reaching = set(_gradients_of(graph, update))
        wanted = set(_group_gradients(graph, window, stage, group))
        for value in sorted(wanted ^ reaching):
            here = "does not reach" if value in wanted else "is of another update, but reaches"
            raise GraphError(f"the gradient {value} {here} {update.name!r}")


def _group_gradients(graph: Graph, window: Window, stage: int, group: Iterable[int]) -> Iterator[Value]:
    """Yield what the backwards of a group's micro-batches compute for their stage's variables."""
    for m in group:
        for replica in window.replicas_of(stage, m):
            call = graph.node(call_name(Action(stage, "B", m), replica))
            ports = graph.function(call.string("function")).output_ports("variable", "slices", "indices")
            yield from (Value(call.name, i) for i, _ in ports)


def _gradients_of(graph: Graph, update: Node) -> Iterator[Value]:
    """Yield the results of backwards that an update takes, by way of sums over micro-batches and replicas."""
    pending, seen = [update], {update.name}
    while pending:
        node = pending.pop()
        sources = [value.node for value in node.inputs]
        if node.op == OpName.ACCUMULATE or (node.op == OpName.GRADIENTS and not node.inputs):
            before = (control.source for control in node.controls)
            sources += [name for name in before if graph.node(name).op == OpName.ACCUMULATE]
        yield from (value for value in node.inputs if graph.node(value.node).op in BACKWARD_OPS)
        for name in sources:
            if name not in seen and graph.node(name).op not in BACKWARD_OPS:
                seen.add(name)
                pending.append(graph.node(name))


def _verify_sums(graph: Graph, window: Window, place: tuple[int, int]) -> None:
    """Check that minibatches begin their own sums of gradients in order, and that each sum is read before the next."""
    stage, replica = place
    previous: str | None = None
    for m in range(window.size):
        name = at(stage, replica, m, OpName.ACCUMULATE)
        if name not in graph.by_name:
            continue
        node, minibatch = graph.node(name), m // window.micro_batches
        if bool(node.attr("first")) != (m % window.micro_batches == 0):
            raise GraphError(f"{name!r}: the first micro-batch of a minibatch, and no other, begins a new sum")
        reader = graph.node(of_minibatch(minibatch, at(stage, replica, what=OpName.GRADIENTS)))
        users = [node, *([reader] if (m + 1) % window.micro_batches == 0 else [])]
        for user in users:
            if previous is not None:
                verify_edge(user, previous, ", and both use the same sums")
            previous = user.name


# --- Find which nodes of a graph run before others, along data and control edges


class Precedence:
    """Whether a path of edges leads from one node to another; ``marked``: the nodes that are asked about, by name.

    ``nodes``: the nodes of the graph in a topological order. A set of marked nodes is an integer with a bit for each,
    so one operation for each edge is enough to find the marked nodes before every node.
    """

    def __init__(self, nodes: Iterable[Node], marked: Iterable[str]) -> None:
        self._bits = {name: 1 << i for i, name in enumerate(dict.fromkeys(marked))}
        self._before: dict[str, int] = {}
        reached: dict[str, int] = {}  # by node, the marked nodes before it, and itself
        for node in nodes:
            before = 0
            for source in node.predecessors():
                before |= reached[source]
            reached[node.name] = before | self._bits.get(node.name, 0)
            if node.name in self._bits:
                self._before[node.name] = before

    def __call__(self, first: str, second: str) -> bool:
        """Return whether ``first`` runs before ``second``. Raises KeyError for nodes that are not marked."""
        return bool(self._before[second] & self._bits[first])
