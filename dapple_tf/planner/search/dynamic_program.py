"""The planner's search: dynamic programming over (layers planned, devices used, device set), DAPPLE section IV.C.

Each state keeps the best ``width`` labels (see ``labels``; the paper keeps one), and a label is left out if its bound
reaches the ceiling. A bound never exceeds the score of a plan that it bounds. So the search is exhaustive below the
least bound of the labels that it dropped because a state was full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.search.complete_plans import make_heap, unwind
from dapple_tf.planner.search.cost_tables import CostTables
from dapple_tf.planner.search.formula_search import extend_by_formula
from dapple_tf.planner.search.labels import Limits, labels_of_state, make_labels
from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.compiled import compiled
from dapple_tf.simulator.interrupts import check_stop, stop_flag


@dataclass(frozen=True)
class FoundPlan:
    """A complete plan: the first block and the placement of each stage, and its score in seconds."""

    score: float
    starts: tuple[int, ...]
    placements: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Plans found, by rising score; complete for scores below both ``exhaustive_below`` and the ceiling.

    ``scores``: seconds. ``stages``: number of stages of each plan. ``starts`` and ``placements`` [plans, stages]: first
    block and placement of each stage, 0 after a plan's last stage.
    """

    scores: Floats
    stages: Integers
    starts: Integers
    placements: Integers
    exhaustive_below: float

    def __len__(self) -> int:
        return len(self.scores)

    def plan(self, index: int) -> FoundPlan:
        """Return one plan."""
        s = int(self.stages[index])
        starts, placements = self.starts[index, :s].tolist(), self.placements[index, :s].tolist()
        return FoundPlan(float(self.scores[index]), tuple(starts), tuple(placements))

    @property
    def plans(self) -> tuple[FoundPlan, ...]:
        """All plans."""
        return tuple(self.plan(index) for index in range(len(self)))


def search_by_formula(
    tables: CostTables, *, ceiling: float = np.inf, width: int, results: int = 16, require_warm_up: bool = False
) -> SearchResult:
    """Return plans on all devices with the least latency by formulas 1 to 3, below ``ceiling`` seconds.

    DAPPLE, formulas 4 and 5. At most ``results`` plans, with at most ``width`` labels for each state. With
    ``require_warm_up`` only plans whose stages can hold the warm-up of policy A, S - i micro-batches: a pipeline
    without it does not run as the formulas say.
    """
    limits = Limits(results, require_warm_up)
    return _collect(_search(tables, limits, ceiling, width, stop_flag()))


def _collect(found: tuple[Floats, Integers, Integers, Integers, float]) -> SearchResult:
    """Sort the plans by score, then by number of stages, then by their first blocks."""
    check_stop()
    scores, stages, starts, placements, exhaustive_below = found
    order = np.lexsort((*starts.T[::-1], stages, scores))
    return SearchResult(scores[order], stages[order], starts[order], placements[order], exhaustive_below)


@compiled
def _search(
    t: CostTables, limits: Limits, ceiling: float, width: int, stop: NDArray[np.bool_]
) -> tuple[Floats, Integers, Integers, Integers, float]:
    """Return scores, stage counts, starts and placements of the plans found, and ``exhaustive_below``.

    ``stop``: see ``stop_flag``; the result is then of no use.
    """
    blocks, placements = len(t.working_bytes), len(t.replicas)
    labels, heap = make_labels(blocks, placements, width), make_heap()
    lowered, unexplored = ceiling, np.inf
    for planned in range(blocks):
        for p in range(placements) if planned else range(placements, placements + 1):
            begin, end = labels_of_state(labels, planned, p)
            if begin == end or stop[0]:
                continue
            lowered, unexplored = extend_by_formula(t, labels, heap, planned, p, limits, lowered, unexplored)
    if lowered < ceiling:
        unexplored = min(unexplored, lowered)  # plans above the lowered ceiling were dropped because the heap was full
    scores, stages, starts, chosen = unwind(heap, labels)
    return scores, stages, starts, chosen, unexplored
