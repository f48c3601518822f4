"""The rows of a batch that micro-batches and replicas take: first and end row, in the order of the samples.

Every function takes numbers, or tensors of numbers, and returns the same.
"""

from __future__ import annotations

from typing import Any


def micro_batch_bounds(size: Any, micro_batch: Any, micro_batches: Any) -> tuple[Any, Any]:
    """Return the first and the end sample of a micro-batch in a batch of ``size`` samples."""
    return size * micro_batch // micro_batches, size * (micro_batch + 1) // micro_batches


def share_bounds(begin: Any, end: Any, i: int, count: int) -> tuple[Any, Any]:
    """Return the first and the end of share ``i`` when the rows [begin, end) are shared between ``count`` replicas."""
    if count == 1:  # equal to the formula, which would add ops to the graph if the bounds are tensors
        return begin, end
    return begin + (end - begin) * i // count, begin + (end - begin) * (i + 1) // count


def replica_bounds(size: Any, micro_batch: Any, micro_batches: Any, replica: int, replicas: int) -> tuple[Any, Any]:
    """Return the first and the end sample of the share of a micro-batch that a replica takes."""
    return share_bounds(*micro_batch_bounds(size, micro_batch, micro_batches), replica, replicas)


def fit_micro_batches(samples: int, micro_batches: int, replicas: int) -> int:
    """Return how many of ``micro_batches`` a batch of ``samples`` is cut into, so that every replica gets a sample.

    ``replicas``: the most that a stage has. A batch of fewer samples than replicas is one micro-batch.
    """
    return max(1, min(micro_batches, samples // max(1, min(replicas, samples))))
