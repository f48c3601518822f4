"""Control edges that make each device run its calls in the schedule's order (DAPPLE, section V.C, Fig. 11).

A call also waits until the gradients of the one before it have been added up, or those of several micro-batches would
be alive at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graph_passes.analysis.layers import written_variables
from graph_passes.errors import ScheduleError
from graph_passes.ir.graph import Graph
from graph_passes.ir.names import at, micro_batch_count, nodes_of, replica_counts
from graph_passes.schedules.schedule import CALL_OF_KIND, Action, Kind, Schedule

_WRITING: tuple[Kind, ...] = ("F", "B")  # the kinds of action that may write variables


@dataclass(frozen=True)
class Order:
    """Chain the calls of every replica as ``schedule`` says."""

    schedule: Schedule
    name: str = "order"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return order_calls(graph, self.schedule)


def call_name(action: Action, replica: int) -> str:
    """The node that runs ``action`` on one replica of its stage."""
    return at(action.stage, replica, action.micro_batch, CALL_OF_KIND[action.kind])


def order_calls(graph: Graph, schedule: Schedule) -> Graph:
    """The graph with an edge between each two neighbours of a stage's schedule that no data edge orders.

    And with an edge to the second from the sums of the first's gradients, where what is summed before has run by then.

    Raises ScheduleError when the schedule is for other stages or micro-batches than the graph's, or would have a
    variable written out of micro-batch order.
    """
    replicas, micro_batches = replica_counts(graph), micro_batch_count(graph)
    shape = (len(schedule.stages), schedule.micro_batches)
    if shape != (len(replicas), micro_batches):
        raise ScheduleError(
            f"the schedule is for {shape[0]} stages x {shape[1]} micro-batches, the graph has {len(replicas)} x "
            f"{micro_batches}"
        )
    check_writes(graph, schedule)
    after: dict[str, tuple[str, str]] = {}
    summed: set[str] = set()
    for stage, actions in enumerate(schedule.stages):
        for replica in range(replicas[stage]):
            summed |= {call_name(action, replica) for action in _summed(actions)}
            for first, second in itertools.pairwise(actions):
                source, target = call_name(first, replica), call_name(second, replica)
                after[target] = (source, f"order: {second} after {first}")
    sums: dict[str, list[str]] = {}
    for node in nodes_of(graph, "accumulate"):
        if node.inputs[0].node in summed:
            sums.setdefault(node.inputs[0].node, []).append(node.name)
    nodes = []
    for node in graph.nodes:
        if node.name in after:
            source, reason = after[node.name]
            if source not in {v.node for v in node.inputs}:
                node = node.after(source, reason)
            for name in sums.get(source, ()):
                node = node.after(name, f"{reason}, whose gradients are added up")
        nodes.append(node)
    return graph.replace(nodes=tuple(nodes)).sorted()


def _summed(actions: Sequence[Action]) -> Iterator[Action]:
    """The calls after which all micro-batches up to theirs have run: sums are in the order of these."""
    ran: dict[str, set[int]] = {}
    for action in actions:
        known = ran.setdefault(action.kind, set())
        known.add(action.micro_batch)
        if known.issuperset(range(action.micro_batch)):
            yield action


def check_writes(graph: Graph, schedule: Schedule) -> None:
    """ScheduleError where a stage's calls that write a variable (batch norm, seeds) are not in micro-batch order."""
    for stage, actions in enumerate(schedule.stages):
        for kind in _WRITING:
            function = graph.function_by_name.get(at(stage, what=CALL_OF_KIND[kind]))
            written = written_variables(function.graph) if function else {}
            calls = [action for action in actions if action.kind == kind]
            for first, second in itertools.pairwise(calls if written else []):
                if first.micro_batch > second.micro_batch:
                    raise ScheduleError(
                        f"the schedule runs {first} before {second}, but {CALL_OF_KIND[kind]} of stage {stage} writes "
                        f"{min(written)!r}, as one device would in the order of the samples: run the {kind} of this "
                        "stage by rising micro-batch"
                    )
