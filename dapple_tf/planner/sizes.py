"""Which micro-batch sizes to search, where searching all would take too long."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dapple_tf.planner.task import Candidate, Task

_MOST_TRANSITIONS = 300_000_000  # over all sizes


def likely_sizes(task: Task, candidates: Iterable[Candidate]) -> tuple[int, ...]:
    """All sizes, ascending, if that is little work; else those at which the ``candidates`` do best."""
    work = sum(space.transitions for space in task.spaces)
    count = max(2, _MOST_TRANSITIONS // work)
    if count >= len(task.micro_batch_sizes):
        return task.micro_batch_sizes
    best = dict.fromkeys(task.micro_batch_sizes, math.inf)
    for candidate in candidates:
        best[candidate.micro_batch_size] = min(best[candidate.micro_batch_size], candidate.seconds)
    return tuple(sorted(sorted(best, key=lambda size: (best[size], size))[:count]))
