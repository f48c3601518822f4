"""Why no plan fits the devices' memory, and what would."""

from __future__ import annotations

import itertools
from dataclasses import replace

from dapple_tf.planner.balanced_cuts import even_starts
from dapple_tf.planner.micro_batch_sizes import list_micro_batch_sizes
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.simulator.memory import usable_bytes
from profiler.units import format_bytes


def describe_shortage(problem: PlanningProblem) -> str:
    """The stage that lacks most where the layers are spread as evenly by memory as they can be, and the remedies."""
    size = problem.micro_batch_sizes[0]
    need, first, last = _tightest(problem, size, problem.cluster.devices)
    layers = problem.profile.layers
    memory = problem.cluster.device_memory
    text = (
        f"{problem.profile.model!r} does not fit {problem.cluster.devices} devices of {format_bytes(memory)}: even "
        f"spread for memory, with one micro-batch of {size} samples in flight, the stage of layers {first} to {last} "
        f"({layers[first].name} .. {layers[last].name}) needs {format_bytes(need)} and lacks "
        f"{format_bytes(need - memory)}"
    )
    if not problem.recompute:  # backward would make all of the stash again
        text += ". Recompute would not help: it saves nothing of a micro-batch that is alone in flight"
    remedies = _remedies(problem, size)
    if remedies:
        return f"{text}. It would fit with {', or with '.join(remedies)}"
    return f"{text}. No number of such devices would do, nor smaller micro-batches: cut the model finer"


def _remedies(problem: PlanningProblem, size: int) -> list[str]:
    """What would do, each of itself, or else smaller micro-batches and more devices together."""
    memory, devices = usable_bytes(problem.cluster.device_memory), problem.cluster.devices
    smaller = [divisor for divisor in list_micro_batch_sizes(problem.global_batch_size, None) if divisor < size][::-1]
    more = range(devices + 1, len(problem.chain.parameter_bytes) + 1)
    less = next((b for b in smaller if _tightest(problem, b, devices)[0] <= memory), None)
    count = next((n for n in more if _tightest(problem, size, n)[0] <= memory), None)
    found = [] if less is None else [f"micro-batches of {less} samples"]
    if count is not None:
        found.append(f"{count} devices")
    if problem.recompute and _tightest(replace(problem, recompute=False), size, devices)[0] <= memory:
        found.append("no recompute")  # what enters a stage, kept beside all that is made again, was too much
    if not found:
        both = ((b, n) for b in smaller for n in more if _tightest(problem, b, n)[0] <= memory)
        found = [f"micro-batches of {b} samples and {n} devices" for b, n in itertools.islice(both, 1)]
    return found


def _tightest(problem: PlanningProblem, size: int, devices: int) -> tuple[float, int, int]:
    """The largest need (bytes) of a stage, and its first and last layer, over even stages of one device each."""
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
