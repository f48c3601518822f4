"""The end of a step in code that Numba compiles: for searches that simulate thousands of orders in compiled loops.

``engine.run`` computes the same, and the times of all events; the tests hold both equal.
"""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.compiled import compiled, inlined
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

    ``head``: the index in the order of each worker's next action.
    """
    return bool(head[worker] < actions.shape[1] and actions[worker, head[worker]] | ignored == code | ignored)


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

    The arguments are seconds of each stage, as in ``engine.Seconds``; ``weights`` has size 0 where the order has no
    weight gradients of their own. Infinite for an order that deadlocks.
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
