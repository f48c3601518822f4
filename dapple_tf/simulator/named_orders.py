"""Orders of schedules by name, kept: a planner prices many plans under the same one."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dapple_tf.simulator.compiled import Integers
from dapple_tf.simulator.engine import Order, early_backward_order, encode
from graph_passes.schedules.policies import build_schedule, warm_up_by_name


class Ordered(NamedTuple):
    """An order (see ``engine``), and of each stage the most micro-batches that it holds a stash of."""

    order: Order
    in_flight: Integers


@lru_cache(maxsize=128)
def named_order(name: str, stages: int, micro_batches: int) -> Ordered:
    """The order of the schedule called ``name``, not to be written to; ScheduleError where there is none."""
    warm = warm_up_by_name(name, stages, micro_batches)
    if warm is None:
        schedule = build_schedule(name, stages, micro_batches)
        return Ordered(encode(schedule), np.array(schedule.in_flight, np.int64))
    held = np.array(warm, np.int64)
    return Ordered(early_backward_order(held, micro_batches), held)
