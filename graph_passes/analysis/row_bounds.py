"""The rows of a batch that micro-batches and replicas take: first and end row, in the order of the samples.

A batch of N samples is cut into M micro-batches at the rows N p // p_M, where p_0 = 0 to p_M are the *cut points*: the
numbers 0 to M for equal micro-batches, or the sums of given ``sizes``. A batch of as many samples as the sizes add up
to is then cut into these sizes, and any other one in their proportion. No sizes (an empty sequence) means equal ones.

The rows of a micro-batch are shared between the replicas of a stage in the same way: equally, or in proportion to whole
numbers, the *shares* of the replicas. No shares (an empty sequence) means equal ones.

A batch size, and the first and the end row that ``share_bounds`` takes, may be integers or scalar integer tensors; the
bounds that are returned are of the same kind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

_PARTS = 10**6


def cut_points(micro_batches: int, sizes: Sequence[int] = ()) -> Sequence[int]:
    """Return the M + 1 cut points of micro-batches in proportion to ``sizes``, or of equal ones."""
    return (0, *itertools.accumulate(sizes)) if sizes else range(micro_batches + 1)


def cut_at(size: Any, point: Any, last: int) -> Any:
    """Return the row at which a batch of ``size`` samples is cut for a cut point; ``last``: the last one."""
    return size * point // last


def micro_batch_bounds(size: Any, micro_batch: int, micro_batches: int, sizes: Sequence[int] = ()) -> tuple[Any, Any]:
    """Return the first and the end sample of a micro-batch in a batch of ``size`` samples."""
    points = cut_points(micro_batches, sizes)
    return cut_at(size, points[micro_batch], points[-1]), cut_at(size, points[micro_batch + 1], points[-1])


def micro_batch_sizes(size: int, micro_batches: int, sizes: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the number of samples of each micro-batch of a batch of ``size`` samples."""
    points = cut_points(micro_batches, sizes)
    rows = [cut_at(size, point, points[-1]) for point in points]
    return tuple(end - first for first, end in itertools.pairwise(rows))


def share_bounds(begin: Any, end: Any, i: int, count: int, shares: Sequence[int] = ()) -> tuple[Any, Any]:
    """Return the first and the end row of share ``i`` of the rows [begin, end) that ``count`` replicas share."""
    if count == 1:  # equal to the formula, which would add ops to the graph if the bounds are tensors
        return begin, end
    points = cut_points(count, shares)
    return tuple(begin + cut_at(end - begin, point, points[-1]) for point in points[i : i + 2])


def replica_bounds(
    size: Any,
    micro_batch: int,
    micro_batches: int,
    replica: int,
    replicas: int,
    sizes: Sequence[int] = (),
    shares: Sequence[int] = (),
) -> tuple[Any, Any]:
    """Return the first and the end sample of the share of a micro-batch that a replica takes."""
    return share_bounds(*micro_batch_bounds(size, micro_batch, micro_batches, sizes), replica, replicas, shares)


def whole_shares(shares: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers in the proportion of ``shares``, which are above 0; empty if these are equal.

    Whole numbers are divided by their greatest common divisor. If one is not whole, or their sum is above 10^6, each
    share is first rounded to parts of 10^6 of the sum, at least one part. So products with the rows of a batch stay
    within 64 bits.
    """
    if len(set(shares)) < 2:
        return ()
    if all(share == int(share) for share in shares) and sum(shares) <= _PARTS:
        common = math.gcd(*map(int, shares))
        return tuple(int(share) // common for share in shares)
    total = math.fsum(shares)
    parts = [max(1, round(share / total * _PARTS)) for share in shares]
    common = math.gcd(*parts)
    return () if len(set(parts)) < 2 else tuple(part // common for part in parts)


def least_rows(replicas: int, shares: Sequence[int] = ()) -> int:
    """Return the smallest number of rows from which on every replica gets a row of a micro-batch."""
    return -(-sum(shares) // min(shares)) if shares else replicas


def fit_micro_batches(samples: int, micro_batches: int, least: int) -> int:
    """Return into how many micro-batches to cut a batch, at most ``micro_batches``, so that each replica gets a sample.

    ``samples``: the size of the batch. ``least``: the largest ``least_rows`` of a stage. A batch of fewer samples than
    that is one micro-batch.
    """
    return max(1, min(micro_batches, samples // max(1, min(least, samples))))


def fit_sizes(samples: int, sizes: Sequence[int], least: int) -> Sequence[int]:
    """Return ``sizes``, or an empty sequence if a batch cut in their proportion would leave a replica without a sample.

    ``samples``: the size of the batch. ``least``: the largest ``least_rows`` of a stage.
    """
    return sizes if sizes and min(micro_batch_sizes(samples, len(sizes), sizes)) >= least else ()
