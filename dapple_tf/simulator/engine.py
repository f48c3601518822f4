"""Compiled discrete-event simulation of a schedule: thousands of runs per second for the planner.

``run`` and ``step_seconds`` are the compiled twins of ``graph_passes.schedules.schedule.run_schedule``; the tests hold
all three equal. The first keeps the times of all events, the second only the end of the step.

Letters: S stages, M micro-batches. Row s of an array of transfers is the boundary between stages s and s + 1, whose two
directions are two channels; between stages on one worker nothing is sent.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.simulator.compiled import Floats, Integers, compiled, inlined
from graph_passes.schedules.schedule import Action, Kind, Schedule

Run = tuple[Floats, Floats, Floats, Floats, Floats, Floats, Floats, Floats, Floats, Floats, int]

# An action in an int64: the stage from bit 34 on, the kind in bits 32 and 33, the micro-batch below.
_FORWARD, _BACKWARD, _WEIGHTS, _INPUTS = 0, 1, 2, 3
_KINDS: tuple[Kind, ...] = ("F", "B", "W", "I")
_KIND_SHIFT, _STAGE_SHIFT = 32, 34
_MICRO_BATCH_MASK, _KIND_MASK = (1 << _KIND_SHIFT) - 1, 3
_EITHER = (_BACKWARD ^ _INPUTS) << _KIND_SHIFT  # makes the code of B that of I, which has this bit already
_NONE = -1  # behind the last action of a worker that has fewer than others


class Order(NamedTuple):
    """A schedule as arrays: the ``actions`` of each worker (see ``encode``), and the worker of each stage."""

    actions: NDArray[np.int64]
    worker_of: NDArray[np.int64]
    micro_batches: int

    @property
    def size(self) -> int:
        """The number of actions."""
        return int(np.count_nonzero(self.actions != _NONE))


def encode(schedule: Schedule) -> Order:
    """Return the order of a schedule."""
    rows = [[_code(a.stage, _KINDS.index(a.kind), a.micro_batch) for a in actions] for actions in schedule.workers]
    longest = max(map(len, rows))
    actions = np.array([row + [_NONE] * (longest - len(row)) for row in rows], np.int64)
    return Order(actions, np.array(schedule.worker_map.worker_of, np.int64), schedule.micro_batches)


def _code(stage: int, kind: int, micro_batch: int) -> int:
    return (stage << _STAGE_SHIFT) | (kind << _KIND_SHIFT) | micro_batch


def has_weights(order: Order) -> bool:
    """Return whether weight gradients are actions of their own in an order."""
    kinds = (order.actions >> _KIND_SHIFT) & _KIND_MASK
    return bool(np.any((kinds == _WEIGHTS) & (order.actions != _NONE)))


def decode(code: int) -> Action:
    """Return the action that an entry of ``Order.actions`` stands for."""
    return Action(code >> _STAGE_SHIFT, _KINDS[(code >> _KIND_SHIFT) & _KIND_MASK], code & _MICRO_BATCH_MASK)


def decode_order(order: Order) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each worker."""
    return tuple(
        tuple(decode(code) for code in itertools.takewhile(lambda code: code != _NONE, row))
        for row in order.actions.tolist()
    )


@compiled
def early_backward_order(warm_up: Integers, micro_batches: int) -> Order:
    """Return the order of ``graph_passes.schedules.policies.early_backward`` (DAPPLE, section III.B), without checks.

    A Numba version of that function; test_engine.py asserts that both return the same order.
    K_i forwards (``warm_up``, each between 1 and M), then alternately one backward and one forward, then the remaining
    backwards.
    """
    stages = warm_up.shape[0]
    actions = np.empty((stages, 2 * micro_batches), np.int64)
    for s in range(stages):
        k, forward = warm_up[s], s << _STAGE_SHIFT
        backward = forward | (_BACKWARD << _KIND_SHIFT)
        for m in range(k):
            actions[s, m] = forward | m
        place = k
        for m in range(micro_batches):
            actions[s, place] = backward | m
            place += 1
            if k + m < micro_batches:
                actions[s, place] = forward | (k + m)
                place += 1
    return Order(actions, np.arange(stages), micro_batches)


