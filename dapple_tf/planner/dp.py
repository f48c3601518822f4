"""Planner "dp": data parallelism over all devices, with gradient accumulation."""

from __future__ import annotations

from dapple_tf.planner.baselines import data_parallel
from dapple_tf.planner.planning_problem import Decision, Task


def plan_dp(task: Task) -> Decision | None:
    """One stage on all devices; the number of micro-batches by the simulator. None where it does not fit.

    AllReduce comes after the last backward, or during it where the task says ``overlap``.
    """
    found = task.price_all(data_parallel(task), "DP")
    return Decision(min(found, key=lambda c: c.seconds)) if found else None
