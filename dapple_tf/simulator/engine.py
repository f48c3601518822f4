"""Compiled discrete-event simulation of a schedule: thousands of runs per second for the planner.

``run`` and ``step_seconds`` are the compiled twins of ``graph_passes.schedules.schedule.run_schedule``; the tests hold
all three equal. The first keeps the times of all events, the second only the end of the step.

Letters: S stages, M micro-batches. An *order* is an array int32 [S, 2M] with the actions of each stage in the order in
which its devices run them: entry m is the forward of micro-batch m, -1 - m its backward. Where weight gradients are
actions of their own it is [S, 3M], and -1 - M - m is the one of micro-batch m. Row s of an array of transfers is the
boundary between stages s and s + 1, whose two directions are two channels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dapple_tf.simulator.compiled import Floats, Integers, compiled, inlined
from graph_passes.schedules.schedule import Action, Schedule

Order = NDArray[np.int32]
Run = tuple[Floats, Floats, Floats, Floats, Floats, Floats, Floats, Floats, Floats, Floats, int]


def encode(schedule: Schedule) -> Order:
    """Return the order of a schedule."""
    sign, first = {"F": 1, "B": -1, "W": -1}, {"F": 0, "B": -1, "W": -1 - schedule.micro_batches}
    return np.array(
        [[first[a.kind] + sign[a.kind] * a.micro_batch for a in actions] for actions in schedule.stages], dtype=np.int32
    )


def has_weights(order: Order) -> bool:
    """Return whether weight gradients are actions of their own in an order: only their entries are below -M."""
    return bool(-order.min() > order.shape[1] // 2)


def decode(action: int, stage: int, micro_batches: int) -> Action:
    """Return the action of ``stage`` that an entry of an order stands for."""
    if action >= 0:
        return Action(stage, "F", action)
    m = -1 - action
    return Action(stage, "B", m) if m < micro_batches else Action(stage, "W", m - micro_batches)


@compiled
def early_backward_order(warm_up: Integers, micro_batches: int) -> Order:
    """Return the order of ``graph_passes.schedules.policies.early_backward`` (DAPPLE, section III.B), without checks.

    A Numba version of that function; test_engine.py asserts that both return the same order.
    K_i forwards (``warm_up``, each between 1 and M), then alternately one backward and one forward, then the remaining
    backwards.
    """
    stages = warm_up.shape[0]
    order = np.empty((stages, 2 * micro_batches), np.int32)
    for s in range(stages):
        k = warm_up[s]
        for m in range(k):
            order[s, m] = m
        place = k
        for m in range(micro_batches):
            order[s, place] = -1 - m
            place += 1
            if k + m < micro_batches:
                order[s, place] = k + m
                place += 1
    return order


@inlined
def _all_stages(stages: int) -> Integers:
    """Return the stack of stages that may run an action, the first stage on top.

    A stage is pushed again only by the one event that it waits for, so it has room for every stage twice.
    """
    stack = np.empty(2 * stages, np.int64)
    for s in range(stages):
        stack[s] = stages - 1 - s
    return stack


@inlined
def _waits_for(order: Order, head: Integers, stage: int, action: int) -> bool:
    """Return whether ``action`` (an entry of ``order``) is the next one of ``stage``; ``head``: see ``run``."""
    return bool(head[stage] < order.shape[1] and order[stage, head[stage]] == action)


@compiled
def run(
    order: Order, forward: Floats, backward: Floats, weights: Floats, send_forward: Floats, send_backward: Floats
) -> Run:
    """Return starts and ends of forwards, backwards, weight gradients, transfers forward and backward [S, M], seconds.

    ``forward`` to ``send_backward``: seconds of each stage (the last entry of a transfer is not read); ``weights`` has
    size 0 where the order has no such actions, as have their starts and ends. A stage runs its actions strictly in
    order. A forward waits for its transfer from the previous stage, a backward for its transfer from the next stage. A
    transfer starts when its producer has ended and its channel is free, first in first out; it occupies no device. The
    times of what never ran are NaN (also the last row of transfers). The last result is the number of actions that
    ran: if it is less than the order has, the order deadlocks.
    """
    stages, length = order.shape
    micro_batches = length // 3 if len(weights) else length // 2
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
    head = np.zeros(stages, np.int64)  # index in the order of each stage's next action
    now = np.zeros(stages)  # end of its last action
    free_f = np.zeros(stages)  # when the channel to the next stage is free
    free_b = np.zeros(stages)  # when the channel from the next stage is free
    waiting = _all_stages(stages)
    count, done = stages, 0
    while count:
        count -= 1
        s = int(waiting[count])
        while head[s] < length:
            action = int(order[s, head[s]])
            start = now[s]
            if action >= 0:
                m = action
                if s:
                    arrival = end_send_f[s - 1, m]
                    if np.isnan(arrival):
                        break
                    start = max(start, arrival)
                end = start + forward[s]
                start_f[s, m], end_f[s, m] = start, end
                if s + 1 < stages:
                    begin = max(end, free_f[s])
                    free_f[s] = begin + send_forward[s]
                    start_send_f[s, m], end_send_f[s, m] = begin, free_f[s]
                    if _waits_for(order, head, s + 1, action):
                        waiting[count] = s + 1
                        count += 1
            elif action < -micro_batches:
                m = -1 - action - micro_batches
                if np.isnan(end_b[s, m]):
                    break
                end = start + weights[s]
                start_w[s, m], end_w[s, m] = start, end
            else:
                m = -1 - action
                if np.isnan(end_f[s, m]):
                    break
                if s + 1 < stages:
                    arrival = end_send_b[s, m]
                    if np.isnan(arrival):
                        break
                    start = max(start, arrival)
                end = start + backward[s]
                start_b[s, m], end_b[s, m] = start, end
                if s:
                    begin = max(end, free_b[s - 1])
                    free_b[s - 1] = begin + send_backward[s - 1]
                    start_send_b[s - 1, m], end_send_b[s - 1, m] = begin, free_b[s - 1]
                    if _waits_for(order, head, s - 1, action):
                        waiting[count] = s - 1
                        count += 1
            now[s] = end
            head[s] += 1
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

    The arguments are as in ``run``. Infinite for an order that deadlocks.
    """
    stages, length = order.shape
    micro_batches = length // 3 if len(weights) else length // 2
    arrival_f = np.full((stages, micro_batches), np.inf)
    arrival_b = np.full((stages, micro_batches), np.inf)
    arrival_f[0] = 0.0  # at the last stage, a backward's input arrives when its forward ends
    ended = -1.0  # replaces the arrival of a backward that has run
    head = np.zeros(stages, np.int64)
    now = np.zeros(stages)
    free_f = np.zeros(stages)
    free_b = np.zeros(stages)
    waiting = _all_stages(stages)
    count, done = stages, 0
    while count:
        count -= 1
        s = int(waiting[count])
        while head[s] < length:
            action = int(order[s, head[s]])
            if action >= 0:
                if arrival_f[s, action] == np.inf:
                    break
                now[s] = max(now[s], arrival_f[s, action]) + forward[s]
                if s + 1 < stages:
                    free_f[s] = max(now[s], free_f[s]) + send_forward[s]
                    arrival_f[s + 1, action] = free_f[s]
                    if _waits_for(order, head, s + 1, action):
                        waiting[count] = s + 1
                        count += 1
                else:
                    arrival_b[s, action] = now[s]
            elif action < -micro_batches:
                if arrival_b[s, -1 - action - micro_batches] != ended:
                    break
                now[s] += weights[s]
            else:
                m = -1 - action
                if arrival_b[s, m] == np.inf:
                    break
                now[s] = max(now[s], arrival_b[s, m]) + backward[s]
                arrival_b[s, m] = ended
                if s:
                    free_b[s - 1] = max(now[s], free_b[s - 1]) + send_backward[s - 1]
                    arrival_b[s - 1, m] = free_b[s - 1]
                    if _waits_for(order, head, s - 1, action):
                        waiting[count] = s - 1
                        count += 1
            head[s] += 1
            done += 1
    if done < stages * length:
        return np.inf
    last = 0.0
    for s in range(stages):
        last = max(last, now[s] + exposed[s])
    return last
