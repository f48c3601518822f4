"""Orders of schedules by name, cached: a planner simulates many plans under the same one."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.spec import ChunkedSpec, ScheduleSpec
from dapple_tf.simulator.arrays import Integers
from dapple_tf.simulator.held_stash import HeldStash
from dapple_tf.simulator.order import Order, early_backward_order, encode, interleaved_order


class Ordered(NamedTuple):
    """An order (see ``order``), and the most micro-batches in flight on each stage."""

    order: Order
    in_flight: Integers


def is_interleaved(spec: ScheduleSpec) -> bool:
    """Return whether a schedule is interleaved 1F1B: its orders take far less time to make than those of others."""
    return isinstance(spec, ChunkedSpec) and spec.policy == "interleaved-1f1b"


@lru_cache(maxsize=128)
def named_order(name: str, stages: int, micro_batches: int) -> Ordered:
    """Return the order of a schedule, which must not be written to.

    Raises ScheduleError for an unknown name, and where ``check_plannable`` does.
    """
    spec = ScheduleSpec.parse(name)
    if is_interleaved(spec):
        spec.check(stages, micro_batches)
        workers = spec.worker_map(stages).workers
        order = interleaved_order(workers, stages // workers, micro_batches)
        return Ordered(order, HeldStash.of(order).in_flight())
    warm = spec.warm_up(stages, micro_batches)
    if warm is None:
        check_plannable(spec)
        schedule = spec.build(stages, micro_batches)
        return Ordered(encode(schedule), np.array(schedule.in_flight, np.int64))
    in_flight = np.array(warm, np.int64)
    return Ordered(early_backward_order(in_flight, micro_batches), in_flight)


def check_plannable(spec: ScheduleSpec) -> None:
    """Raise ScheduleError for a valid schedule that planners do not simulate: some of its results travel together."""
    together = spec.together
    if together:
        raise ScheduleError(
            f"planners do not simulate schedules in which results travel together ({min(together)}+): leave out "
            "the '+', or give dapple.pipeline the stages and the number of micro-batches, so that nothing is planned"
        )
