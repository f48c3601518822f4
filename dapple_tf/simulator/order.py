"""Schedules as arrays of integers, as the engine reads them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action, Kind, Schedule
from dapple_tf.graph_passes.schedules.spec import ChunkedSpec, ScheduleSpec
from dapple_tf.simulator.arrays import Floats, Integers

# An action in an int64: the stage from bit 34 on, the kind in bits 32 and 33, the micro-batch below.
FORWARD, BACKWARD, WEIGHTS, INPUTS = 0, 1, 2, 3
_KINDS: tuple[Kind, ...] = ("F", "B", "W", "I")
KIND_SHIFT, STAGE_SHIFT = 32, 34
MICRO_BATCH_MASK, KIND_MASK = (1 << KIND_SHIFT) - 1, 3
NONE = -1  # after the last action of a worker that has fewer than others


class Order(NamedTuple):
    """A schedule as arrays: the ``actions`` of each worker (see ``encode``), and the worker of each stage."""

    actions: NDArray[np.int64]
    worker_of: NDArray[np.int64]
    micro_batches: int

    @property
    def size(self) -> int:
        """The number of actions."""
        return int(np.count_nonzero(self.actions != NONE))


def encode(schedule: Schedule) -> Order:
    """Return the order of a schedule, without ``Schedule.together``."""
    rows = [
        [(a.stage << STAGE_SHIFT) | (_KINDS.index(a.kind) << KIND_SHIFT) | a.micro_batch for a in actions]
        for actions in schedule.workers
    ]
    longest = max(map(len, rows))
    actions = np.array([row + [NONE] * (longest - len(row)) for row in rows], np.int64)
    return Order(actions, np.array(schedule.worker_map.worker_of, np.int64), schedule.micro_batches)


def decode_order(order: Order) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each worker."""
    return tuple(
        tuple(
            Action(code >> STAGE_SHIFT, _KINDS[(code >> KIND_SHIFT) & KIND_MASK], code & MICRO_BATCH_MASK)
            for code in row
            if code != NONE
        )
        for row in order.actions.tolist()
    )


def early_backward_order(warm_up: Sequence[int] | Integers, micro_batches: int) -> Order:
    """Return the order of ``graph_passes.schedules.spec.early_backward`` (DAPPLE, section III.B), without checks.

    It takes far less time; test_engine.py asserts that both return the same order. K_i forwards (``warm_up``, each
    between 1 and M), then alternately one backward and one forward, then the remaining backwards.
    """
    stages, every = len(warm_up), np.arange(micro_batches, dtype=np.int64)
    actions = np.empty((stages, 2 * micro_batches), np.int64)
    for s, k in enumerate(warm_up):
        forwards = (s << STAGE_SHIFT) | every
        _alternate(actions[s], forwards, forwards | (BACKWARD << KIND_SHIFT), k)
    return Order(actions, np.arange(stages, dtype=np.int64), micro_batches)


def _alternate(row: Integers, forwards: Integers, backwards: Integers, ahead: int) -> None:
    """Fill in ``ahead`` forwards, then one backward and one forward in turn, then the remaining backwards."""
    steady = len(forwards) - ahead
    row[:ahead] = forwards[:ahead]
    row[ahead : ahead + 2 * steady : 2], row[ahead + 1 : ahead + 2 * steady : 2] = backwards[:steady], forwards[ahead:]
    row[ahead + 2 * steady :] = backwards[steady:]


