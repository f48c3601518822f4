"""Cutting a chain into stages whose largest is as small as it can be, for chains of hundreds of blocks."""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.compiled import Floats, Integers, compiled


@compiled
def even_starts(costs: Floats, stages: int) -> Integers:
    """The first block of each of ``stages`` contiguous stages with the least maximum sum of ``costs``.

    Block partition of sequences, which torchgpipe balances by and DAPPLE names in section IV.D. Needs as many
    blocks as stages. Exact, in stages x blocks^2 steps.
    """
    n = len(costs)
    sums = np.zeros(n + 1)
    sums[1:] = np.cumsum(costs)
    best = sums.copy()  # of the blocks before each place, in the stages so far
    choice = np.zeros((stages, n + 1), np.int64)
    for k in range(1, stages):
        following = np.full(n + 1, np.inf)
        for end in range(k + 1, n + 1):
            for start in range(end - 1, k - 1, -1):
                last = sums[end] - sums[start]
                if last >= following[end]:
                    break  # only grows from here
                largest = max(best[start], last)
                if largest < following[end]:
                    following[end], choice[k, end] = largest, start
        best = following
    starts = np.zeros(stages, np.int64)
    end = n
    for k in range(stages - 1, 0, -1):
        end = choice[k, end]
        starts[k] = end
    return starts
