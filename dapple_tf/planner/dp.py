"""Planner "dp": data parallelism over all devices, with gradient accumulation."""

from __future__ import annotations

from dapple_tf.planner.baselines import data_parallel
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem


def plan_dp(problem: PlanningProblem) -> PlannerResult | None:
    """One stage on all devices; the number of micro-batches by the simulator. None where it does not fit.

    AllReduce comes after the last backward, or during it where the problem says ``overlap``.
    """
    found = problem.evaluate_all_sizes(data_parallel(problem), "DP")
    return PlannerResult(min(found, key=lambda c: c.seconds)) if found else None
