"""Check the invariants of a finished pipelined graph before it runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.analysis.variable_use import find_variables
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, ancestors, topological
from dapple_tf.graph_passes.ir.names import BACKWARD_OPS, STAGE_OPS, at, nodes_of, replica_counts, site_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.order import call_name
from dapple_tf.graph_passes.passes.send_together import Direction, boundary_direction, direction_of, sent_together
from dapple_tf.graph_passes.schedules.schedule import FREEING, Action, Schedule, groups_together


@dataclass(frozen=True)
class VerifyPipeline(BuiltInPass):
    """Check the order of calls on each device, the path of each gradient, and that each node has a device.

    ``shares``: see ``Variables``.
    """

    schedule: Schedule
    shares: tuple[tuple[str, int], ...] = ()
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        requires_if_trained=frozenset({OpName.REDUCED_GRADIENTS}),
        requires_if_sparse=frozenset({OpName.GATHER_SLICES}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Raise GraphError unless the graph is acyclic, ordered as the schedule says, complete, and on devices."""
        topological(graph.nodes)  # raises GraphError for a cycle
        verify_order(graph, self.schedule)
        verify_together(graph, self.schedule)
        verify_gradients(graph)
        verify_sums(graph)
        verify_sums_in_place(graph, self.schedule)
        verify_statistics(graph)
        verify_inlined(graph)
        verify_copies(graph, self.shares)
        verify_commits(graph)
        verify_writers(graph)
        verify_devices(graph)
        return graph


def verify_order(graph: Graph, schedule: Schedule) -> None:
    """Raise GraphError unless the only possible order of each device's calls is the schedule's."""
    replicas = replica_counts(graph)
    if len(schedule.stages) != len(replicas):
        raise GraphError(f"the schedule has {len(schedule.stages)} stages, the graph {len(replicas)}")
    rows = [
        [call_name(action, replica) for action in actions]
        for stages, actions in zip(schedule.worker_map.stages_of, schedule.workers, strict=True)
        for replica in range(replicas[stages[0]])
    ]
    verify_rows(graph, rows, "the schedule", (OpName.FORWARD, *BACKWARD_OPS))


def verify_edge(node: Node, source: str, why: str = "") -> None:
    """Raise GraphError unless an edge makes ``node`` run after ``source``; ``why`` it must, for the message."""
    if source not in set(node.predecessors()):
        raise GraphError(f"no edge makes {node.name!r} run after {source!r}{why}")


def verify_devices(graph: Graph) -> None:
    """Raise GraphError unless each node has a device."""
    for node in graph.nodes:
        if not node.device:
            raise GraphError(f"node {node.name!r} has no device")


def verify_rows(graph: Graph, rows: Sequence[Sequence[str]], order: str, ops: Sequence[OpName]) -> None:
    """Raise GraphError unless the nodes of each of the ``rows`` can only run one after the other.

    A chain of edges through all its calls admits one order. So it is enough that each two neighbours of a row are
    joined by an edge, and that the rows have all nodes of these ``ops``. ``order``: what the rows are, for messages.
    """
    for first, second in (pair for row in rows for pair in itertools.pairwise(row)):
        verify_edge(graph.node(second), first, f", as {order} says")
    known = {name for row in rows for name in row}
    for node in nodes_of(graph, *ops):
        if node.name not in known:
            raise GraphError(f"{node.name!r} is not in {order}")


def verify_together(graph: Graph, schedule: Schedule) -> None:
    """Raise GraphError unless the results that travel together in the schedule, and no others, go through one node."""
    scheduled: dict[tuple[int, Direction, int], tuple[Action, ...]] = {}
    for group in groups_together(schedule):
        scheduled |= {(group[0].stage, direction_of(group[0]), action.micro_batch): group for action in group}
    for node in graph.nodes:
        for value in node.inputs:
            direction, producer = boundary_direction(graph, node, value), graph.node(value.node)
            if direction is None:
                continue
            stage, micro_batches = producer.integer("stage"), sent_together(graph, producer)
            group = scheduled.get((stage, direction, micro_batches[-1]), ())
            wanted = tuple(action.micro_batch for action in group) or micro_batches[-1:]
            if micro_batches != wanted:
                raise GraphError(
                    f"{producer.name!r} gives {node.name!r} what leaves stage {stage} {direction} for "
                    f"{_print_together(micro_batches)}, but the schedule has {_print_together(wanted)}"
                )


