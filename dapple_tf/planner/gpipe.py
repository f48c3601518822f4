"""Planner "gpipe": a straight pipeline of even stages under GPipe's schedule."""

from __future__ import annotations

from dataclasses import replace

from dapple_tf.errors import PlanError
from dapple_tf.planner.baselines import even_pipeline
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem


def plan_gpipe(problem: PlanningProblem, *, stages: int | None = None) -> PlannerResult | None:
    """Even stages (torchgpipe's block partition), one device each; by default as many as devices and cuts allow.

    All micro-batches go forward first, unless the problem names another schedule. None where it does not fit. Raises
    PlanError for more stages than devices or blocks of layers.
    """
    most = min(problem.cluster.devices, len(problem.chain.parameter_bytes))
    count = most if stages is None else stages
    if not 1 <= count <= most:
        raise PlanError(
            f"{count} stages are wanted, but {problem.profile.model!r} on {problem.cluster.devices} devices can have "
            f"1 to {most}: the profile has {len(problem.profile.layers)} layers that make "
            f"{len(problem.chain.parameter_bytes)} blocks with work between its cuts"
        )
    named = replace(problem, schedule="gpipe") if problem.schedule == "auto" else problem
    found = named.evaluate_all_sizes(even_pipeline(named, count), "straight")
    return PlannerResult(min(found, key=lambda c: c.seconds)) if found else None
