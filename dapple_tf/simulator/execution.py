"""One step of a schedule, executed under the costs of the stages: the times of all events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dapple_tf.errors import ScheduleError
from dapple_tf.simulator.compiled import Floats
from dapple_tf.simulator.contention import Flows
from dapple_tf.simulator.engine import run
from dapple_tf.simulator.order import Order, decode_order, has_weights
from dapple_tf.simulator.rings import make_rings
from dapple_tf.simulator.shared_engine import run_shared, uniform_seconds
from dapple_tf.timeline.stage_costs import StageCosts
from graph_passes.schedules.schedule import Action


@dataclass(frozen=True, eq=False)
class Execution:
    """Starts and ends of forwards, backwards, and transfers in both directions: arrays [S, M], seconds.

    Row s of an array of transfers is the boundary between stages s and s + 1; the last row is NaN. ``order``: see the
    module ``order``. Backwards are B, or I. Weight gradients are NaN where they are not actions of their own, and their
    arrays have size 0 where none are. The AllReduce of a stage runs for ``exposed_seconds`` after its last gradients.
    ``of_micro_batches``: for each micro-batch the costs of each stage, where micro-batches differ in size.
    ``together``: see ``Schedule.together``; what travels together has the start and the end of its one transfer.
    ``rings_end``: end of each stage's AllReduce, where flows share network interfaces (see ``contention``): the times
    are then those of ``shared_engine``.
    """

    order: Order
    costs: tuple[StageCosts, ...]
    start_forward: Floats
    end_forward: Floats
    start_backward: Floats
    end_backward: Floats
    start_weights: Floats
    end_weights: Floats
    start_send_forward: Floats
    end_send_forward: Floats
    start_send_backward: Floats
    end_send_backward: Floats
    of_micro_batches: tuple[tuple[StageCosts, ...], ...] = field(default=(), kw_only=True)
    together: frozenset[Action] = field(default=frozenset(), kw_only=True)
    rings_end: Floats | None = field(default=None, kw_only=True)

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

    @property
    def splits(self) -> bool:
        """Whether some weight gradients are actions of their own."""
        return bool(self.start_weights.size)

    @cached_property
    def last_gradients(self) -> Floats:
        """End of each stage's last backward or last weight gradients, in seconds."""
        ends = np.concatenate([self.end_backward, self.end_weights], axis=1) if self.splits else self.end_backward
        return np.array(np.nanmax(ends, axis=1))

    @cached_property
    def allreduce_end(self) -> Floats:
        """End of each stage's AllReduce, in seconds."""
        if self.rings_end is not None:
            return self.rings_end
        found, free = np.zeros(self.stages), np.zeros(self.order.actions.shape[0])
        for stage in np.argsort(self.last_gradients, kind="stable"):  # those of one worker run one after the other
            worker = self.order.worker_of[stage]
            free[worker] = max(self.last_gradients[stage], free[worker]) + self.costs[stage].exposed_seconds
            found[stage] = free[worker]
        return found

    @cached_property
    def step_seconds(self) -> float:
        """End of the last event."""
        return float(np.max(self.allreduce_end))


def execute(order: Order, costs: Sequence[StageCosts], flows: Flows | None = None) -> Execution:
    """Run ``order`` (see ``order.encode``) on stages with these costs.

    ``flows``: what shares network interfaces (``find_flows``); None for nothing. Raises ScheduleError for an order that
    deadlocks, or that has another number of stages.
    """
    stages = len(order.worker_of)
    if len(costs) != stages:
        raise ScheduleError(f"the schedule has {stages} stages, but there are costs of {len(costs)}")
    splits, ends = has_weights(order), None
    arrays = (
        np.array([cost.forward_seconds for cost in costs], np.float64),
        np.array([cost.backward_seconds for cost in costs], np.float64),
        np.array([cost.weights_seconds for cost in costs if splits], np.float64),
        np.array([cost.send_forward_seconds for cost in costs], np.float64),
        np.array([cost.send_backward_seconds for cost in costs], np.float64),
    )
    if flows is None or not flows.directions:
        *times, done = run(order, *arrays)
    else:
        (*times, done), ends = run_shared(
            order, uniform_seconds(*arrays), flows, make_rings(costs), splits, True, np.inf, False
        )
    if done < order.size:
        raise ScheduleError(
            f"the schedule deadlocks after {done} of {order.size} actions: "
            "call graph_passes.schedules.schedule.check(schedule) to see where"
        )
    return Execution(order, tuple(costs), *times, rings_end=ends)
