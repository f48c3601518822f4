"""Schedules of two stages per worker in the shape of a V, whose rows are written for enough micro-batches."""

from __future__ import annotations

from collections.abc import Callable

from graph_passes.schedules.schedule import Action, Schedule, check
from graph_passes.schedules.worker_map import WorkerMap

RowOfWorker = Callable[[int, int, tuple[int, ...], int], tuple[Action, ...]]
"""Returns the actions of a worker: of the number of workers, its own number, its two stages, and M."""


def v_shaped(workers: int, micro_batches: int, least: int, row: RowOfWorker) -> Schedule:
    """Return the schedule of ``workers`` devices, where ``row`` is for ``least`` micro-batches or more.

    Of fewer the order is that of ``least``, without those that are missing. Raises ScheduleError for a schedule that
    cannot run.
    """
    planned = max(micro_batches, least)
    stages_of = WorkerMap.waves(workers, 2).stages_of
    rows = tuple(row(workers, worker, stages, planned) for worker, stages in enumerate(stages_of))
    schedule = Schedule(rows).first_micro_batches(micro_batches)
    check(schedule)
    return schedule
