"""Complete plans that a search found: a heap of the best, and their stages as arrays."""

from __future__ import annotations

import heapq

import numpy as np

from dapple_tf.planner.search.labels import Labels, placement_of
from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.compiled import compiled_part

CompletePlan = tuple[float, int, int, int]  # -score, label, and placement and first block of the last stage


@compiled_part
def make_heap() -> list[CompletePlan]:
    """Return an empty heap; the plan of the highest score will be its first."""
    heap = [(0.0, -1, -1, -1)]
    heap.pop()
    return heap


@compiled_part
def offer_plan(heap: list[CompletePlan], plan: CompletePlan, results: int, ceiling: float) -> float:
    """Keep a complete plan if it is among the best ``results``, and return the new ceiling.

    Plans whose score reaches the ceiling, and labels whose bound does, are dropped. Once the heap is full, the ceiling
    is the highest score in it, if that is lower.
    """
    heapq.heappush(heap, plan)
    if len(heap) <= results:
        return ceiling
    heapq.heappop(heap)
    return min(ceiling, -heap[0][0])


@compiled_part
def unwind(heap: list[CompletePlan], labels: Labels) -> tuple[Floats, Integers, Integers, Integers]:
    """Backtrack from each plan through its parent labels; return scores, stage counts, first blocks and placements.

    The last two are arrays [plans, longest], 0 after a plan's last stage.
    """
    plans = len(heap)
    stages = np.zeros(plans, np.int64)
    for i in range(plans):
        stages[i] = labels.stages[heap[i][1]] + 1
    longest = stages.max() if plans else 0
    scores = np.empty(plans)
    starts, placements = np.zeros((plans, longest), np.int64), np.zeros((plans, longest), np.int64)
    for i in range(plans):
        negative, label, placement, start = heap[i]
        scores[i] = -negative
        stage = stages[i] - 1
        starts[i, stage], placements[i, stage] = start, placement
        while label >= 0:
            stage -= 1
            starts[i, stage], placements[i, stage] = labels.first_block[label], placement_of(labels, label)
            label = labels.parent[label]
    return scores, stages, starts, placements
