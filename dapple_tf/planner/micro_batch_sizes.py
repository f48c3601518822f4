"""Micro-batch sizes: which are possible, and in which order to search them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dapple_tf.errors import PlanError
from dapple_tf.planner.planning_problem import Candidate, PlanningProblem

_MOST_SEARCH_STEPS = 300_000_000  # over all sizes
_LARGEST_BATCH = 10**12  # samples; the divisors of more take seconds to find
_MOST_MICRO_BATCHES = 16384  # more take long to simulate, and make the bubble hardly shorter


def list_micro_batch_sizes(global_batch_size: int, wanted: int | None) -> tuple[int, ...]:
    """Return the sizes (samples) that divide the global batch into at most 16384 micro-batches, or the ``wanted`` one.

    Raises PlanError if the global batch is empty or above 10^12, or if ``wanted`` does not divide it.
    """
    if not 1 <= global_batch_size <= _LARGEST_BATCH:
        raise PlanError(f"global_batch_size is {global_batch_size}; it must be from 1 to {_LARGEST_BATCH}")
    small = [size for size in range(1, math.isqrt(global_batch_size) + 1) if global_batch_size % size == 0]
    divisors = tuple(sorted({*small, *(global_batch_size // size for size in small)}))
    if wanted is None:
        return tuple(size for size in divisors if global_batch_size // size <= _MOST_MICRO_BATCHES)
    if wanted not in divisors:
        near = sorted(sorted(divisors, key=lambda size: abs(size - wanted))[:3])
        raise PlanError(
            f"micro_batch_size={wanted} does not divide global_batch_size={global_batch_size}: "
            f"use {' or '.join(map(str, near))}"
        )
    return (wanted,)


def promising_sizes(problem: PlanningProblem, candidates: Iterable[Candidate]) -> tuple[int, ...]:
    """Return the micro-batch sizes in the order in which to search them: best known candidate first.

    A good plan found early lowers the ceiling of all later searches. If searching every size takes too long, only the
    first are returned, at least two.
    """
    best = dict.fromkeys(problem.micro_batch_sizes, math.inf)
    for candidate in candidates:
        best[candidate.micro_batch_size] = min(best[candidate.micro_batch_size], candidate.seconds)
    count = max(2, _MOST_SEARCH_STEPS // sum(space.search_steps for space in problem.search_spaces))
    return tuple(sorted(best, key=lambda size: (best[size], size)))[:count]
