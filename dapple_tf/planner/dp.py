"""Planner "dp": data parallelism over all devices, with gradient accumulation."""

from __future__ import annotations

from dapple_tf.planner.baselines import data_parallel
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem


def plan_dp(problem: PlanningProblem) -> PlannerResult | None:
    """Return one stage on all devices, with the number of micro-batches that is fastest in the simulator.

    AllReduce comes after the last backward, or runs during it if the problem has ``overlap``. None if it does not fit.
    """
    found = problem.evaluate_all_sizes(data_parallel(problem), "DP")
    return PlannerResult(min(found, key=lambda c: c.seconds)) if found else None
