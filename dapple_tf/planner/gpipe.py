"""Planner "gpipe": a straight pipeline of even stages under GPipe's schedule."""

from __future__ import annotations

from dataclasses import replace

from dapple_tf.errors import PlanError
from dapple_tf.planner.baselines import even_pipeline
from dapple_tf.planner.planning_problem import Decision, Task


def plan_gpipe(task: Task, *, stages: int | None = None) -> Decision | None:
    """Even stages (torchgpipe's block partition), one device each; by default as many as devices and cuts allow.

    All micro-batches go forward first, unless the task names another schedule. None where it does not fit. Raises
    PlanError for more stages than devices or blocks of layers.
    """
    most = min(task.cluster.devices, len(task.chain.parameter_bytes))
    count = most if stages is None else stages
    if not 1 <= count <= most:
        raise PlanError(
            f"{count} stages are wanted, but {task.profile.model!r} on {task.cluster.devices} devices can have 1 to "
            f"{most}: the profile has {len(task.profile.layers)} layers that make {len(task.chain.parameter_bytes)} "
            "blocks with work between its cuts"
        )
    named = replace(task, schedule="gpipe") if task.schedule == "auto" else task
    found = named.price_all(even_pipeline(named, count), "straight")
    return Decision(min(found, key=lambda c: c.seconds)) if found else None
