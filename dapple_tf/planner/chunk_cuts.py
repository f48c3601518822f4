"""Other cuts of a plan with several stages per device: all of them, or those one or two moves away."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from dapple_tf.simulator.arrays import Floats, Integers
from graph_passes.schedules.worker_map import WorkerMap

_REACH = 4  # stages between the two of a move, at most


def count_cuts(blocks: int, stages: int) -> int:
    """Return in how many ways ``blocks`` can be cut into ``stages``."""
    return math.comb(blocks - 1, stages - 1)


def all_cuts(blocks: int, stages: int) -> Iterator[Integers]:
    """Yield the first block of each stage, for all cuts."""
    for starts in itertools.combinations(range(1, blocks), stages - 1):
        yield np.array((0, *starts), np.int64)


def moved_cuts(starts: Integers, blocks: int, workers: WorkerMap, load: Floats) -> Iterator[Integers]:
    """Yield cuts in which one stage has a block less and another, near it, a block more.

    The stages between them keep their numbers of blocks. ``load``: of each worker; the stages of the worker
    with the largest load are made smaller first.
    """
    stages = len(starts)
    sizes = np.diff(starts, append=blocks)
    by_load = sorted(range(stages), key=lambda stage: -load[workers.worker_of[stage]])
    for distance in range(1, min(_REACH, stages - 1) + 1):
        for less in by_load:
            if sizes[less] < 2:
                continue
            if less + distance < stages:  # the last block of a stage goes to a later one
                moved = starts.copy()
                moved[less + 1 : less + distance + 1] -= 1
                yield moved
            if less >= distance:  # the first block of a stage goes to an earlier one
                moved = starts.copy()
                moved[less - distance + 1 : less + 1] += 1
                yield moved


def near_cuts(starts: Integers, blocks: int, workers: WorkerMap, load: Floats) -> Iterator[Integers]:
    """Yield the cuts one move away (see ``moved_cuts``), then those two moves away."""
    yield from moved_cuts(starts, blocks, workers, load)
    for moved in moved_cuts(starts, blocks, workers, load):
        yield from moved_cuts(moved, blocks, workers, load)
