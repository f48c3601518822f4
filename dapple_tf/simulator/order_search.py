"""The fastest order that list scheduling and local search find for given costs and memory: the schedule ``zb-auto``.

Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 4: a heuristic makes orders for several settings of its
choices, and the best one is improved. Here the start is the best of these and of all named schedules on the same worker
map that fit the memory; the improvement moves single actions of a worker while the simulated step is not longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.list_schedule import ListRule, StageTimes, list_schedule
from dapple_tf.graph_passes.schedules.schedule import Schedule
from dapple_tf.graph_passes.schedules.spec import CHUNKED, ScheduleSpec
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from dapple_tf.profiler.units import format_difference, format_seconds
from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.engine import step_seconds
from dapple_tf.simulator.interrupts import check_stop, interruptible, stop_flag
from dapple_tf.simulator.native.library import address, load_library
from dapple_tf.simulator.order import HeldStash, Order, decode_order, encode
from dapple_tf.timeline.stage_costs import StageCosts, usable_bytes
from dapple_tf.wording import format_count

_ONE_STAGE_PER_WORKER = ("dapple-a", "dapple-b", "1f1b-so", "zb-h1", "zb-h2")  # each also with D from the memory
_ACTIONS = 3e7  # simulated in the moves of one search, at most: about a second
_MOVES = 100000  # in one search, at most


@dataclass(frozen=True)
class FoundOrder:
    """The best order found.

    ``seconds``: of the simulated step. ``bound``: a lower bound (seconds) of the step of any order on this worker map.
    ``named``: the fastest schedule with a name on the same worker map that fits the memory, and its seconds; None where
    none fits. The named schedules include the order that ``zb-auto`` has for stages of unknown costs.
    """

    schedule: Schedule
    seconds: float
    bound: float
    named: tuple[str, float] | None

    def __str__(self) -> str:
        named = ""
        if self.named is not None:
            name, seconds = self.named
            named = f"; {name}, the best with a name, takes {format_difference(seconds / self.seconds - 1)} longer"
        return f"zb-auto: {self.distance:.1%} above the lower bound of {format_seconds(self.bound)}{named}"

    @property
    def distance(self) -> float:
        """The step's seconds above ``bound``, as a fraction of that."""
        return max(0.0, self.seconds / self.bound - 1) if self.bound else 0.0


@interruptible
def search_order(
    worker_map: WorkerMap, micro_batches: int, costs: Sequence[StageCosts], device_memory: float = math.inf
) -> FoundOrder:
    """Return the best order found for stages with these costs; ``device_memory``: bytes.

    Backwards may be whole or split: ``StageCosts.weights_seconds`` is the part that may run at any later time. Raises
    ScheduleError where not even one micro-batch at a time fits the memory, or the costs are of other stages.
    """
    if len(costs) != worker_map.stages:
        raise ScheduleError(
            f"the worker map has {format_count(worker_map.stages, 'stage')}, but there are costs of {len(costs)}"
        )
    problem = _Problem.of(worker_map, costs, device_memory)
    named = problem.fastest(_named_schedules(worker_map, micro_batches, problem))
    listed = problem.fastest(_list_schedules(worker_map, micro_batches, problem))
    start = min((found for found in (named, listed) if found is not None), key=lambda found: found[1], default=None)
    if start is None:
        raise ScheduleError(
            f"no order fits: a device has {device_memory:.4g} bytes, and the weights, gradients, optimizer slots and "
            "one micro-batch of some device's stages need more; use more stages, more micro-batches or recompute"
        )
    order = encode(start[2])
    seconds = problem.improve(order)
    return FoundOrder(
        Schedule(decode_order(order)) if seconds < start[1] else start[2],
        seconds,
        lower_bound(worker_map, micro_batches, costs),
        None if named is None else named[:2],
    )


def lower_bound(worker_map: WorkerMap, micro_batches: int, costs: Sequence[StageCosts]) -> float:
    """Return a lower bound of the step for every order on this worker map.

    No worker starts before the first micro-batch arrives at its first stage. There are two bounds for what it does
    then; the larger one counts. It runs all its actions, and the AllReduce after the last one. And it runs all its
    forwards and gradients of inputs; then the last gradients pass through the stages down to stage 0, which still has
    to compute its gradients of weights.
    """
    arrival, way = [0.0], [0.0]  # of the first micro-batch at each stage; of a gradient from each stage to the end
    worker_of = worker_map.worker_of
    for stage, cost in enumerate(costs[:-1]):
        crosses = worker_of[stage] != worker_of[stage + 1]
        arrival.append(arrival[-1] + cost.forward_seconds + crosses * cost.send_forward_seconds)
        inputs = cost.backward_seconds - cost.weights_seconds
        way.append(way[-1] + crosses * cost.send_backward_seconds + inputs)
    ending = costs[0].weights_seconds + costs[0].exposed_seconds
    last = costs[-1]
    found = [arrival[-1] + last.forward_seconds + last.backward_seconds - last.weights_seconds + way[-1] + ending]
    for stages in worker_map.stages_of:
        first = min(stages)
        own = [costs[stage] for stage in stages]
        work = micro_batches * sum(cost.forward_seconds + cost.backward_seconds for cost in own)
        found.append(arrival[first] + work + min(cost.exposed_seconds for cost in own))
        later = micro_batches * sum(cost.weights_seconds for cost in own)
        found.append(arrival[first] + work - later + way[first] + (ending if first else 0.0))
    return max(found)


