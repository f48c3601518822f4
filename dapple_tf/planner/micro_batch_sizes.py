"""Which micro-batch sizes to search first: a good plan early spares the others much of their search."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dapple_tf.planner.planning_problem import Candidate, Task

_MOST_TRANSITIONS = 300_000_000  # over all sizes


def likely_sizes(task: Task, candidates: Iterable[Candidate]) -> tuple[int, ...]:
    """The sizes, those first at which the ``candidates`` do best; only the first where all are too much work."""
    best = dict.fromkeys(task.micro_batch_sizes, math.inf)
    for candidate in candidates:
        best[candidate.micro_batch_size] = min(best[candidate.micro_batch_size], candidate.seconds)
    count = max(2, _MOST_TRANSITIONS // sum(space.transitions for space in task.spaces))
    return tuple(sorted(best, key=lambda size: (best[size], size)))[:count]
