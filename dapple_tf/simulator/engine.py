"""Discrete-event execution of a schedule under the costs of its stages (DAPPLE, section III.B, for any schedule).

A worker runs its actions strictly in order. A forward waits for its transfer from the previous stage, a backward for
its transfer from the next stage. A transfer starts when its producer has ended and its channel (one boundary in one
direction) is free, first in first out; it occupies no device, and between stages on one worker it takes no time.
Results that leave together are one transfer, with the sums of their latencies and of their seconds. The AllReduces of
one worker's stages run one at a time, in the order in which the stages' gradients are complete. What shares network
interfaces moves by the rule of the module ``contention``.

Actions need no events: once the ends of its inputs are known, an action's start and end are computed at once. The only
events are those of flows that share an interface: the end of a flow's latency, and of its transfer, in order of time.

``run`` executes in C++ (``native/engine.h``) where that library is there, else in Python; the tests hold both equal.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.contention import Flows
from dapple_tf.simulator.native.library import address, load_library
from dapple_tf.simulator.order import (
    BACKWARD,
    FORWARD,
    KIND_MASK,
    KIND_SHIFT,
    MICRO_BATCH_MASK,
    NONE,
    STAGE_SHIFT,
    WEIGHTS,
    Order,
)
from dapple_tf.simulator.shared_flows import FlowDemand, SharedFlows, demands_of
from dapple_tf.timeline.stage_costs import StageCosts

_ALMOST = 1 - 1e-9  # allows for rounding: the seconds left are a sum from which others were taken


class Seconds(NamedTuple):
    """Seconds of each stage and micro-batch: arrays [S, M], or [S, 1] where micro-batches are alike.

    ``backward`` is the whole backward. ``weights`` is its part for weight gradients, or 0 if these are not actions of
    their own. Row s of a transfer is the boundary between the stages s and s + 1; the last row is not read.
    ``forward_together`` and ``backward_together``: whether the result of an action is sent together with the result of
    the next micro-batch.
    """

    forward: Floats
    backward: Floats
    weights: Floats
    send_forward: Floats
    send_backward: Floats
    forward_together: NDArray[np.bool_]
    backward_together: NDArray[np.bool_]


class Times(NamedTuple):
    """Starts and ends of forwards, backwards, weight gradients and transfers in both directions: [S, M], seconds.

    Backwards are B, or I where that is an action of its own. What never ran is NaN, also the last row of transfers.
    """

    start_forward: Floats
    end_forward: Floats
    start_backward: Floats
    end_backward: Floats
    start_weights: Floats
    end_weights: Floats
    start_send_forward: Floats
    end_send_forward: Floats
    start_send_backward: Floats
    end_send_backward: Floats


class Run(NamedTuple):
    """A step: its end and that of each stage's AllReduce [S] (seconds), the number of actions that ran, and all times.

    ``seconds`` is infinite for an order that deadlocks, and where the step would not end before the ceiling.
    """

    seconds: float
    rings_end: Floats
    done: int
    times: Times


def uniform_seconds(
    forward: Floats, backward: Floats, weights: Floats, send_forward: Floats, send_backward: Floats
) -> Seconds:
    """Return the seconds of equal micro-batches, each of whose results is a transfer of its own.

    The arguments have an entry for each stage. ``weights`` may be of size 0.
    """
    own_weights = weights if len(weights) else np.zeros(len(forward))
    columns = (forward, backward, own_weights, send_forward, send_backward)
    f, b, w, there, back = (column.reshape(-1, 1) for column in columns)
    alone = np.zeros((len(forward), 1), np.bool_)
    return Seconds(f, b, w, there, back, alone, alone)


def step_seconds(
    order: Order,
    forward: Floats,
    backward: Floats,
    weights: Floats,
    send_forward: Floats,
    send_backward: Floats,
    exposed: Floats,
) -> float:
    """Return the end of a step without contention, in which each stage has one AllReduce of ``exposed`` seconds.

    The other arguments are those of ``uniform_seconds``.
    """
    seconds = uniform_seconds(forward, backward, weights, send_forward, send_backward)
    return run(order, seconds, whole_rings(exposed)).seconds


def run(order: Order, seconds: Seconds, rings: Rings, flows: Flows | None = None, ceiling: float = math.inf) -> Run:
    """Execute ``order``. ``flows``: what shares network interfaces; None for nothing.

    ``ceiling``: seconds; the execution stops once it is known that the step is no shorter. That is when the end of a
    worker's action, plus the seconds of its remaining actions and of the least AllReduce of its stages, reaches it.
    """
    library = load_library()
    if library is None:
        return run_in_python(order, seconds, rings, flows, ceiling)
    stages, micro_batches = len(order.worker_of), order.micro_batches
    times, ends, done = np.full((10, stages, micro_batches), np.nan), np.zeros(stages), np.zeros(1, np.int64)
    kept = []  # arrays must live until the call has returned

    def array(values: NDArray[np.generic], dtype: type[np.generic]) -> ctypes.c_void_p:
        kept.append(np.ascontiguousarray(values, dtype))
        return address(kept[-1])

    used = flows if flows is not None and flows.directions else None
    execute = library.dapple_run
    execute.restype = ctypes.c_double
    end = execute(
        *(stages, len(order.actions), ctypes.c_int64(micro_batches), ctypes.c_int64(order.actions.shape[1])),
        *(array(order.actions, np.int64), array(order.worker_of, np.int64), ctypes.c_int64(seconds.forward.shape[1])),
        *(array(each, np.float64) for each in seconds[:5]),
        *(array(each, np.uint8) for each in seconds[5:]),
        *(array(rings.first, np.int64), array(rings.before, np.float64)),
        *(array(rings.seconds, np.float64), array(rings.exposed, np.float64)),
        used.directions if used else 0,
        *((array(used.first, np.int64), array(used.direction, np.int64)) if used else (None, None)),
        *((array(used.demand, np.float64), array(used.latency, np.float64)) if used else (None, None)),
        *((array(used.near_first, np.int64), array(used.near, np.int64)) if used else (None, None)),
        ctypes.c_double(ceiling),
        *map(address, (times, ends, done)),
    )
    if end < 0:
        raise MemoryError("executing the schedule")
    return Run(end, ends, int(done[0]), Times(*times))


def run_in_python(
    order: Order, seconds: Seconds, rings: Rings, flows: Flows | None = None, ceiling: float = math.inf
) -> Run:
    """Execute ``order`` as ``run`` does."""
    return _Engine(order, seconds, rings, flows).execute(ceiling)


class _Channel:
    """A boundary in one direction, or the AllReduces of a worker: one flow at a time, first in, first out."""

    def __init__(self, events: SharedFlows) -> None:
        self._events, self._free, self._busy = events, 0.0, False
        self._queue = deque[tuple[float, float, FlowDemand, Callable[[float, float], None], int]]()

    def add(
        self, ready: float, seconds: float, demand: FlowDemand, done: Callable[[float, float], None], rank: int
    ) -> None:
        """Queue a flow that may start at ``ready``; call ``done`` with its start and end. See ``SharedFlows.start``."""
        self._queue.append((ready, seconds, demand, done, rank))
        if not self._busy:
            self._begin()

    def _begin(self) -> None:
        ready, seconds, demand, done, rank = self._queue.popleft()
        begin = max(ready, self._free)

        def end(time: float) -> None:
            self._busy, self._free = False, time
            done(begin, time)
            if self._queue:
                self._begin()

        self._busy = True
        self._events.start(begin, seconds, demand, end, rank)


class _Engine:
    """The state of a step that is being executed."""

    def __init__(self, order: Order, seconds: Seconds, rings: Rings, flows: Flows | None) -> None:
        self.seconds, self.rings = seconds, rings
        workers, self.stages, self.columns = len(order.actions), len(order.worker_of), seconds.forward.shape[1]
        self.rows = [[code for code in row if code != NONE] for row in order.actions.tolist()]
        self.worker_of = order.worker_of.tolist()
        self.times = np.full((10, self.stages, order.micro_batches), np.nan)
        self.events, self.shared = SharedFlows(), demands_of(flows)
        self.channels = [[_Channel(self.events) for _ in range(self.stages)] for _ in range(2)]
        self.rings_of = [_Channel(self.events) for _ in range(workers)]
        self.turned = [False] * order.micro_batches  # whether the last stage's forward has ended
        self.head, self.now = [0] * workers, [0.0] * workers
        self.unsent, self.unsent_seconds = [0] * workers, [0.0] * workers
        self.rings_end = np.full(self.stages, np.nan)
        self.missing = [0] * self.stages
        self.left = [math.inf] * workers  # seconds that a worker still needs: its actions and the least AllReduce
        for s, w in enumerate(self.worker_of):
            self.left[w] = min(self.left[w], float(rings.exposed[s]))
        for w, row in enumerate(self.rows):
            for code in row:
                self.left[w] += self._action_seconds(code)
                self.missing[code >> STAGE_SHIFT] += (code >> KIND_SHIFT) & KIND_MASK != FORWARD
        self.waiting = list(range(workers))[::-1]

    def execute(self, ceiling: float) -> Run:
        """Run all actions, unless the step is found to be no shorter than ``ceiling``."""
        while True:
            while self.waiting:
                w = self.waiting.pop()
                while self.head[w] < len(self.rows[w]) and self._advance(w):
                    if self.now[w] + self.left[w] * _ALMOST >= ceiling:
                        return self._result(math.inf)
            if not self.events.run_next():
                break
        return self._result(math.inf if np.isnan(self.rings_end).any() else float(self.rings_end.max()))

    def _result(self, seconds: float) -> Run:
        return Run(seconds, self.rings_end, sum(self.head), Times(*self.times))

    def _action_seconds(self, code: int) -> float:
        s, kind = code >> STAGE_SHIFT, (code >> KIND_SHIFT) & KIND_MASK
        column = code & MICRO_BATCH_MASK if self.columns > 1 else 0
        if kind == FORWARD:
            return float(self.seconds.forward[s, column])
        weights = float(self.seconds.weights[s, column])
        if kind == WEIGHTS:
            return weights
        return float(self.seconds.backward[s, column]) - (0.0 if kind == BACKWARD else weights)

    def _advance(self, w: int) -> bool:
        """Run the next action of a worker if its inputs are there; return whether they were."""
        code = self.rows[w][self.head[w]]
        s, kind, m = code >> STAGE_SHIFT, (code >> KIND_SHIFT) & KIND_MASK, code & MICRO_BATCH_MASK
        arrival, target = self.now[w], -1
        if kind == FORWARD:
            if s:
                arrival = self.times[7, s - 1, m]
            target = s + 1 if s + 1 < self.stages else -1
        elif kind == WEIGHTS:
            arrival = self.times[3, s, m]
        else:
            if s + 1 < self.stages:
                arrival = self.times[9, s, m]  # gradients arrive only after this stage's forward
            elif not self.turned[m]:
                return False
            target = s - 1
        if math.isnan(arrival):
            return False
        own, start = self._action_seconds(code), max(self.now[w], float(arrival))
        end = start + own
        which = {FORWARD: 0, WEIGHTS: 4}.get(kind, 2)
        self.times[which, s, m], self.times[which + 1, s, m] = start, end
        if kind == FORWARD and s + 1 == self.stages:
            self.turned[m] = True
        self.now[w] = end
        self.head[w] += 1
        self.left[w] -= own
        if target >= 0:
            self._send(w, s, target, m, end)
        if kind != FORWARD:
            self.missing[s] -= 1
            if self.missing[s] == 0:
                self._all_reduce(w, s, start, end)
        return True

    def _send(self, w: int, s: int, target: int, m: int, end: float) -> None:
        """Send the result of an action of stage ``s`` to the stage ``target``."""
        way, boundary, column = int(target < s), min(s, target), m if self.columns > 1 else 0
        if self.worker_of[target] == w:
            self._arrive(way, boundary, range(m, m + 1), end, end)
            return
        self.unsent[w] += 1
        taken = self.seconds.send_backward if way else self.seconds.send_forward
        self.unsent_seconds[w] += float(taken[boundary, column])
        together = self.seconds.backward_together if way else self.seconds.forward_together
        if together[s, column]:
            return
        micro_batches, seconds = range(m - self.unsent[w] + 1, m + 1), self.unsent_seconds[w]
        self.unsent[w], self.unsent_seconds[w] = 0, 0.0
        flow = way * self.stages + boundary
        demand = self.shared.get(flow, FlowDemand())

        def arrive(begin: float, time: float) -> None:
            self._arrive(way, boundary, micro_batches, begin, time)
            self.waiting.append(self.worker_of[target])

        demand = FlowDemand(demand.latency * len(micro_batches), demand.of)
        self.channels[way][boundary].add(end, seconds, demand, arrive, flow)

    def _arrive(self, way: int, boundary: int, micro_batches: range, begin: float, end: float) -> None:
        for m in micro_batches:
            self.times[6 + 2 * way, boundary, m], self.times[7 + 2 * way, boundary, m] = begin, end

    def _all_reduce(self, w: int, s: int, start: float, end: float) -> None:
        """Queue the rings of a stage whose last gradients were computed from ``start`` to ``end``."""
        flow = 2 * self.stages + s
        demand = self.shared.get(flow, FlowDemand())

        def done(_: float, time: float) -> None:
            self.rings_end[s] = max(time, end)

        for r in range(self.rings.first[s], self.rings.first[s + 1]):
            ready = max(start, end - float(self.rings.before[r]))
            self.rings_of[w].add(ready, float(self.rings.seconds[r]), demand, done, flow)


class Rings(NamedTuple):
    """The rings of each stage, one after the other: for stage s ``first[s]`` to ``first[s + 1]``, at least one.

    ``before``: seconds from the end of a ring's own gradients to the end of the stage's last ones, 0 without overlap.
    ``seconds``: those of a ring without other flows, latency included. ``exposed`` [S]: as in ``StageCosts``.
    """

    first: Integers
    before: Floats
    seconds: Floats
    exposed: Floats


def make_rings(costs: Sequence[StageCosts]) -> Rings:
    """Return the rings of stages with these costs: with overlap one for each layer, else one for each stage."""
    rings = [cost.rings or ((0.0, cost.exposed_seconds),) for cost in costs]
    before, seconds = np.array([pair for of_stage in rings for pair in of_stage], np.float64).T.copy()
    first = np.cumsum([0, *map(len, rings)])
    return Rings(first, before, seconds, np.array([cost.exposed_seconds for cost in costs], np.float64))


def whole_rings(exposed: Floats) -> Rings:
    """Return one ring for each stage, which starts after the last gradients."""
    return Rings(np.arange(len(exposed) + 1), np.zeros(len(exposed)), exposed, exposed)