def _print_together(micro_batches: Sequence[int]) -> str:
    if len(micro_batches) == 1:
        return f"micro-batch {micro_batches[0]} alone"
    return f"micro-batches {', '.join(map(str, micro_batches))} together"


def verify_copies(graph: Graph, shares: tuple[tuple[str, int], ...] = ()) -> None:
    """Raise GraphError unless each call waits for the ``refresh`` of the copies of variables that its replica uses."""
    variables = find_variables(graph, shares)
    refreshed = {site_of(node): node for node in nodes_of(graph, OpName.REFRESH)}
    for node in nodes_of(graph, *STAGE_OPS):
        stage, replica = site_of(node)
        copied = variables.copied(stage, replica)
        refresh = refreshed.get(site_of(node))
        for name in copied:
            if refresh is None or name not in refresh.strings("variables"):
                raise GraphError(f"no refresh gives stage {stage}, replica {replica} its copy of {name!r}")
        if refresh is not None and refresh.name not in {control.source for control in node.controls}:
            raise GraphError(f"no control edge makes {node.name!r} wait for {refresh.name!r}")


def verify_commits(graph: Graph) -> None:
    """Raise GraphError unless each ``commit`` waits for all reads of its variables: by a refresh, or for other ranks.

    A later read would give the values of the next step. The first variables of a refresh come from its inputs, if any.
    """
    readers = nodes_of(graph, OpName.REFRESH, OpName.READ_VARIABLE)
    for commit in nodes_of(graph, OpName.COMMIT):
        before = ancestors(graph, [commit.name])
        for reader in readers:
            shared = sorted({*commit.strings("variables")} & {*reader.strings("variables")[len(reader.inputs) :]})
            if shared and reader.name not in before:
                raise GraphError(f"no path orders {commit.name!r} after {reader.name!r}, which reads {shared[0]!r}")


def verify_writers(graph: Graph) -> None:
    """Raise GraphError unless each stage's update runs after its commit.

    Both may write one variable, and the optimizer starts from the value that commit writes.
    """
    commits = {node.integer("stage"): node.name for node in nodes_of(graph, OpName.COMMIT)}
    for node in nodes_of(graph, OpName.UPDATE):
        commit = commits.get(node.integer("stage")) if node.has("stage") else None
        if commit is not None and commit not in ancestors(graph, [node.name]):
            raise GraphError(f"no path orders {node.name!r} after {commit!r}, and both may write the same variable")


def verify_gradients(graph: Graph) -> None:
    """Raise GraphError unless each gradient of a backward call reaches an update, summed over its replicas."""
    updates = {node.name for node in nodes_of(graph, OpName.UPDATE)}
    if not updates:
        return
    reached = ancestors(graph, updates)
    consumers = graph.consumers()
    for node in nodes_of(graph, OpName.LOSS_HEAD, *BACKWARD_OPS):
        ports = graph.function(node.string("function")).output_ports("variable", "slices", "indices", "gradient")
        taken = {value for user in consumers[node.name] if user.name in reached for value in user.inputs}
        for index, port in ports:
            if Value(node.name, index) not in taken:
                raise GraphError(f"the gradient of {port.name!r} from {node.name!r} reaches no update")
    for stage, count in enumerate(replica_counts(graph)):
        for name in (n.name for n in nodes_of(graph, OpName.GRADIENTS) if n.integer("stage") == stage):
            if count > 1 and not any(user.op in (OpName.ALLREDUCE, OpName.REDUCE) for user in consumers[name]):
                raise GraphError(f"{name!r} is not all-reduced over the {count} replicas of its stage")