def interleaved_order(workers: int, chunks: int, micro_batches: int) -> Order:
    """Return the order of ``dapple_tf.graph_passes.schedules.chunked.interleaved_1f1b``, without checks.

    It takes far less time; test_engine.py asserts that both return the same order.
    """
    count = max(1, micro_batches // workers)
    bounds = [micro_batches * group // count for group in range(count + 1)]
    groups = [np.arange(begin, end, dtype=np.int64) for begin, end in itertools.pairwise(bounds)]
    largest, calls = max(map(len, groups)), chunks * micro_batches
    forwards, backwards = (  # of worker 0
        np.concatenate([((chunk * workers) << STAGE_SHIFT) | kind | group for group in groups for chunk in of_chunks])
        for kind, of_chunks in ((0, range(chunks)), (BACKWARD << KIND_SHIFT, range(chunks)[::-1]))
    )
    actions = np.empty((workers, 2 * calls), np.int64)
    for w in range(workers):
        ahead = min(2 * (workers - w - 1) + (chunks - 1) * largest + 1, calls)
        _alternate(actions[w], forwards + (w << STAGE_SHIFT), backwards + (w << STAGE_SHIFT), ahead)
    return Order(actions, np.arange(workers * chunks, dtype=np.int64) % workers, micro_batches)


class Ordered(NamedTuple):
    """An order (see ``order``), and the most micro-batches in flight on each stage."""

    order: Order
    in_flight: Integers


def is_interleaved(spec: ScheduleSpec) -> bool:
    """Return whether a schedule is interleaved 1F1B: its orders take far less time to make than those of others."""
    return isinstance(spec, ChunkedSpec) and spec.policy == "interleaved-1f1b"


def named_order(name: str, stages: int, micro_batches: int) -> Ordered:
    """Return the order of a schedule, which must not be written to.

    Raises ScheduleError for an unknown name, and where ``check_plannable`` does.
    """
    spec = ScheduleSpec.parse(name)
    warm = spec.warm_up(stages, micro_batches)
    if warm is None:
        return _order_of_actions(name, stages, micro_batches)
    in_flight = np.array(warm, np.int64)
    return Ordered(early_backward_order(in_flight, micro_batches), in_flight)


@lru_cache(maxsize=128)  # those of ``early_backward_order`` are made as fast as they are found, and some are large
def _order_of_actions(name: str, stages: int, micro_batches: int) -> Ordered:
    """Return the order of a schedule that K_i alone do not determine."""
    spec = ScheduleSpec.parse(name)
    if is_interleaved(spec):
        spec.check(stages, micro_batches)
        workers = spec.worker_map(stages).workers
        order = interleaved_order(workers, stages // workers, micro_batches)
        return Ordered(order, HeldStash.of(order).in_flight())
    check_plannable(spec)
    schedule = spec.build(stages, micro_batches)
    return Ordered(encode(schedule), np.array(schedule.in_flight, np.int64))


def check_plannable(spec: ScheduleSpec) -> None:
    """Raise ScheduleError for a valid schedule that planners do not simulate: some of its results travel together."""
    together = spec.together
    if together:
        raise ScheduleError(
            f"planners do not simulate schedules in which results travel together ({min(together)}+): leave out "
            "the '+', or give dapple.pipeline the stages and the number of micro-batches, so that nothing is planned"
        )


@dataclass(frozen=True, eq=False)
class HeldStash:
    """By how many each action of an order changes the stashes held, and its stage: [workers, actions]."""

    changes: Integers
    stages: Integers
    worker_of: Integers

    @staticmethod
    def of(order: Order) -> HeldStash:
        """Return the changes of an order."""
        kinds, is_action = (order.actions >> KIND_SHIFT) & KIND_MASK, order.actions != NONE
        frees = is_action & (kinds != FORWARD) & (kinds != INPUTS)
        changes = (is_action & (kinds == FORWARD)).astype(np.int64) - frees
        return HeldStash(changes, np.maximum(order.actions, 0) >> STAGE_SHIFT, order.worker_of)

    def in_flight(self) -> Integers:
        """Return the most micro-batches that each stage has in flight at once."""
        rows = (np.where(self.stages == s, self.changes, 0).cumsum(axis=1) for s in range(len(self.worker_of)))
        return np.array([row.max() for row in rows], np.int64)

    def peaks(self, fixed: Floats, stash: Floats, working: Floats) -> Floats:
        """Return the most bytes that a device of each worker holds.

        That is the ``fixed`` bytes of its stages, the largest ``working`` bytes of one of them, and the most ``stash``
        bytes in flight. The arguments are bytes of each stage, on one device.
        """
        held = np.maximum(0.0, (self.changes * stash[self.stages]).cumsum(axis=1).max(axis=1))
        largest = np.zeros(len(held))
        np.maximum.at(largest, self.worker_of, working)
        peaks: Floats = held + np.bincount(self.worker_of, fixed, len(held)) + largest
        return peaks
