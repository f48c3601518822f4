"""Block partition of sequences: cut a chain of hundreds of blocks so that the largest stage is as small as possible."""

from __future__ import annotations

import numpy as np

from dapple_tf.planner.partition import Ways, partition
from dapple_tf.simulator.arrays import Floats, Integers, prefix_sums, runs
from dapple_tf.simulator.native.library import address, load_library


def even_starts(costs: Floats, stages: int) -> Integers:
    """Return the first block of each of ``stages`` contiguous stages with the least maximum sum of ``costs``.

    torchgpipe balances with the same partition (DAPPLE, section IV.D). There must be at least as many blocks as stages.
    The result is exact, by dynamic programming in stages x blocks x log(blocks) steps. Of partitions with equal maxima
    the one is taken whose last stages are as small as possible.
    """
    n = len(costs)
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    best = sums.copy()  # best[i]: the largest stage when the first i blocks are cut into the stages so far
    choice = np.zeros((stages, n + 1), np.int64)
    ends = np.arange(n + 1)
    for k in range(1, stages):
        # The first `end` blocks are cut into a last stage and the stages before it. If the last stage starts later, it
        # gets smaller, and the largest of the others larger. The least maximum is where the two sizes meet.
        best[:k] = -np.inf
        meets = np.clip(np.searchsorted(best + sums, sums), k, np.maximum(ends - 1, k))
        before = np.maximum(meets - 1, k)
        at, earlier = (np.maximum(best[start], sums - sums[start]) for start in (meets, before))
        following = np.minimum(at, earlier)
        latest = np.minimum(np.searchsorted(best, following, side="right") - 1, np.maximum(ends - 1, k))
        fits = np.maximum(best[latest], sums - sums[latest]) <= following
        choice[k] = np.where(fits, latest, np.where(at <= earlier, meets, before))
        best = following
    starts = np.zeros(stages, np.int64)
    end = n
    for k in range(stages - 1, 0, -1):
        end = choice[k, end]
        starts[k] = end
    return starts


def even_sums(costs: Floats, more: Floats, factors: Floats, worker_of: Integers, iterations: int) -> Integers:
    """Return the first block of each contiguous stage, such that stages and workers have nearly even costs.

    A stage costs the sum of ``costs`` of its blocks, plus ``factors`` (of the stage) times the sum of ``more``; a
    worker costs as much as all its stages. ``worker_of``: the worker of each stage. Needs at least as many blocks as
    stages. Each iteration takes the cuts with the least sum over the stages of (x + y)^2. Here x is the cost of the
    stage, and y is the cost that its worker's other stages have with the cuts of the iteration before. (In the first
    iteration y is as if all stages cost the same.) The result is that of the iteration with the least maximum over the
    workers. It takes iterations x stages x blocks^2 steps.
    """
    stages, n = len(worker_of), len(costs)
    sums, more_sums = prefix_sums(costs), prefix_sums(more)
    own = np.full(stages, (sums[n] + factors.mean() * more_sums[n]) / stages)
    starts: Integers = np.arange(stages)
    least = np.inf
    for _ in range(iterations):
        load = np.bincount(worker_of, own)
        cut = least_squares(sums, more_sums, factors, load[worker_of] - own)
        ends = np.append(cut[1:], n)
        own = sums[ends] - sums[cut] + factors * (more_sums[ends] - more_sums[cut])
        most = float(np.bincount(worker_of, own).max())
        if most < least * (1 - 1e-12):
            starts, least = cut, most
    return starts


def least_squares(sums: Floats, more_sums: Floats, factors: Floats, beside: Floats) -> Integers:
    """Return the first blocks of the stages whose sum of (cost of the stage + its ``beside``)^2 is least.

    ``sums``, ``more_sums``: the sums of ``costs`` and ``more`` (see ``even_sums``) over the first 0, 1 ... blocks.
    """
    library = load_library()
    if library is None:
        own = runs(sums) + factors[:, None, None] * runs(more_sums) + beside[:, None, None]
        return np.array(partition(own**2, Ways.in_turn(range(len(beside))), add=True).bounds(len(beside))[:-1])
    starts = np.zeros(len(beside), np.int64)
    arrays = [np.ascontiguousarray(each, np.float64) for each in (sums, more_sums, factors, beside)]
    library.dapple_least_squares(len(sums) - 1, len(beside), *map(address, (*arrays, starts)))
    return starts
