"""Compiled discrete-event simulation of a schedule: thousands of runs per second for the planner.

``run`` and ``step_seconds`` are compiled versions of ``graph_passes.schedules.schedule.run_schedule``; the tests hold
all three equal. The first keeps the times of all events, the second only the end of the step.

Letters: S stages, M micro-batches. Row s of an array of transfers is the boundary between stages s and s + 1, whose two
directions are two channels; between stages on one worker nothing is sent.
"""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.compiled import Floats, Integers, compiled, inlined
from dapple_tf.simulator.order import (
    BACKWARD,
    FORWARD,
    INPUTS,
    KIND_MASK,
    KIND_SHIFT,
    MICRO_BATCH_MASK,
    NONE,
    STAGE_SHIFT,
    WEIGHTS,
    Order,
)

Run = tuple[Floats, Floats, Floats, Floats, Floats, Floats, Floats, Floats, Floats, Floats, int]

_EITHER = (BACKWARD ^ INPUTS) << KIND_SHIFT  # makes the code of B that of I, which has this bit already


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
            if code == NONE:
                break
            s, kind, m = code >> STAGE_SHIFT, (code >> KIND_SHIFT) & KIND_MASK, code & MICRO_BATCH_MASK
            start = now[w]
            if kind == FORWARD:
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
                        if _waits_for(actions, head, to, code + (1 << STAGE_SHIFT), 0):
                            waiting[count] = to
                            count += 1
            elif kind == WEIGHTS:
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
                end = start + (backward[s] if kind == BACKWARD else backward[s] - weights[s])
                start_b[s, m], end_b[s, m] = start, end
                if s:
                    to = worker_of[s - 1]
                    if to == w:
                        start_send_b[s - 1, m], end_send_b[s - 1, m] = end, end
                    else:
                        begin = max(end, free_b[s - 1])
                        free_b[s - 1] = begin + send_backward[s - 1]
                        start_send_b[s - 1, m], end_send_b[s - 1, m] = begin, free_b[s - 1]
                        if _waits_for(actions, head, to, code - (1 << STAGE_SHIFT), _EITHER):
                            waiting[count] = to
                            count += 1
            now[w] = end
            head[w] += 1
            done += 1
    return start_f, end_f, start_b, end_b, start_w, end_w, start_send_f, end_send_f, start_send_b, end_send_b, done


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
            if code == NONE:
                break
            s, kind, m = code >> STAGE_SHIFT, (code >> KIND_SHIFT) & KIND_MASK, code & MICRO_BATCH_MASK
            if kind == FORWARD:
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
                        if _waits_for(actions, head, to, code + (1 << STAGE_SHIFT), 0):
                            waiting[count] = to
                            count += 1
                else:
                    arrival_b[s, m] = now[w]
            elif kind == WEIGHTS:
                if arrival_b[s, m] != ended:
                    break
                now[w] += weights[s]
                last[s] = now[w]
            else:
                if arrival_b[s, m] == np.inf:
                    break
                seconds = backward[s] if kind == BACKWARD else backward[s] - weights[s]
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
                        if _waits_for(actions, head, to, code - (1 << STAGE_SHIFT), _EITHER):
                            waiting[count] = to
                            count += 1
            head[w] += 1
    for w in range(workers):
        if head[w] < length and actions[w, head[w]] != NONE:
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
