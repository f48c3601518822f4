"""Orders of schedules by name, cached: a planner simulates many plans under the same one."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dapple_tf.simulator.compiled import Integers
from dapple_tf.simulator.engine import Order, early_backward_order, encode
from graph_passes.schedules.policies import build_schedule, warm_up_by_name


class Ordered(NamedTuple):
    """An order (see ``engine``), and the most micro-batches in flight on each stage."""

    order: Order
    in_flight: Integers


@lru_cache(maxsize=128)
def named_order(name: str, stages: int, micro_batches: int) -> Ordered:
    """Return the order of a schedule, which must not be written to. Raises ScheduleError for an unknown name."""
    warm = warm_up_by_name(name, stages, micro_batches)
    if warm is None:
        schedule = build_schedule(name, stages, micro_batches)
        return Ordered(encode(schedule), np.array(schedule.in_flight, np.int64))
    held = np.array(warm, np.int64)
    return Ordered(early_backward_order(held, micro_batches), held)
