"""Looped breadth-first schedule (Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022, section 4).

Each of p workers holds v chunks of the model, looped. It runs all micro-batches through a chunk before the next one,
and backwards in the same way, the last chunk first. AllReduce of a chunk can start when its last backward has ended.
With M >= p, and chunks that take f and b, the bubble is (p - 1) (f + b). All M micro-batches are in flight on all
chunks.
"""

from __future__ import annotations

from graph_passes.schedules.schedule import Action, Schedule, check
from graph_passes.schedules.worker_map import WorkerMap


def looped_breadth_first(workers: int, chunks: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with ``chunks`` stages each; with one chunk it is GPipe's."""
    rows = []
    for stages in WorkerMap.looped(workers, chunks).stages_of:
        forwards = [Action(stage, "F", m) for stage in stages for m in range(micro_batches)]
        backwards = [Action(stage, "B", m) for stage in reversed(stages) for m in range(micro_batches)]
        rows.append((*forwards, *backwards))
    schedule = Schedule(tuple(rows))
    check(schedule)
    return schedule
