"""Early backward as a recurrence: the end of a step of K_i forwards, then one backward and one forward in turn.

The discrete-event engine executes any order, and keeps a stack of the workers that may run. Here a stage's K_i never
exceeds that of the stage before, as in all policies of DAPPLE (section V.C). So backward m of every stage can be
followed by forward m + K_i of every stage, and plain loops reach every action after those that it waits for.
"""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.compiled import Floats, Integers, compiled

STEADY_MARGIN = 0.98  # of the period of the steady phase; the rest of the step may have a slightly shorter one


@compiled
def early_backward_seconds(
    warm_up: Integers,
    micro_batches: int,
    forward: Floats,
    backward: Floats,
    send: Floats,
    exposed: Floats,
    ceiling: float,
    arrival: Floats,
    extrapolate: bool,
) -> float:
    """Return the end of the step, as ``engine.step_seconds`` does for ``order.early_backward_order``.

    ``warm_up``: K_i of each stage, between 1 and M, none above that of the stage before. Seconds are of each stage;
    ``send``: of a transfer to the next stage, or back. ``arrival``: room for [stages, M] numbers. Infinite where the
    step reaches ``ceiling`` seconds; also, with ``extrapolate``, where its steady phase is so slow that it likely will.
    """
    stages = len(warm_up)
    now, free_forward, free_backward = np.zeros(stages), np.zeros(stages), np.zeros(stages)
    arrival[0, :micro_batches] = 0.0
    settled, before = 2 * stages + 2, 0.0  # the steady phase has begun by then; as many more give its period
    for m in range(micro_batches):
        for s in range(stages):
            for x in range(m + warm_up[s] - 1 if m else 0, min(m + warm_up[s], micro_batches)):
                now[s] = max(now[s], arrival[s, x]) + forward[s]
                if s + 1 < stages:
                    free_forward[s] = max(now[s], free_forward[s]) + send[s]
                    arrival[s + 1, x] = free_forward[s]
        arrived = 0.0
        for s in range(stages - 1, -1, -1):
            now[s] = max(now[s], arrived) + backward[s]
            left = (micro_batches - 1 - m) * backward[s] + max(0, micro_batches - m - warm_up[s]) * forward[s]
            if now[s] + left + exposed[s] >= ceiling:
                return np.inf
            if s:
                free_backward[s - 1] = max(now[s], free_backward[s - 1]) + send[s - 1]
                arrived = free_backward[s - 1]
        if extrapolate and m == settled:
            before = now[0]
        elif extrapolate and m == 2 * settled:
            period = (now[0] - before) / settled
            if now[0] + period * (micro_batches - 1 - m) * STEADY_MARGIN >= ceiling:
                return np.inf
    end = 0.0
    for s in range(stages):
        end = max(end, now[s] + exposed[s])
    return end