@compiled
def interleaved_order(workers: int, chunks: int, micro_batches: int) -> Order:
    """Return the order of ``graph_passes.schedules.interleaved.interleaved_1f1b``, without checks.

    A Numba version of that function; test_engine.py asserts that both return the same order.
    """
    count = max(1, micro_batches // workers)
    calls = chunks * micro_batches
    forwards, backwards = np.empty(calls, np.int64), np.empty(calls, np.int64)  # of worker 0
    place, largest = 0, 0
    for group in range(count):
        begin, end = micro_batches * group // count, micro_batches * (group + 1) // count
        largest = max(largest, end - begin)
        for chunk in range(chunks):
            for m in range(begin, end):
                forwards[place] = ((chunk * workers) << _STAGE_SHIFT) | m
                last = ((chunks - 1 - chunk) * workers) << _STAGE_SHIFT
                backwards[place] = last | (_BACKWARD << _KIND_SHIFT) | m
                place += 1
    actions = np.empty((workers, 2 * calls), np.int64)
    for w in range(workers):
        ahead = min(2 * (workers - w - 1) + (chunks - 1) * largest + 1, calls)
        own = w << _STAGE_SHIFT
        for i in range(ahead):
            actions[w, i] = forwards[i] + own
        place = ahead
        for i in range(calls):
            actions[w, place] = backwards[i] + own
            place += 1
            if ahead + i < calls:
                actions[w, place] = forwards[ahead + i] + own
                place += 1
    return Order(actions, np.arange(workers * chunks) % workers, micro_batches)


@compiled
def most_held(order: Order, stash: Floats, group: Integers) -> Floats:
    """Return the most that each group of stages holds at once of ``stash``, each stage's share of a micro-batch.

    A stage holds it from its first action on a micro-batch, the forward, to its last. ``group``: of each stage, from 0;
    the stages of a group are on one worker.
    """
    actions, stages = order.actions, len(group)
    left = np.zeros((stages, order.micro_batches), np.int64)  # actions that have not run
    for code in actions.flat:
        if code != _NONE:
            left[code >> _STAGE_SHIFT, code & _MICRO_BATCH_MASK] += 1
    begun = np.zeros((stages, order.micro_batches), np.bool_)
    held = np.zeros(stages, np.int64)
    groups = group.max() + 1
    members = np.argsort(group)
    bounds = np.searchsorted(group[members], np.arange(groups + 1))
    most = np.zeros(groups)
    for w in range(actions.shape[0]):
        for code in actions[w]:
            if code == _NONE:
                break
            s, m = code >> _STAGE_SHIFT, code & _MICRO_BATCH_MASK
            if not begun[s, m]:
                begun[s, m] = True
                held[s] += 1
                total, g = 0.0, group[s]
                for i in range(bounds[g], bounds[g + 1]):
                    total += held[members[i]] * stash[members[i]]
                most[g] = max(most[g], total)
            left[s, m] -= 1
            if left[s, m] == 0:
                held[s] -= 1
    return most


@compiled
def worker_peaks(order: Order, fixed: Floats, stash: Floats, working: Floats) -> Floats:
    """Return the most bytes that a device of each worker holds.

    That is the ``fixed`` bytes of its stages, the largest ``working`` bytes of one of them, and the most ``stash``
    bytes in flight. The arguments are bytes of each stage, on one device.
    """
    peaks = most_held(order, stash, order.worker_of)
    largest = np.zeros(len(peaks))
    for s in range(len(fixed)):
        w = order.worker_of[s]
        peaks[w] += fixed[s]
        largest[w] = max(largest[w], working[s])
    return peaks + largest


@inlined
def _all_workers(workers: int, stages: int) -> Integers:
    """Return the stack of workers that may run an action, the first on top.

    A worker is pushed again only by an event that its next action waits for, of which there are two for each stage.
    """
    stack = np.empty(workers + 2 * stages, np.int64)
    for w in range(workers):
        stack[w] = workers - 1 - w
    return stack


@inlined
def _waits_for(actions: Integers, head: Integers, worker: int, code: int, ignored: int) -> bool:
    """Return whether ``code`` is the next action of ``worker``, but for the bits ``ignored`` (of B and I).

    ``head``: see ``run``.
    """
    return bool(head[worker] < actions.shape[1] and actions[worker, head[worker]] | ignored == code | ignored)


@compiled
def run(
    order: Order, forward: Floats, backward: Floats, weights: Floats, send_forward: Floats, send_backward: Floats
) -> Run:
    """Return starts and ends of forwards, backwards, weight gradients, transfers forward and backward [S, M], seconds.

    ``forward`` to ``send_backward``: seconds of each stage (the last entry of a transfer is not read); ``backward`` is
    the whole, of which ``weights`` is the part of weight gradients. That has size 0 where the order has no such
    actions, as have their starts and ends. Backwards are B, or I where that is an action of its own. A worker runs its
    actions strictly in order. A forward waits for its transfer from the previous stage, a backward for its transfer
    from the next stage. A transfer starts when its producer has ended and its channel is free, first in first out; it
    occupies no device. On one worker it takes no time and no channel. The times of what never ran are NaN (also the
    last row of transfers). The last result is the number of actions that ran: if it is less than the order has, the
    order deadlocks.
    """
    actions, worker_of, micro_batches = order.actions, order.worker_of, order.micro_batches
    (workers, length), stages = actions.shape, len(worker_of)
    start_f = np.full((stages, micro_batches), np.nan)
    end_f = np.full((stages, micro_batches), np.nan)
    start_b = np.full((stages, micro_batches), np.nan)
    end_b = np.full((stages, micro_batches), np.nan)
    start_w = np.full((len(weights), micro_batches), np.nan)
    end_w = np.full((len(weights), micro_batches), np.nan)
    start_send_f = np.full((stages, micro_batches), np.nan)
    end_send_f = np.full((stages, micro_batches), np.nan)
    start_send_b = np.full((stages, micro_batches), np.nan)
    end_send_b = np.full((stages, micro_batches), np.nan)
    head = np.zeros(workers, np.int64)  # index in the order of each worker's next action
    now = np.zeros(workers)  # end of its last action
    free_f = np.zeros(stages)  # when the channel to the next stage is free
    free_b = np.zeros(stages)  # when the channel from the next stage is free
    waiting = _all_workers(workers, stages)
    count, done = workers, 0
    while count:
        count -= 1
        w = int(waiting[count])
        while head[w] < length:
            code = actions[w, head[w]]
            if code == _NONE:
                break
            s, kind, m = code >> _STAGE_SHIFT, (code >> _KIND_SHIFT) & _KIND_MASK, code & _MICRO_BATCH_MASK
            start = now[w]
            if kind == _FORWARD:
                if s:
                    arrival = end_send_f[s - 1, m]
                    if np.isnan(arrival):
                        break
                    start = max(start, arrival)
                end = start + forward[s]
                start_f[s, m], end_f[s, m] = start, end
                if s + 1 < stages:
                    to = worker_of[s + 1]
                    if to == w:
                        start_send_f[s, m], end_send_f[s, m] = end, end
                    else:
                        begin = max(end, free_f[s])
                        free_f[s] = begin + send_forward[s]
                        start_send_f[s, m], end_send_f[s, m] = begin, free_f[s]
                        if _waits_for(actions, head, to, code + (1 << _STAGE_SHIFT), 0):
                            waiting[count] = to
                            count += 1
            elif kind == _WEIGHTS:
                if np.isnan(end_b[s, m]):
                    break
                end = start + weights[s]
                start_w[s, m], end_w[s, m] = start, end
            else:
                if np.isnan(end_f[s, m]):
                    break
                if s + 1 < stages:
                    arrival = end_send_b[s, m]
                    if np.isnan(arrival):
                        break
                    start = max(start, arrival)
                end = start + (backward[s] if kind == _BACKWARD else backward[s] - weights[s])
                start_b[s, m], end_b[s, m] = start, end
                if s:
                    to = worker_of[s - 1]
                    if to == w:
                        start_send_b[s - 1, m], end_send_b[s - 1, m] = end, end
                    else:
                        begin = max(end, free_b[s - 1])
                        free_b[s - 1] = begin + send_backward[s - 1]
                        start_send_b[s - 1, m], end_send_b[s - 1, m] = begin, free_b[s - 1]
                        if _waits_for(actions, head, to, code - (1 << _STAGE_SHIFT), _EITHER):
                            waiting[count] = to
                            count += 1
            now[w] = end
            head[w] += 1
            done += 1
    return start_f, end_f, start_b, end_b, start_w, end_w, start_send_f, end_send_f, start_send_b, end_send_b, done


@compiled
def _row_peak(row: Integers, stash: Floats) -> float:
    """Return the most stash that one worker holds at once."""
    held = peak = 0.0
    for code in row:
        if code == _NONE:
            break
        kind = (code >> _KIND_SHIFT) & _KIND_MASK
        if kind == _FORWARD:
            held += stash[code >> _STAGE_SHIFT]
            peak = max(peak, held)
        elif kind != _INPUTS:
            held -= stash[code >> _STAGE_SHIFT]
    return peak


@compiled
def move_actions(
    order: Order,
    forward: Floats,
    backward: Floats,
    weights: Floats,
    send_forward: Floats,
    send_backward: Floats,
    exposed: Floats,
    stash: Floats,
    most: Floats,
    moves: int,
) -> float:
    """Move single actions within their workers, at random, while the step gets no longer; return its seconds.

    The actions of a stage and kind stay in micro-batch order: micro-batches are alike, and variables that calls write
    are then written in the order of the samples. ``order`` is written to. ``stash``: of a micro-batch on each stage;
    ``most``: of each worker. The other arguments are as in ``step_seconds``. Tries ``moves`` moves; the same arguments
    give the same result.
    """
    np.random.seed(0)
    actions = order.actions
    workers = actions.shape[0]
    lengths = np.array([np.sum(actions[w] != _NONE) for w in range(workers)])
    best = step_seconds(order, forward, backward, weights, send_forward, send_backward, exposed)
    for _ in range(moves):
        w = np.random.randint(workers)
        row, source = actions[w], np.random.randint(lengths[w])
        distance = 1 + int(np.random.exponential(4.0))
        target = source + (distance if np.random.random() < 0.5 else -distance)
        if target < 0 or target >= lengths[w] or _passes_another(row, source, target):
            continue
        _shift(row, source, target)
        seconds = np.inf
        if _row_peak(row, stash) <= most[w]:
            seconds = step_seconds(order, forward, backward, weights, send_forward, send_backward, exposed)
        if seconds <= best:
            best = seconds
        else:
            _shift(row, target, source)
    return best


@compiled
def _passes_another(row: Integers, source: int, target: int) -> bool:
    """Return whether the entry at ``source`` would pass one of the same stage and kind on its way to ``target``."""
    for place in range(min(source, target), max(source, target) + 1):
        if place != source and row[place] >> _KIND_SHIFT == row[source] >> _KIND_SHIFT:
            return True
    return False


@compiled
def _shift(row: Integers, source: int, target: int) -> None:
    """Move the entry at ``source`` to ``target``."""
    moved, step = row[source], 1 if target > source else -1
    for place in range(source, target, step):
        row[place] = row[place + step]
    row[target] = moved


@compiled
def step_seconds(
    order: Order,
    forward: Floats,
    backward: Floats,
    weights: Floats,
    send_forward: Floats,
    send_backward: Floats,
    exposed: Floats,
) -> float:
    """Return the end of the step: of each stage the last action and ``exposed`` seconds of AllReduce, the latest one.

    The AllReduces of one worker's stages run one after the other.

    The arguments are as in ``run``. Infinite for an order that deadlocks.
    """
    actions, worker_of, micro_batches = order.actions, order.worker_of, order.micro_batches
    (workers, length), stages = actions.shape, len(worker_of)
    arrival_f = np.full((stages, micro_batches), np.inf)
    arrival_b = np.full((stages, micro_batches), np.inf)
    arrival_f[0] = 0.0  # at the last stage, a backward's input arrives when its forward ends
    ended = -1.0  # replaces the arrival of a backward that has run
    head = np.zeros(workers, np.int64)
    now = np.zeros(workers)
    last = np.zeros(stages)
    free_f = np.zeros(stages)
    free_b = np.zeros(stages)
    waiting = _all_workers(workers, stages)
    count = workers
    while count:
        count -= 1
        w = int(waiting[count])
        while head[w] < length:
            code = actions[w, head[w]]
            if code == _NONE:
                break
            s, kind, m = code >> _STAGE_SHIFT, (code >> _KIND_SHIFT) & _KIND_MASK, code & _MICRO_BATCH_MASK
            if kind == _FORWARD:
                if arrival_f[s, m] == np.inf:
                    break
                now[w] = max(now[w], arrival_f[s, m]) + forward[s]
                if s + 1 < stages:
                    to = worker_of[s + 1]
                    if to == w:
                        arrival_f[s + 1, m] = now[w]
                    else:
                        free_f[s] = max(now[w], free_f[s]) + send_forward[s]
                        arrival_f[s + 1, m] = free_f[s]
                        if _waits_for(actions, head, to, code + (1 << _STAGE_SHIFT), 0):
                            waiting[count] = to
                            count += 1
                else:
                    arrival_b[s, m] = now[w]
            elif kind == _WEIGHTS:
                if arrival_b[s, m] != ended:
                    break
                now[w] += weights[s]
                last[s] = now[w]
            else:
                if arrival_b[s, m] == np.inf:
                    break
                seconds = backward[s] if kind == _BACKWARD else backward[s] - weights[s]
                now[w] = max(now[w], arrival_b[s, m]) + seconds
                last[s] = now[w]
                arrival_b[s, m] = ended
                if s:
                    to = worker_of[s - 1]
                    if to == w:
                        arrival_b[s - 1, m] = now[w]
                    else:
                        free_b[s - 1] = max(now[w], free_b[s - 1]) + send_backward[s - 1]
                        arrival_b[s - 1, m] = free_b[s - 1]
                        if _waits_for(actions, head, to, code - (1 << _STAGE_SHIFT), _EITHER):
                            waiting[count] = to
                            count += 1
            head[w] += 1
    for w in range(workers):
        if head[w] < length and actions[w, head[w]] != _NONE:
            return np.inf
    if workers < stages:  # AllReduces of one worker run one after the other
        now[:] = 0.0
        for s in np.argsort(last):
            w = worker_of[s]
            now[w] = max(last[s], now[w]) + exposed[s]
        return float(now.max())
    end = 0.0
    for s in range(stages):
        end = max(end, last[s] + exposed[s])
    return end
