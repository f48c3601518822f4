"""AutoPipe's partitioner: Algorithm 1, and the heuristic that moves the master stage (AutoPipe, section III.B.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.systems.autopipe_simulator import simulate_1f1b
from dapple_tf.simulator.arrays import Floats, prefix_sums
from dapple_tf.simulator.compiled import compiled

Scheme = tuple[int, ...]
"""A partition scheme: the first block of each stage, and the number of blocks."""

_MOST_SCHEMES = 400  # of a search; after them the best one counts


class Blocks(NamedTuple):
    """f and b of each block (seconds of a micro-batch), Comm, and m."""

    forward: Floats
    backward: Floats
    comm: float
    micro_batches: int


class Simulated(NamedTuple):
    """A partition scheme with its iteration time (seconds) and its master stage."""

    scheme: Scheme
    seconds: float
    master: int


def search_scheme(blocks: Blocks, stages: int) -> Simulated:
    """Return the fastest scheme that the heuristic finds for this number of stages, p.

    1) The scheme of Algorithm 1. 2) The stages after the master stage i are cut so that inequality 1 holds where it
    can. 3) Unless i is 0, its first block goes to stage i - 1 or its last one to stage i + 1, each with and without
    Algorithm 1 for the stages before; what has its master at i or before it is taken up at 2). 4) The fastest of all
    that were simulated.

    The paper leaves open: how 2) adjusts (here one stage after the other, until the master changes, each with as many
    blocks as the inequality allows, and one at least); which i counts in 3) after that (the adjusted scheme's); and
    when the search ends (no scheme is taken up twice, and 400 are simulated at most).
    """
    return _Search(blocks, stages).run()


def balanced_scheme(work: Floats, stages: int) -> Scheme:
    """Return the scheme of Algorithm 1: the largest sum of ``work`` of a stage is the least possible."""
    return _rebuild(_balance(work, stages)[1], len(work), stages)


class _Search:
    """The state of one search."""

    def __init__(self, blocks: Blocks, stages: int) -> None:
        self.blocks, self.stages = blocks, stages
        self.forward = prefix_sums(blocks.forward)
        self.backward = prefix_sums(blocks.backward)
        self.cuts = _balance(blocks.forward + blocks.backward, stages)[1]
        self.known: dict[Scheme, Simulated] = {}

    def run(self) -> Simulated:
        """Return the fastest scheme."""
        waiting = [self.simulate(_rebuild(self.cuts, len(self.blocks.forward), self.stages))]
        taken_up = {waiting[0].scheme}
        while waiting and len(self.known) < _MOST_SCHEMES:
            found = self.adjust(waiting.pop())
            if found.master == 0:
                continue
            for scheme in self.shift(found):
                moved = self.simulate(scheme)
                if moved.master <= found.master and scheme not in taken_up:
                    taken_up.add(scheme)
                    waiting.append(moved)
        return min(self.known.values(), key=lambda found: found.seconds)

    def simulate(self, scheme: Scheme) -> Simulated:
        """Return the scheme with its time and master stage."""
        if scheme not in self.known:
            bounds = np.array(scheme)
            f, b = np.diff(self.forward[bounds]), np.diff(self.backward[bounds])
            seconds, master = simulate_1f1b(f, b, self.blocks.comm, self.blocks.micro_batches)
            self.known[scheme] = Simulated(scheme, float(seconds), int(master))
        return self.known[scheme]

    def adjust(self, found: Simulated) -> Simulated:
        """Return the scheme after step 2: the sum of f_j + b_j of the stages i + 1 to s is at most (s - i) b_i."""
        i, n = found.master, self.stages
        total = self.forward + self.backward
        bounds = list(found.scheme)
        least = self.backward[bounds[i + 1]] - self.backward[bounds[i]]  # b_i
        for s in range(i + 1, n - 1):
            limit = total[bounds[i + 1]] + (s - i) * least
            most = int(np.searchsorted(total, limit, side="right")) - 1
            end = max(bounds[s] + 1, min(bounds[s + 1], most))
            if end < bounds[s + 1]:
                bounds[s + 1] = end
                found = self.simulate(tuple(bounds))
                if found.master != i:
                    break
        return found

    def shift(self, found: Simulated) -> Iterator[Scheme]:
        """Yield the schemes of step 3."""
        i, scheme = found.master, found.scheme
        if scheme[i + 1] - scheme[i] == 1:
            return  # its only block cannot move
        first = (*scheme[:i], scheme[i] + 1, *scheme[i + 1 :])
        yield first
        if i > 1:
            yield (*_rebuild(self.cuts, scheme[i - 1], i - 1), *first[i:])
        if i + 1 < self.stages:
            last = (*scheme[: i + 1], scheme[i + 1] - 1, *scheme[i + 2 :])
            yield last
            yield (*_rebuild(self.cuts, scheme[i], i), *last[i + 1 :])


@compiled
def _balance(work: Floats, stages: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return time[i][j] of Algorithm 1, the largest stage of i blocks in j stages, and the k that reaches it."""
    n = len(work)
    prefix_sum = np.zeros(n + 1)
    for i in range(n):
        prefix_sum[i + 1] = prefix_sum[i] + work[i]
    time = np.full((n + 1, stages + 1), np.inf)
    cuts = np.zeros((n + 1, stages + 1), np.int64)
    time[0, 0] = 0.0
    for i in range(1, n + 1):
        for j in range(1, min(stages, i) + 1):
            for k in range(j - 1, i):
                longest = max(time[k, j - 1], prefix_sum[i] - prefix_sum[k])
                if longest < time[i, j]:
                    time[i, j], cuts[i, j] = longest, k
    return time, cuts


def _rebuild(cuts: NDArray[np.int64], blocks: int, stages: int) -> Scheme:
    """Return the scheme of Algorithm 1 for the first ``blocks`` blocks in ``stages`` stages."""
    bounds = [blocks]
    for j in range(stages, 0, -1):
        bounds.append(int(cuts[bounds[-1], j]))
    return tuple(reversed(bounds))
