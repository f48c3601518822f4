"""``zb-auto`` where nothing is known of the stages: list scheduling of stages that take equally long.

Where seconds and bytes of the stages are known, a search finds a better order (Qi et al., "Zero Bubble Pipeline
Parallelism", 2023, section 4), and the plan holds it as a text of all actions.
"""

from __future__ import annotations

from graph_passes.schedules.list_schedule import ListRule, list_equal_stages
from graph_passes.schedules.schedule import Schedule
from graph_passes.schedules.worker_map import WorkerMap

ZERO_BUBBLE_AUTO = "zb-auto"
"""The name of the policy."""


def zero_bubble_auto(workers: int, chunks: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with ``chunks`` stages each, in waves; one or two are V-shaped.

    A worker holds at most (2 p - 1) ``chunks`` stashes, as many as under ZB-H2.
    """
    worker_map = WorkerMap.waves(workers, chunks)
    rule = ListRule(split=True, most=((2 * workers - 1) * chunks,) * workers)
    return list_equal_stages(worker_map, micro_batches, rule)
