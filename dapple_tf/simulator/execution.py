"""One step of a schedule, executed under the costs of the stages: the times of all events."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.contention import Flows
from dapple_tf.simulator.engine import Seconds, Times, make_rings, run
from dapple_tf.simulator.order import Order, decode_order
from dapple_tf.timeline.stage_costs import StageCosts
from dapple_tf.wording import format_count


@dataclass(frozen=True, eq=False)
class Execution:
    """The ``times`` of all events of a step of ``order`` (see the module ``order``) on stages with these costs.

    ``allreduce_end`` [S]: end of each stage's AllReduce. ``of_micro_batches``: for each micro-batch the costs of each
    stage, where micro-batches differ in size. ``together``: see ``Schedule.together``; results that are sent together
    are one transfer, and all have its start and its end.
    """

    order: Order
    costs: tuple[StageCosts, ...]
    times: Times
    allreduce_end: Floats
    of_micro_batches: tuple[tuple[StageCosts, ...], ...] = field(default=(), kw_only=True)
    together: frozenset[Action] = field(default=frozenset(), kw_only=True)

    @property
    def stages(self) -> int:
        """S."""
        return len(self.order.worker_of)

    @property
    def micro_batches(self) -> int:
        """M."""
        return self.order.micro_batches

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each worker, in order."""
        return decode_order(self.order)

    def stage_actions(self, stage: int) -> tuple[Action, ...]:
        """Return the actions of ``stage``, in the order in which its worker runs them."""
        return tuple(action for action in self.actions[self.order.worker_of[stage]] if action.stage == stage)

    def stash_bytes(self, stage: int) -> tuple[float, ...]:
        """Return the bytes that each micro-batch in flight holds on one device of ``stage``."""
        if self.of_micro_batches:
            return tuple(costs[stage].stash_bytes for costs in self.of_micro_batches)
        return (self.costs[stage].stash_bytes,) * self.micro_batches

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds for which each stage computes."""
        if self.of_micro_batches:
            return tuple(
                sum(cost.forward_seconds + cost.backward_seconds for cost in of_stage)
                for of_stage in zip(*self.of_micro_batches, strict=True)
            )
        return tuple(self.micro_batches * (cost.forward_seconds + cost.backward_seconds) for cost in self.costs)

    @cached_property
    def last_gradients(self) -> Floats:
        """End of each stage's last backward or last weight gradients, in seconds."""
        return np.array(np.nanmax(np.fmax(self.times.end_backward, self.times.end_weights), axis=1))

    @cached_property
    def step_seconds(self) -> float:
        """End of the last event."""
        return float(np.max(self.allreduce_end))


def execute(
    order: Order,
    costs: Sequence[StageCosts],
    flows: Flows | None = None,
    *,
    of_micro_batches: Sequence[Sequence[StageCosts]] = (),
    together: Set[Action] = frozenset(),
) -> Execution:
    """Run ``order`` (see ``order.encode``) on stages with these costs.

    ``flows``: the flows that share network interfaces (``find_flows``); None if none do. ``of_micro_batches``: where
    micro-batches differ in size, the costs of each stage for each of them, of which only the seconds and the stash are
    used; ``costs`` are then for what micro-batches have in common (AllReduce, weights, the largest working set).
    ``together``: see ``Schedule``.
    Raises ScheduleError for an order that deadlocks, or that has another number of stages or micro-batches.
    """
    stages, alike = len(order.worker_of), not of_micro_batches
    every: Sequence[Sequence[StageCosts]] = [costs] if alike else of_micro_batches
    if {len(costs), *map(len, every)} != {stages} or not (alike or len(every) == order.micro_batches):
        raise ScheduleError(
            f"the schedule has {format_count(stages, 'stage')} x {format_count(order.micro_batches, 'micro-batch')}, "
            f"but there are costs of {format_count(len(costs), 'stage')}"
            + ("" if alike else f" and {format_count(len(every), 'micro-batch')}")
        )
    names = ("forward", "backward", "weights", "send_forward", "send_backward")
    seconds = (
        np.array([[getattr(cost, f"{name}_seconds") for cost in own] for own in every], np.float64).T for name in names
    )
    held = np.zeros((2, stages, order.micro_batches if together else 1), np.bool_)
    for action in together:
        held[int(action.kind != "F"), action.stage, action.micro_batch] = True
    columns = np.broadcast_arrays(*seconds, *held)
    found = run(order, Seconds(*columns), make_rings(costs), flows)
    if found.done < order.size:
        raise ScheduleError(
            f"the schedule deadlocks after {found.done} of {order.size} actions: "
            "call dapple_tf.graph_passes.schedules.schedule.check(schedule) to see where"
        )
    return Execution(
        order,
        tuple(costs),
        found.times,
        found.rings_end,
        of_micro_batches=tuple(map(tuple, of_micro_batches)),
        together=frozenset(together),
    )
