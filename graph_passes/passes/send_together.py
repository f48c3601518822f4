"""Results of several micro-batches that travel to another stage together (AutoPipe, section III.C).

The tensors that leave a stage for these micro-batches all go through one ``together`` node, so no other stage has any
of them before the last one is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, make_node
from dapple_tf.graph_passes.ir.names import Site, at, micro_batch_count, replica_counts
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.schedules.schedule import CALL_OF_KIND, Action, Schedule, groups_together

Direction = Literal["forward", "backward"]
"""The direction of tensors between stages: activations go forward, to later stages, and gradients go backward."""


@dataclass(frozen=True)
class SendTogether(BuiltInPass):
    """Put a ``together`` node behind the calls whose results travel together in ``schedule``."""

    schedule: Schedule
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=frozenset({OpName.TOGETHER, OpName.EXCHANGE}),
        may_produce=frozenset({OpName.TOGETHER}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with a ``together`` node for each replica and group of actions that ``schedule`` has.

        Raises ScheduleError if the schedule is for another number of stages or micro-batches than the graph's.
        """
        replicas = replica_counts(graph)
        shapes = (len(self.schedule.stages), self.schedule.micro_batches), (len(replicas), micro_batch_count(graph))
        if shapes[0] != shapes[1]:
            raise ScheduleError(f"the schedule is for (stages, micro-batches) {shapes[0]}, the graph has {shapes[1]}")
        nodes: list[Node] = []
        joined: dict[tuple[Value, Direction], Value] = {}  # the output of a together node that stands for a value
        leaving = _leaving(graph)
        for group in groups_together(self.schedule):
            stage, kind, last = group[-1].stage, group[-1].kind, group[-1].micro_batch
            direction = direction_of(group[0])
            for replica in range(replicas[stage]):
                places = [(stage, replica, action.micro_batch, direction) for action in group]
                values = tuple(value for place in places for value in leaving.get(place, ()))
                if not values:  # nothing leaves the stage in this direction
                    continue
                name = at(stage, replica, last, f"{OpName.TOGETHER}_{CALL_OF_KIND[kind]}")
                kinds, place = map(graph.type_of, values), Site(stage, replica).attrs
                nodes.append(make_node(name, OpName.TOGETHER, values, kinds, **place, micro_batch=last))
                joined |= {(value, direction): Value(name, i) for i, value in enumerate(values)}
        found = [_take_joined(graph, node, joined) for node in graph.nodes]
        return graph.replace(nodes=(*found, *nodes)).sorted()


def direction_of(action: Action) -> Direction:
    """Return the direction in which the result of F, B or I goes to another stage."""
    return "forward" if action.kind == "F" else "backward"


def boundary_direction(graph: Graph, node: Node, value: Value) -> Direction | None:
    """Return the direction in which ``node`` takes ``value`` from another stage: forward from an earlier one.

    None where it takes it from its own stage, or one of the two belongs to no micro-batch.
    """
    producer = graph.node(value.node)
    if not (node.has("micro_batch") and producer.has("micro_batch")):
        return None
    source, target = producer.integer("stage"), node.integer("stage")
    if source == target:
        return None
    return "forward" if source < target else "backward"


def sent_together(graph: Graph, node: Node) -> tuple[int, ...]:
    """Return the micro-batches, ascending, whose tensors ``node`` gives to other stages: several for ``together``."""
    if node.op != OpName.TOGETHER:
        return (node.integer("micro_batch"),)
    return tuple(sorted({graph.node(value.node).integer("micro_batch") for value in node.inputs}))


def _leaving(graph: Graph) -> Mapping[tuple[int, int, int, Direction], list[Value]]:
    """Return the tensors that leave each stage, replica and micro-batch in each direction."""
    found: dict[tuple[int, int, int, Direction], dict[Value, None]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            direction = boundary_direction(graph, node, value)
            if direction is not None:
                producer = graph.node(value.node)
                stage, replica, m = (producer.integer(key) for key in ("stage", "replica", "micro_batch"))
                found.setdefault((stage, replica, m, direction), {})[value] = None
    return {place: list(values) for place, values in found.items()}


def _take_joined(graph: Graph, node: Node, joined: Mapping[tuple[Value, Direction], Value]) -> Node:
    """Return ``node`` with outputs of ``together`` nodes in place of the tensors that it took from other stages."""
    inputs = []
    for value in node.inputs:
        direction = boundary_direction(graph, node, value)
        inputs.append(value if direction is None else joined.get((value, direction), value))
    return dataclasses.replace(node, inputs=tuple(inputs)) if tuple(inputs) != node.inputs else node
