"""One step of a schedule, executed under the stages' costs: when everything happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dapple_tf.errors import ScheduleError
from dapple_tf.simulator.compiled import Floats
from dapple_tf.simulator.engine import Order, has_weights, run
from dapple_tf.timeline.stage_costs import StageCosts


@dataclass(frozen=True, eq=False)
class Execution:
    """Starts and ends [S, M] in seconds of forwards, backwards, and transfers over each boundary in both directions.

    Row s of a transfer's array is the boundary between stages s and s + 1; the last row is NaN. ``order`` is as in
    ``engine``. Weight gradients are [S, M] where they are actions of their own, and else of size 0. AllReduce of
    stage s goes on for ``exposed_seconds`` after its last gradients.
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
        return int(self.order.shape[0])

    @property
    def micro_batches(self) -> int:
        """M."""
        return int(self.start_forward.shape[1])

    @property
    def splits(self) -> bool:
        """Whether gradients of weights are actions of their own."""
        return bool(self.start_weights.size)

    @cached_property
    def last_gradients(self) -> Floats:
        """When each stage's last backward, or its last weight gradients, end, in seconds."""
        return np.array([row.max() for row in (self.end_weights if self.splits else self.end_backward)])

    @cached_property
    def allreduce_end(self) -> Floats:
        """When each stage's AllReduce ends, in seconds."""
        return np.array([end + cost.exposed_seconds for end, cost in zip(self.last_gradients, self.costs, strict=True)])

    @cached_property
    def step_seconds(self) -> float:
        """When the last event ends."""
        return float(np.max(self.allreduce_end))

    @cached_property
    def places(self) -> Order:
        """Where each action stands in its stage's order: forwards by micro-batch, backwards, then weight gradients."""
        columns = np.where(self.order >= 0, self.order, self.micro_batches - 1 - self.order)
        return np.argsort(columns, axis=1).astype(np.int32)


def execute(order: Order, costs: Sequence[StageCosts]) -> Execution:
    """Run ``order`` (see ``engine.encode``) on stages of these costs.

    Raises ScheduleError for an order that deadlocks or that is not of as many stages.
    """
    if len(costs) != order.shape[0]:
        raise ScheduleError(f"the schedule has {order.shape[0]} stages, but there are costs of {len(costs)}")
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
            f"the schedule deadlocks after {done} of {order.size} actions: schedules.schedule.check says where"
        )
    return Execution(order, tuple(costs), *times)
