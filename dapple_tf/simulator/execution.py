"""One step of a schedule, executed under the costs of the stages: the times of all events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dapple_tf.errors import ScheduleError
from dapple_tf.simulator.compiled import Floats
from dapple_tf.simulator.engine import Order, decode_order, has_weights, run
from dapple_tf.timeline.stage_costs import StageCosts
from graph_passes.schedules.schedule import Action


@dataclass(frozen=True, eq=False)
class Execution:
    """Starts and ends of forwards, backwards, and transfers in both directions: arrays [S, M], seconds.

    Row s of an array of transfers is the boundary between stages s and s + 1; the last row is NaN. ``order``: see
    ``engine``. Arrays of weight gradients have size 0 where these are not actions of their own. The AllReduce of a
    stage runs for ``exposed_seconds`` after its last gradients.
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

    @property
    def splits(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return bool(self.start_weights.size)

    @cached_property
    def last_gradients(self) -> Floats:
        """End of each stage's last backward, or last weight gradients where they are actions of their own; seconds."""
        return np.array([row.max() for row in (self.end_weights if self.splits else self.end_backward)])

    @cached_property
    def allreduce_end(self) -> Floats:
        """End of each stage's AllReduce, in seconds."""
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


def execute(order: Order, costs: Sequence[StageCosts]) -> Execution:
    """Run ``order`` (see ``engine.encode``) on stages with these costs.

    Raises ScheduleError for an order that deadlocks, or that has another number of stages.
    """
    stages = len(order.worker_of)
    if len(costs) != stages:
        raise ScheduleError(f"the schedule has {stages} stages, but there are costs of {len(costs)}")
    split = has_weights(order)
    weights = np.array([cost.weights_seconds for cost in costs if split], np.float64)
    *times, done = run(
        order,
        np.array([cost.forward_seconds for cost in costs], np.float64),
        np.array([cost.backward_seconds - split * cost.weights_seconds for cost in costs], np.float64),
        weights,
        np.array([cost.send_forward_seconds for cost in costs], np.float64),
        np.array([cost.send_backward_seconds for cost in costs], np.float64),
    )
    if done < order.size:
        raise ScheduleError(
            f"the schedule deadlocks after {done} of {order.size} actions: "
            "call graph_passes.schedules.schedule.check(schedule) to see where"
        )
    return Execution(order, tuple(costs), *times)
