"""Error messages where no plan fits the devices' memory: which stage lacks how many bytes, and what would fit."""

from __future__ import annotations

from dataclasses import replace

from dapple_tf.planner.balanced_cuts import even_starts
from dapple_tf.planner.memory_fit import devices_needed
from dapple_tf.planner.micro_batch_sizes import list_micro_batch_sizes
from dapple_tf.planner.planning_problem import PlanningProblem
from profiler.units import format_bytes, format_samples


def describe_shortage(problem: PlanningProblem) -> str:
    """Return which stage lacks most bytes when layers are balanced by memory, and what would make the model fit."""
    size = problem.micro_batch_sizes[0]
    need, first, last = _largest_stage(problem, size, problem.cluster.devices)
    layers = problem.profile.layers
    memory = problem.cluster.least_memory
    text = (
        f"{problem.profile.model!r} does not fit {problem.cluster.devices} devices of {format_bytes(memory)}: with "
        f"stages balanced by memory and one micro-batch of {format_samples(size)} in flight, the stage of layers "
        f"{first} to {last} ({layers[first].name} .. {layers[last].name}) needs {format_bytes(need)} and lacks "
        f"{format_bytes(need - memory)}"
    )
    if not problem.recompute:  # backward would compute the whole stash again
        text += ". Re-computation would not help: it saves nothing of a single micro-batch in flight"
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
        found.append(f"{count} devices")
    kept = devices_needed(replace(problem, recompute=False), size) if problem.recompute else None
    if kept is not None and kept <= devices:
        found.append("no recompute")  # the stashed input of a stage, beside all that is computed again, is too much
    if less is None and count is not None:
        fewer = [(n, -b) for b, n in needed.items() if n is not None and n < count]
        found += [f"micro-batches of {format_samples(-b)} and {n} devices" for n, b in sorted(fewer)[:1]]
    return found


def _largest_stage(problem: PlanningProblem, size: int, devices: int) -> tuple[float, int, int]:
    """Return the bytes, first layer and last layer of the largest of stages balanced by memory, one device each.

    ``size``: samples of the one micro-batch in flight.
    """
    chain, scale = problem.chain, size / problem.profile.batch_size
    fixed = chain.parameter_bytes * (2 + problem.optimizer_slots)
    starts = even_starts(fixed + chain.stash_bytes * scale, min(devices, len(fixed)))
    needs = []
    for first, end in zip(starts, [*starts[1:], len(fixed)], strict=True):
        stash, work = chain.stash_bytes[first:end].sum(), chain.working_bytes[first:end].max()
        entering = chain.crossing_bytes[first - 1] if problem.recompute and first else 0.0
        need = fixed[first:end].sum() + (stash + work + entering) * scale
        needs.append((float(need), chain.positions[first], chain.positions[end] - 1))
    return max(needs)
