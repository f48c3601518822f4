"""Block partition of sequences: cut a chain of hundreds of blocks into stages whose largest is as small as possible."""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.compiled import Floats, Integers, compiled


@compiled
def even_starts(costs: Floats, stages: int) -> Integers:
    """Return the first block of each of ``stages`` contiguous stages with the least maximum sum of ``costs``.

    torchgpipe balances with the same partition (DAPPLE, section IV.D). Needs at least as many blocks as stages. Exact,
    by dynamic programming in stages x blocks^2 steps. Of equal maxima, the last stages are kept as small as possible.

    A Numba version of ``graph_passes.passes.partition.balance`` for every cut allowed and no crossing costs:
    the planner cuts chains of hundreds of blocks into tens of numbers of stages, which takes seconds in plain Python.
    ``test_balanced_cuts.py`` asserts that their largest stages are equal; their tie-breaking differs.
    """
    n = len(costs)
    sums = np.zeros(n + 1)
    sums[1:] = np.cumsum(costs)
    best = sums.copy()  # best[i]: the largest stage when the first i blocks are cut into the stages so far
    choice = np.zeros((stages, n + 1), np.int64)
    for k in range(1, stages):
        following = np.full(n + 1, np.inf)
        for end in range(k + 1, n + 1):
            for start in range(end - 1, k - 1, -1):
                last = sums[end] - sums[start]
                if last >= following[end]:
                    break  # the last stage only grows from here on
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
