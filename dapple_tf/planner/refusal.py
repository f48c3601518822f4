"""Why a planner found no plan, and what would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dapple_tf.planner.best import plan_best
from dapple_tf.planner.memory_fit import devices_needed, fits_memory
from dapple_tf.planner.planning_problem import PlanningProblem, list_micro_batch_sizes
from dapple_tf.planner.registry import PLANNERS
from dapple_tf.planner.search.balanced_cuts import even_starts
from dapple_tf.profiler.units import format_bytes, format_devices, format_samples
from dapple_tf.simulator.interrupts import interruptible

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
    # "auto" may choose the policy with the smallest stashes. So if nothing fits under "auto", no other schedule with
    # one stage per device fits either.
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
        f"has no plan on {format_devices(problem.cluster.devices)} with {', '.join(given)}, in which each replica gets "
        "at least one sample"
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


# --- Error messages where no plan fits the devices' memory: which stage lacks how many bytes, and what would fit


def describe_shortage(problem: PlanningProblem) -> str:
    """Return which stage lacks most bytes when layers are balanced by memory, and what would make the model fit."""
    size = problem.micro_batch_sizes[0]
    need, first, last = _largest_stage(problem, size, problem.cluster.devices)
    layers = problem.profile.layers
    memory = problem.cluster.least_memory
    text = (
        f"{problem.profile.model!r} does not fit {format_devices(problem.cluster.devices)} of {format_bytes(memory)}: "
        f"with stages balanced by memory and one micro-batch of {format_samples(size)} in flight, the stage of layers "
        f"{first} to {last} ({layers[first].name} .. {layers[last].name}) needs {format_bytes(need)} and lacks "
        f"{format_bytes(need - memory)}"
    )
    # Backward computes the whole stash of re-computed layers again, so with one micro-batch in flight nothing is saved.
    # (Re-computing only some layers of a stage can save a part, so the message speaks of whole stages.)
    if not problem.recompute:
        again = "Re-computation" if first == last else "Re-computation of whole stages"
        text += f". {again} would not help: it saves nothing of a single micro-batch in flight"
    remedies = _remedies(problem, size)
    if remedies:
        return f"{text}. It would fit with {', or with '.join(remedies)}"
    return (
        f"{text}. Neither more devices nor smaller micro-batches would be enough: divide the model's largest layers "
        "into smaller ones"
    )


def _remedies(problem: PlanningProblem, size: int) -> list[str]:
    """Return what would be enough: each on its own, or smaller micro-batches and more devices together."""
    devices = problem.cluster.devices
    smaller = [divisor for divisor in list_micro_batch_sizes(problem.global_batch_size, None) if divisor < size][::-1]
    needed = {b: devices_needed(problem, b) for b in smaller}
    less = next((b for b, count in needed.items() if count is not None and count <= devices), None)
    count = devices_needed(problem, size)
    found = [] if less is None else [f"micro-batches of {format_samples(less)}"]
    if count is not None:
        found.append(format_devices(count))
    kept = devices_needed(replace(problem, recompute=False), size) if problem.recompute else None
    if kept is not None and kept <= devices:
        found.append("no recompute")  # with it a stage also holds its stashed input
    if less is None and count is not None:
        fewer = [(n, -b) for b, n in needed.items() if n is not None and n < count]
        found += [f"micro-batches of {format_samples(-b)} and {format_devices(n)}" for n, b in sorted(fewer)[:1]]
    return found


def _largest_stage(problem: PlanningProblem, size: int, devices: int) -> tuple[float, int, int]:
    """Return the bytes, first layer and last layer of the largest stage, if stages are balanced by memory.

    Each stage has one device. ``size``: samples of the one micro-batch in flight.
    """
    chain, scale = problem.chain, size / problem.profile.batch_size
    fixed = chain.parameter_bytes * problem.values_per_weight
    starts = even_starts(fixed + chain.stash_bytes * scale, min(devices, len(fixed)))
    needs = []
    for first, end in zip(starts, [*starts[1:], len(fixed)], strict=True):
        stash, work = chain.stash_bytes[first:end].sum(), chain.working_bytes[first:end].max()
        entering = chain.crossing_bytes[first - 1] if problem.recompute and first else 0.0
        need = fixed[first:end].sum() + (stash + work + entering) * scale
        needs.append((float(need), chain.positions[first], chain.positions[end] - 1))
    return max(needs)
