"""Find the fewest devices that hold the model with one micro-batch in flight on each, and so whether any plan fits."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from dapple_tf.planner.costs import make_stages
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.plans import StagePlan
from dapple_tf.timeline.stage_costs import usable_bytes

_MOST_REPLICAS = 4096  # of a stage


def fit_memory(problem: PlanningProblem, micro_batch_size: int | None = None) -> tuple[StagePlan, ...] | None:
    """Return the stages that fit on the fewest devices in all with one micro-batch in flight; None if none fit.

    ``micro_batch_size``: by default the smallest, since a plan that fits with any size also fits with the smallest. The
    stages may need more devices than the cluster has (``devices_needed``); their devices are numbered from 0.
    """
    size = problem.micro_batch_sizes[0] if micro_batch_size is None else micro_batch_size
    chain, found = problem.chain, _fit(problem, size)
    if not found:
        return None
    ends = accumulate(replicas for _, replicas in found)
    devices = (range(end - replicas, end) for end, (_, replicas) in zip(ends, found, strict=True))
    return make_stages(chain, [*(start for start, _ in found), len(chain.parameter_bytes)], devices)


def devices_needed(problem: PlanningProblem, micro_batch_size: int | None = None) -> int | None:
    """Return how many devices the stages of ``fit_memory`` need; None if no number is enough."""
    stages = fit_memory(problem, micro_batch_size)
    return None if stages is None else sum(stage.replicas for stage in stages)


def fits_memory(problem: PlanningProblem) -> bool:
    """Return whether some plan of one stage per device fits with one micro-batch in flight on each."""
    if not may_bind(problem):
        return True
    needed = devices_needed(problem)
    return needed is not None and needed <= problem.cluster.devices


def _fit(problem: PlanningProblem, size: int) -> list[tuple[int, int]]:
    """Return the first block and the replicas of each stage; none if nothing fits.

    They are found by dynamic programming over (blocks planned, replicas of the last stage). Bytes of blocks are those
    of a whole micro-batch of ``size`` samples.
    """
    chain, scale = problem.chain, size / problem.profile.batch_size
    fixed, stash = chain.parameter_bytes * problem.values_per_weight, chain.stash_bytes * scale
    working = chain.working_bytes * scale
    entering = (
        chain.boundary_bytes[:-1] * scale * bool(problem.recompute)
    )  # the input of a stage, which re-computation stashes
    splittable = np.concatenate([[True], chain.splittable])
    memory, most_replicas = usable_bytes(problem.cluster.least_memory), min(size, _MOST_REPLICAS)
    rows = size if problem.whole_rows else 0  # replicas hold whole ones of these rows; 0: they hold equal fractions
    n = len(fixed)
    never = 1 << 60
    least = np.full((n + 1, most_replicas + 1), never)  # devices of the stages so far, by the replicas of the last one
    any_replicas = np.full(n + 1, never)  # the smallest entry of each row of ``least``
    best = np.zeros(n + 1, np.int64)  # the replicas that have the smallest entry
    from_block = np.zeros((n + 1, most_replicas + 1), np.int64)
    any_replicas[0] = 0
    for first in range(n):
        if any_replicas[first] == never:
            continue
        held, moving, largest = 0.0, entering[first], 0.0
        for end in range(first + 1, n + 1):
            held += fixed[end - 1]
            moving += stash[end - 1]
            largest = max(largest, working[end - 1])
            room = memory - held
            if room < 0 or (moving + largest > 0 and moving + largest > room * most_replicas):
                break  # with more blocks the stage needs even more
            fewest = 1 if moving + largest <= room else int(np.ceil((moving + largest) / room))
            if rows and fewest > 1:
                fit = int(rows * room / (moving + largest))  # rows that a device has room for
                if fit == 0:
                    break
                fewest = -(-rows // fit)
            for r in range(fewest, most_replicas + 1):
                before = any_replicas[first] if splittable[first] else least[first, r]
                if before + r < least[end, r]:
                    least[end, r], from_block[end, r] = before + r, first
                if before + r < any_replicas[end]:
                    any_replicas[end], best[end] = before + r, r
                if splittable[first] and (end == n or splittable[end]):
                    break  # more replicas only need more devices
    if any_replicas[n] == never:
        return []
    stages, end, r = list[tuple[int, int]](), n, best[n]
    while end:
        start = from_block[end, r]
        stages.append((int(start), int(r)))
        if splittable[start]:
            r = best[start]
        end = start
    return stages[::-1]


def may_bind(problem: PlanningProblem) -> bool:
    """Return whether memory can rule out a plan: not if one device holds the model and the stashes of a whole step."""
    chain, scale = problem.chain, problem.global_batch_size / problem.profile.batch_size
    fixed = float(chain.parameter_bytes.sum()) * problem.values_per_weight
    held = float(chain.stash_bytes.sum() + chain.working_bytes.max()) * scale
    return fixed + held > usable_bytes(problem.cluster.least_memory)