@dataclass(frozen=True, eq=False)
class _Problem:
    """Costs as arrays of stages, and ``room``: the bytes of each worker's memory that are left for stashes.

    The rest of the memory is for weights, gradients, optimizer slots and the largest working set.
    """

    worker_map: WorkerMap
    times: tuple[Floats, ...]  # those of ``engine.step_seconds``
    stash: Floats
    room: Floats

    @staticmethod
    def of(worker_map: WorkerMap, costs: Sequence[StageCosts], device_memory: float) -> _Problem:
        names = ("forward", "backward", "weights", "send_forward", "send_backward", "exposed")
        times = (np.array([getattr(cost, f"{name}_seconds") for cost in costs], np.float64) for name in names)
        stash = np.array([cost.stash_bytes for cost in costs], np.float64)
        room = [
            usable_bytes(device_memory)
            - sum(costs[stage].fixed_bytes for stage in stages)
            - max(costs[stage].working_bytes for stage in stages)
            for stages in worker_map.stages_of
        ]
        return _Problem(worker_map, tuple(times), stash, np.array(room, np.float64))

    def fastest(self, schedules: Iterator[tuple[str, Schedule]]) -> tuple[str, float, Schedule] | None:
        """Return the name, the seconds and the schedule of the fastest one that fits the memory."""
        best, zeros = None, np.zeros(len(self.stash))  # ``room`` is for the stashes only
        for name, schedule in schedules:
            check_stop()
            order = encode(schedule)
            if (HeldStash.of(order).peaks(zeros, self.stash, zeros) <= self.room).all():
                seconds = step_seconds(order, *self.times)
                if best is None or seconds < best[1]:
                    best = name, seconds, schedule
        return best

    def improve(self, order: Order) -> float:
        """Improve ``order`` in place by local search; return the seconds of its step.

        Single actions move at random within their workers, as long as the step does not get longer. Actions of one
        stage and kind stay in the order of the micro-batches, so that variables are written in this order. Without a
        C++ compiler ``order`` is not changed.
        """
        library = load_library()
        if library is None:
            return step_seconds(order, *self.times)
        moves = min(_MOVES, int(_ACTIONS / order.size))
        improve = library.dapple_improve
        improve.restype = ctypes.c_double
        seconds = improve(
            *(len(order.worker_of), len(order.actions)),
            *(ctypes.c_int64(order.micro_batches), ctypes.c_int64(order.actions.shape[1])),
            *map(address, (order.actions, order.worker_of, *self.times, self.stash, self.room)),
            *(ctypes.c_int64(moves), address(stop_flag())),
        )
        check_stop()
        if seconds < 0:
            raise MemoryError("searching for an order")
        return float(seconds)


def _named_schedules(worker_map: WorkerMap, micro_batches: int, problem: _Problem) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedules that have a name and are for this worker map, with D where the memory needs one."""
    names = []
    if worker_map.has_one_stage_per_worker:
        holds = (problem.room[problem.stash > 0] / problem.stash[problem.stash > 0]).tolist()
        limit = int(min([micro_batches, *holds]))
        limited = (f":D={limit}",) if 1 <= limit < micro_batches else ()
        names += ["gpipe", *(name + option for name in _ONE_STAGE_PER_WORKER for option in ("", *limited))]
    per_worker = max(map(len, worker_map.stages_of))
    for name, policy in CHUNKED.items():
        names.append(f"{name}:{policy.option}={per_worker // policy.unit}" if policy.option else name)
    for name in names:
        with contextlib.suppress(ScheduleError):  # a number of stages that the policy cannot divide
            if ScheduleSpec.parse(name).worker_map(worker_map.stages) == worker_map:
                yield name, ScheduleSpec.parse(name).build(worker_map.stages, micro_batches)


def _list_schedules(worker_map: WorkerMap, micro_batches: int, problem: _Problem) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedules of several rules of list scheduling, with all the memory or one or two times that of 1F1B."""
    fields = (array.tolist() for array in (*problem.times[:-1], problem.stash))
    times = [StageTimes(*of_stage) for of_stage in zip(*fields, strict=True)]
    workers = worker_map.workers
    usual = [sum(times[stage].stash for stage in stages) for stages in worker_map.stages_of]
    for factor, alternate, wait_share in itertools.product((math.inf, 2.0, 1.0), (False, True), (0.0, 0.5, 1.0)):
        held = [min(float(room), factor * workers * own) for room, own in zip(problem.room, usual, strict=True)]
        schedule = list_schedule(worker_map, micro_batches, times, ListRule(True, tuple(held), alternate, wait_share))
        if schedule is not None:
            yield "", schedule
