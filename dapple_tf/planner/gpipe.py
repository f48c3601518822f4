"""Planner "gpipe": a straight pipeline of even stages under GPipe's schedule."""

from __future__ import annotations

from dataclasses import replace

from dapple_tf.errors import PlanError
from dapple_tf.planner.baselines import even_pipeline
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem


def plan_gpipe(problem: PlanningProblem, *, stages: int | None = None) -> PlannerResult | None:
    """Return even stages (torchgpipe's block partition) of one device each; by default as many as possible.

    All forwards come first, unless the problem names another schedule. None if it does not fit the memory. Raises
    PlanError for more stages than devices, or than blocks of layers.
    """
    blocks = len(problem.chain.parameter_bytes)
    most = min(problem.cluster.devices, blocks)
    count = most if stages is None else stages
    if not 1 <= count <= most:
        raise PlanError(
            f"stages={count}: {problem.profile.model!r} on {problem.cluster.devices} devices can have 1 to {most} "
            f"stages; its {len(problem.profile.layers)} layers form {blocks} blocks that can be a stage"
        )
    scheduled = replace(problem, schedule="gpipe") if problem.schedule == "auto" else problem
    found = scheduled.evaluate_all_sizes(even_pipeline(scheduled, count), "straight")
    return PlannerResult(min(found, key=lambda c: c.seconds)) if found else None