def verify_sums(graph: Graph) -> None:
    """Raise GraphError unless sums over micro-batches are added in their order, and read when they are complete."""
    readers = (node for node in nodes_of(graph, OpName.GRADIENTS) if not node.inputs)
    users: dict[tuple[int, int, str], list[Node]] = {}
    for node in (*nodes_of(graph, OpName.ACCUMULATE), *readers):
        for name in node.strings("variables"):
            users.setdefault((*site_of(node), name), []).append(node)
    for (_, _, variable), nodes in users.items():
        nodes.sort(key=lambda node: (node.op == OpName.GRADIENTS, node.integer("micro_batch") if node.inputs else 0))
        for first, second in itertools.pairwise(nodes):
            verify_edge(second, first.name, f", and both use the sum of the gradients of {variable!r}")


def verify_sums_in_place(graph: Graph, schedule: Schedule) -> None:
    """Raise GraphError unless calls add to sums in micro-batch order, after these are cleared and before they are read.

    Calls run in the order of the schedule, see ``verify_order``. The gradients of the last call may be added after it,
    in buckets.
    """
    adding = {function.name: function.input_ports("sum") for function in graph.functions}
    readers = [node for node in nodes_of(graph, OpName.GRADIENTS) if not node.inputs]
    for stage, actions in enumerate(schedule.stages):
        freeing = [action for action in actions if action.kind in FREEING]
        for replica in range(replica_counts(graph)[stage]):
            calls = [graph.node(call_name(action, replica)) for action in freeing]
            calls = [node for node in calls if adding[node.string("function")]]
            if not calls:
                continue
            micro_batches = [node.integer("micro_batch") for node in calls]
            if micro_batches != sorted(micro_batches):
                raise GraphError(f"the calls of stage {stage} add their gradients in the order {micro_batches}")
            verify_edge(calls[0], at(stage, replica, what=OpName.CLEAR_SUMS), ", which clears its sums")
            buckets = [node for node in nodes_of(graph, OpName.ACCUMULATE) if site_of(node) == (stage, replica)]
            for user in buckets or (node for node in readers if site_of(node) == (stage, replica)):
                verify_edge(user, calls[-1].name, ", which adds to its sums")


def verify_statistics(graph: Graph) -> None:
    """Raise GraphError unless the statistics of each forward are summed, also over replicas, and written."""
    consumers = graph.consumers()
    written = {value for node in nodes_of(graph, OpName.WRITE_STATISTICS) for value in node.inputs}
    for node in nodes_of(graph, OpName.FORWARD):
        ports = graph.function(node.string("function")).output_ports("statistic") if node.has("function") else ()
        summed = {v for user in consumers[node.name] if user.op == OpName.SUM_STATISTICS for v in user.inputs}
        for index, port in ports:
            if Value(node.name, index) not in summed:
                raise GraphError(f"the statistic {port.name!r} of {node.name!r} is in no sum")
    replicas = replica_counts(graph)
    for node in nodes_of(graph, OpName.SUM_STATISTICS):
        reduced = [user for user in consumers[node.name] if user.op == OpName.ALLREDUCE]
        count = replicas[node.integer("stage")]
        if count > 1 and not reduced:
            raise GraphError(f"{node.name!r} is not all-reduced over the {count} replicas of its stage")
        if written.isdisjoint(value for last in (*reduced, node) for value in last.values()):
            raise GraphError(f"no moving statistics are written from {node.name!r}")


def verify_inlined(graph: Graph) -> None:
    """Raise GraphError unless each inlined backward call waits for its forward: it may read what forward wrote."""
    for node in nodes_of(graph, *BACKWARD_OPS):
        forward = at(*site_of(node), node.integer("micro_batch"), OpName.FORWARD)
        if node.has("inline") and forward not in {control.source for control in node.controls}:
            raise GraphError(f"{node.name!r} is inlined, and no control edge makes it wait for {forward!r}")
