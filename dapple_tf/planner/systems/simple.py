"""Planners "gpipe", a straight pipeline of even stages under GPipe's schedule, and "dp", data parallelism."""

from __future__ import annotations

from dataclasses import replace

from dapple_tf.errors import PlanError
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.planner.baselines import data_parallel, even_stages
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.chunk_shapes import most_stages


@planner("gpipe", unequal=True, shares_devices=True)
def plan_gpipe(problem: PlanningProblem, *, stages: int | None = None) -> PlannerResult | None:
    """Return even stages (torchgpipe's block partition) of one device each; by default as many as possible.

    All forwards come first, unless the problem names another schedule, which may have several stages on each device.
    None if it does not fit the memory. Raises PlanError for more stages than the devices can run, or than blocks of
    layers, and ScheduleError for a number of stages that the schedule is not for.
    """
    scheduled = replace(problem, schedule="gpipe") if problem.schedule == "auto" else problem
    blocks = len(problem.chain.parameter_bytes)
    most = most_stages(scheduled) if scheduled.shares_devices else min(problem.cluster.devices, blocks)
    count = most if stages is None else stages
    if not 1 <= count <= most:
        raise PlanError(
            f"stages={count}: {problem.profile.model!r} on {problem.cluster.devices} devices can have 1 to {most} "
            f"stages; its {len(problem.profile.layers)} layers form {blocks} blocks that can be a stage"
        )
    workers = (
        ScheduleSpec.parse(scheduled.schedule).worker_map(count)
        if scheduled.shares_devices
        else WorkerMap.one_per_stage(count)
    )
    found = scheduled.evaluate_all_sizes(even_stages(scheduled, workers), "straight")
    return PlannerResult(min(found, key=lambda c: c.seconds)) if found else None


@planner("dp", unequal=True)
def plan_dp(problem: PlanningProblem) -> PlannerResult | None:
    """Return one stage on all devices, with the number of micro-batches that is fastest in the simulator.

    AllReduce comes after the last backward, or runs during it if the problem has ``overlap``. None if it does not fit.
    """
    found = problem.evaluate_all_sizes(data_parallel(problem), "DP")
    return PlannerResult(min(found, key=lambda c: c.seconds)) if found else None
