"""Planner "dapple": the paper's own, by its formulas."""

from __future__ import annotations

import math

from dapple_tf.planner.search import Found, search_by_formula
from dapple_tf.planner.simple import data_parallel, even_candidates
from dapple_tf.planner.sizes import likely_sizes
from dapple_tf.planner.task import Candidate, Decision, Task

_TRANSITIONS = 3_000_000


def plan_dapple(task: Task) -> Decision | None:
    """The plan with the least latency by formulas 1 to 3 (DAPPLE, section IV); None where nothing fits.

    DP and straight plans are among those searched. A label whose stage cannot hold one micro-batch is dropped, so
    every plan fits. The schedule is the faster policy in the simulator.
    """
    best: Found | None = None
    chosen: Candidate | None = None
    for size in likely_sizes(task, even_candidates(task)):
        for space in task.spaces:
            width = max(1, min(512, _TRANSITIONS // space.transitions))
            ceiling = math.inf if best is None else best.score
            for found in search_by_formula(task.tables(space, size), ceiling=ceiling, width=width, results=1).plans:
                candidate = task.price(task.stages(space, found), size, "DAPPLE's formulas")
                if candidate is not None:
                    best, chosen = found, candidate
    if best is None or chosen is None:
        return None
    return Decision(chosen, tuple(task.price_all(data_parallel(task), "DP")), latency=best.score)
