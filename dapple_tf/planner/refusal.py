"""Why a planner found no plan, and what would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dapple_tf.planner.best import plan_best
from dapple_tf.planner.memory_fit import fits_memory
from dapple_tf.planner.memory_shortage import describe_shortage
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.registry import PLANNERS
from dapple_tf.simulator.interrupts import interruptible
from profiler.units import format_bytes, format_samples

_AMPLE = 1e30  # bytes of a device that holds any model


def explain_failure(problem: PlanningProblem, planner: str, options: Mapping[str, Any]) -> str:
    """Return why ``planner`` found nothing, and what would help."""
    if not problem.cluster.is_uniform:
        if planner != "best" and plan_best(problem) is not None:
            return _explain_choice(problem, planner, options)
        return _explain_unequal(problem)
    if problem.schedule == "auto" and not fits_memory(problem):
        return describe_shortage(problem)
    if planner != "best" and (problem.schedule == "auto" or plan_best(problem) is not None):
        return _explain_choice(problem, planner, options)
    # "auto" may choose the policy with the smallest stashes: where it does not fit, no schedule does that has one stage
    # on a device.
    auto, again = replace(problem, schedule="auto"), replace(problem, recompute=True)
    remedies = ["schedule 'auto'"] if fits_memory(auto) else []
    if problem.shares_devices and plan_best(again) is not None:
        remedies.append("recompute")
    if remedies:
        return f"no plan fits the devices' memory under schedule {problem.schedule!r}: use {' or '.join(remedies)}"
    return f"under schedule 'auto', which needs the least memory, {describe_shortage(problem)}"


@interruptible
def lacks_memory(problem: PlanningProblem, planner: str, **options: Any) -> bool:
    """Return whether ``planner``, which found nothing, would have a plan if the devices had unlimited memory."""
    kinds = {name: replace(kind, memory=None) for name, kind in problem.cluster.kinds.items()}
    ample = replace(problem.cluster, device_memory=_AMPLE, kinds=kinds)
    return PLANNERS[planner](replace(problem, cluster=ample), **options) is not None


def describe_other_reason(problem: PlanningProblem, **options: Any) -> str:
    """Return that a planner has no plan for these devices, sizes and options, where memory is not the reason."""
    given = [f"{name}={value!r}" for name, value in options.items()]
    if problem.schedule != "auto":
        given.append(f"schedule {problem.spec.short!r}")
    given.append(f"micro-batches of at most {format_samples(max(problem.micro_batch_sizes))}")
    return (
        f"has no plan on {problem.cluster.devices} devices with {', '.join(given)}, in which each replica gets at "
        "least one sample"
    )


def _explain_choice(problem: PlanningProblem, planner: str, options: Mapping[str, Any]) -> str:
    """Return why ``planner`` found nothing where planner "best" has a plan."""
    if lacks_memory(problem, planner, **options):
        why = "has no plan that fits the devices' memory with at least one sample for each replica"
    else:
        why = describe_other_reason(problem, **options)
    return f"planner {planner!r} {why}: use planner 'best', which has one"


def _explain_unequal(problem: PlanningProblem) -> str:
    """Return that no plan fits unequal devices, and what would help."""
    memories = Counter(problem.cluster.memories)
    devices = ", ".join(f"{count} of {format_bytes(memory)}" for memory, count in memories.items())
    return (
        f"no plan of {problem.profile.model!r} was found that fits the memory of the devices ({devices}), each with "
        "its share of the rows: give more devices or devices with more memory, a smaller micro_batch_size, or recompute"
    )
