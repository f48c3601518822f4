"""``micro_batches=[2, 2, 4]`` or ``[0.25, 0.25, 0.5]``: micro-batches of given sizes, counts or shares of samples."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from typing import cast

from dapple_tf.errors import PlanError
from profiler.units import format_samples

# Shares such as 1/3 are rounded; they are divided by their sum.
_SUM_TOLERANCE = 1e-6

GivenSizes = Sequence[int] | Sequence[float]
"""Of each micro-batch the samples (whole numbers), or the share of the samples (floats)."""


def check_given_sizes(given: Sequence[object]) -> None:
    """Raise PlanError unless ``given`` are counts of samples (whole numbers), or shares (floats) that add up to 1."""
    shown = f"micro_batches={list(given)}"
    if not given:
        raise PlanError(f"{shown}: name the samples, or the share, of at least one micro-batch")
    if any(isinstance(item, bool) for item in given) or not (are_counts(given) or _are_all(float, given)):
        raise PlanError(
            f"{shown}: give samples of each micro-batch (all whole numbers, such as [2, 2, 4]) or shares (all floats, "
            "such as [0.25, 0.25, 0.5])"
        )
    sizes = cast(GivenSizes, given)
    for index, item in enumerate(sizes):
        if not 0 < item < math.inf:
            raise PlanError(f"{shown}: micro-batch {index} is {item}; every one must be larger than 0")
    if not are_counts(given) and abs(math.fsum(sizes) - 1) > _SUM_TOLERANCE:
        raise PlanError(f"{shown}: the shares add up to {math.fsum(sizes):g}, not to 1")


def are_counts(given: Sequence[object]) -> bool:
    """Return whether ``given`` are counts of samples, not shares."""
    return _are_all(numbers.Integral, given)


def _are_all(kind: type, given: Sequence[object]) -> bool:
    return all(isinstance(item, kind) for item in given)


def count_samples(given: GivenSizes, samples: int) -> tuple[int, ...]:
    """Return the samples of each micro-batch of a batch of ``samples``.

    Of shares, their sums times the samples are rounded, so that each is within one sample of its share. Raises
    PlanError where counts do not add up to ``samples``, or a share is less than a sample.
    """
    if are_counts(given):
        sizes = tuple(map(int, given))
        if sum(sizes) != samples:
            raise PlanError(
                f"micro_batches={list(given)} add up to {format_samples(sum(sizes))}, but the first batch has "
                f"{samples}: give sizes that add up to {samples}, or shares (floats that add up to 1)"
            )
        return sizes
    sums = [0.0, *itertools.accumulate(given)]
    rows = [round(samples * each / sums[-1]) for each in sums]
    found = tuple(end - first for first, end in itertools.pairwise(rows))
    if min(found) < 1:
        index = found.index(0)
        raise PlanError(
            f"micro_batches={list(given)}: share {given[index]} of {format_samples(samples)} is no sample for "
            f"micro-batch {index}: use larger shares, or a larger batch"
        )
    return found
