"""Results of several micro-batches that travel to another stage together (AutoPipe, section III.C).

The tensors that leave a stage for these micro-batches all go through one ``together`` node, so no other stage has any
of them before the last one is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from graph_passes.errors import ScheduleError
from graph_passes.ir.graph import Graph, Node, Value, attributes
from graph_passes.ir.names import at, micro_batch_count, replica_counts
from graph_passes.ir.ops import OpName
from graph_passes.passes.base import Contract
from graph_passes.schedules.schedule import CALL_OF_KIND, Action, Schedule


@dataclass(frozen=True)
class SendTogether:
    """Put a ``together`` node behind the calls whose results travel together in ``schedule``."""

    schedule: Schedule
    name: str = "send_together"
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=frozenset({OpName.TOGETHER, OpName.EXCHANGE}),
        may_produce=frozenset({OpName.TOGETHER}),
    )

    def __call__(self, graph: Graph) -> Graph:
        return send_together(graph, self.schedule)


def send_together(graph: Graph, schedule: Schedule) -> Graph:
    """Return the graph with a ``together`` node for each replica and group of actions that ``schedule`` has.

    Raises ScheduleError if the schedule is for another number of stages or micro-batches than the graph's.
    """
    replicas = replica_counts(graph)
    shapes = (len(schedule.stages), schedule.micro_batches), (len(replicas), micro_batch_count(graph))
    if shapes[0] != shapes[1]:
        raise ScheduleError(f"the schedule is for {shapes[0]} stages and micro-batches, the graph has {shapes[1]}")
    nodes: list[Node] = []
    passed_on: dict[tuple[Value, bool], Value] = {}  # by the value, and whether its consumer is on a later stage
    leaving = _leaving(graph)
    for group in groups_together(schedule):
        stage, kind, last = group[-1].stage, group[-1].kind, group[-1].micro_batch
        for replica in range(replicas[stage]):
            places = {(stage, replica, action.micro_batch, kind == "F") for action in group}
            values = tuple(value for place in sorted(places) for value in leaving.get(place, ()))
            if not values:  # nothing leaves the stage in this direction
                continue
            name = at(stage, replica, last, f"{OpName.TOGETHER}_{CALL_OF_KIND[kind]}")
            kinds = tuple(graph.type_of(value) for value in values)
            attrs = attributes({"micro_batch": last, "replica": replica, "stage": stage})
            nodes.append(Node(name, OpName.TOGETHER, values, kinds, attrs))
            passed_on |= {(value, kind == "F"): Value(name, i) for i, value in enumerate(values)}
    found = [_take(graph, node, passed_on) for node in graph.nodes]
    return graph.replace(nodes=(*found, *nodes)).sorted()


def groups_together(schedule: Schedule) -> Iterator[tuple[Action, ...]]:
    """Yield the actions of each stage whose results travel together, in their order."""
    for actions in schedule.workers:
        group: list[Action] = []
        for action in actions:
            group.append(action)
            if action not in schedule.together:
                if len(group) > 1:
                    yield tuple(group)
                group = []


def crossing(graph: Graph, node: Node, value: Value) -> bool | None:
    """Return whether ``value`` goes to a later stage's ``node`` (True) or an earlier one's (False); None for neither.

    Only what calls of micro-batches give each other counts.
    """
    producer = graph.node(value.node)
    if not (node.has("micro_batch") and producer.has("micro_batch")) or node.integer("stage") == producer.integer(
        "stage"
    ):
        return None
    return node.integer("stage") > producer.integer("stage")


def _leaving(graph: Graph) -> Mapping[tuple[int, int, int, bool], list[Value]]:
    """Return what leaves each stage, replica and micro-batch, to later stages (True) and to earlier ones (False)."""
    found: dict[tuple[int, int, int, bool], dict[Value, None]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            later = crossing(graph, node, value)
            if later is not None:
                producer = graph.node(value.node)
                stage, replica, m = (producer.integer(key) for key in ("stage", "replica", "micro_batch"))
                found.setdefault((stage, replica, m, later), {})[value] = None
    return {place: list(values) for place, values in found.items()}


def _take(graph: Graph, node: Node, passed_on: Mapping[tuple[Value, bool], Value]) -> Node:
    """Return ``node`` with what is passed on in place of what it took from other stages."""
    inputs = []
    for value in node.inputs:
        later = crossing(graph, node, value)
        inputs.append(value if later is None else passed_on.get((value, later), value))
    return dataclasses.replace(node, inputs=tuple(inputs)) if tuple(inputs) != node.inputs else node
