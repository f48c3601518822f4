"""Hanayo: waves over the workers and back (Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism", 2023).

With w waves each of p workers has 2 w stages: the model runs from the first worker to the last and back, w times. At
each turn two stages follow each other on one worker, and nothing is sent. The paper's runtime lists the actions by
their times where a forward of a stage takes 1 and a backward 2; so does this generator. With M = p and w = 1 a worker
idles for at most 4 (p - 1) of these units, where 1F1B, whose two stages per worker are one, idles for 6 (p - 1).
"""

from __future__ import annotations

from graph_passes.schedules.list_schedule import ListRule, list_equal_stages
from graph_passes.schedules.schedule import Schedule
from graph_passes.schedules.worker_map import WorkerMap


def hanayo(workers: int, waves: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with 2 ``waves`` stages each.

    A worker runs forwards and backwards alternately, where both are ready. It holds at most (2 w + 1) p stashes: those
    of p micro-batches, as 1F1B's first worker does, and p for the wave that has begun.
    """
    worker_map = WorkerMap.waves(workers, 2 * waves)
    rule = ListRule(split=False, most=((2 * waves + 1) * workers,) * workers, alternate=True)
    return list_equal_stages(worker_map, micro_batches, rule)
