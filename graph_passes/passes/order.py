"""Control edges that make each device run its calls in the schedule's order (DAPPLE, section V.C, Fig. 11).

A call also waits until the gradients of the call before it have been added to the sums. Otherwise the gradients of
several micro-batches would be in memory at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.analysis.layers import written_variables
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.names import at, micro_batch_count, nodes_of, replica_counts
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.schedules.schedule import CALL_OF_KIND, FREEING, Action, Kind, Schedule
from dapple_tf.wording import format_count

_WRITING: tuple[tuple[Kind, ...], ...] = (("F",), ("B", "I"))  # the kinds of action that may write the same variables


@dataclass(frozen=True)
class Order(BuiltInPass):
    """Join the calls of each device by control edges in the order of ``schedule``."""

    schedule: Schedule
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        requires_if_trained=frozenset({OpName.GRADIENTS}),
        forbids=frozenset({OpName.TIMESTAMP}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with a control edge between each two consecutive calls of a device that no data edge joins.

        The second call also gets an edge from each node that accumulates the first one's gradients, unless that node
        waits for later calls, since it adds in micro-batch order. Raises ScheduleError if the schedule is for another
        number of stages or micro-batches than the graph's, if stages that share devices have unequal numbers of
        replicas, or if it writes a variable out of micro-batch order.
        """
        replicas, micro_batches = replica_counts(graph), micro_batch_count(graph)
        shape = (len(self.schedule.stages), self.schedule.micro_batches)
        if shape != (len(replicas), micro_batches):
            raise ScheduleError(
                f"the schedule is for {format_count(shape[0], 'stage')} x {format_count(shape[1], 'micro-batch')}, the "
                f"graph has {len(replicas)} x {micro_batches}"
            )
        check_writes(graph, self.schedule)
        previous: dict[str, tuple[str, str]] = {}  # for each call, the call before it and the reason of the edge
        accumulated: set[str] = set()
        for stages, actions in zip(self.schedule.worker_map.stages_of, self.schedule.workers, strict=True):
            if len({replicas[stage] for stage in stages}) != 1:
                raise ScheduleError(
                    f"stages {list(stages)} share devices, so they need equal replicas, but have "
                    f"{[replicas[stage] for stage in stages]}"
                )
            for replica in range(replicas[stages[0]]):
                accumulated |= {call_name(action, replica) for action in _accumulated_at_once(actions)}
                for first, second in itertools.pairwise(actions):
                    source, target = call_name(first, replica), call_name(second, replica)
                    previous[target] = (source, f"order: {second} after {first}")
        sums: dict[str, list[str]] = {}
        for node in nodes_of(graph, OpName.ACCUMULATE):
            if node.inputs[0].node in accumulated:
                sums.setdefault(node.inputs[0].node, []).append(node.name)
        nodes = []
        for node in graph.nodes:
            if node.name in previous:
                source, reason = previous[node.name]
                if source not in {v.node for v in node.inputs}:
                    node = node.after(source, reason)
                for name in sums.get(source, ()):
                    node = node.after(name, f"{reason}, whose gradients are added up")
            nodes.append(node)
        return graph.replace(nodes=tuple(nodes)).sorted()


def call_name(action: Action, replica: int) -> str:
    """Return the name of the node that runs ``action`` on a replica of its stage."""
    return at(action.stage, replica, action.micro_batch, CALL_OF_KIND[action.kind])


def _accumulated_at_once(actions: Sequence[Action]) -> Iterator[Action]:
    """Yield the actions whose gradients can be added right after them.

    Gradients are added in micro-batch order, so these are the actions before which all earlier micro-batches have run.
    """
    ran: dict[int, set[int]] = {}
    for action in actions:
        if action.kind in FREEING:  # the kinds that give gradients of weights
            micro_batches = ran.setdefault(action.stage, set())
            micro_batches.add(action.micro_batch)
            if micro_batches.issuperset(range(action.micro_batch)):
                yield action


def check_writes(graph: Graph, schedule: Schedule) -> None:
    """Raise ScheduleError if calls that write a variable (batch norm, seeds) are not in micro-batch order."""
    for stage, actions in enumerate(schedule.stages):
        for kinds in _WRITING:
            functions = [graph.function_by_name.get(at(stage, what=CALL_OF_KIND[kind])) for kind in kinds]
            written = {name for function in functions if function for name in written_variables(function.graph)}
            calls = [action for action in actions if action.kind in kinds]
            for first, second in itertools.pairwise(calls if written else []):
                if first.micro_batch > second.micro_batch:
                    raise ScheduleError(
                        f"the schedule runs {first} before {second}, but {CALL_OF_KIND[first.kind]} of stage {stage} "
                        f"writes {min(written)!r}, which one device would write in the order of the samples: run the "
                        f"{' and '.join(sorted({a.kind for a in calls}))} "
                        "of this stage in micro-batch order"
                    )
