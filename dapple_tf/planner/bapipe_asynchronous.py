"""BaPipe's pipeline scheduling with asynchronous execution, simulated: 1F1B-AS and FBP-AS (BaPipe, section 3.2.1).

Accelerators such as FPGAs send the first part of an output while they compute the rest, so that communication takes no
time of its own where the bandwidth is at least a / F (1F1B-AS) or 2 a / (F + B) (FBP-AS); where it is less, computing
waits for it. Letters as in Table 1: N accelerators (n from 0 here), M micro-batches, F and B, a.
"""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.compiled import compiled, compiled_part
from dapple_tf.simulator.compiled_engine import step_seconds
from dapple_tf.simulator.order import early_backward_order

AS_SCHEDULES = {"1F1B-AS": "1f1b-sno", "FBP-AS": "1f1b-so"}
"""Each schedule of asynchronous execution, and the one of synchronous execution that holds as many micro-batches."""


def in_flight(schedule: str, stages: int, micro_batches: int) -> Integers:
    """Return the micro-batches whose features each stage holds (Tables 1 and 2), from stage 0 on.

    N - i + 1 under 1F1B-AS and 1F1B-SNO, with i from 1, and twice as many under FBP-AS and 1F1B-SO.
    """
    factor = 2 if schedule in ("FBP-AS", "1F1B-SO") else 1
    return np.minimum(factor * np.arange(stages, 0, -1), micro_batches)


def asynchronous_seconds(
    schedule: str, forward: Floats, backward: Floats, sending: Floats, micro_batches: int
) -> float:
    """Return the seconds of a mini-batch; ``schedule``: of ``AS_SCHEDULES``.

    ``forward``, ``backward`` [N]: F and B of each stage. ``sending`` [N - 1]: the seconds of a over each link.
    """
    before, behind = np.concatenate([[0.0], sending]), np.concatenate([sending, [0.0]])
    held = in_flight(schedule, len(forward), micro_batches)
    if schedule == "1F1B-AS":
        f, b = np.maximum(forward, np.maximum(before, behind)), np.maximum(backward, np.maximum(before, behind))
        nothing = np.zeros(len(f))
        order = early_backward_order(held, micro_batches)
        return float(step_seconds(order, f, b, np.zeros(0), nothing, nothing, nothing))
    both = forward + backward
    waiting = np.maximum(2 * np.maximum(before, behind), both)
    longer = np.divide(waiting, both, out=np.ones(len(both)), where=both > 0)
    return float(two_lanes(forward * longer, backward * longer, held, micro_batches))


@compiled
def two_lanes(forward: Floats, backward: Floats, held: Integers, micro_batches: int) -> float:
    """Return the seconds of FBP-AS: each accelerator runs forwards in one lane and backwards in another.

    While both lanes are busy, a forward and a backward take F + B each; while one is, it has the accelerator to itself.
    ``held``: the micro-batches that a stage may have begun and not ended.
    """
    n, m = len(forward), micro_batches
    begun = np.zeros((2, n), np.int64)  # operations that a lane (forward 0, backward 1) has begun
    ended = np.zeros((2, n), np.int64)
    left = np.zeros((2, n))  # what is left of the operation in a lane, as a fraction
    now = 0.0
    while ended[1, 0] < m:
        for x in range(n):
            arrived = m if x == 0 else ended[0, x - 1]
            if begun[0, x] == ended[0, x] and begun[0, x] < arrived and begun[0, x] - ended[1, x] < held[x]:
                begun[0, x] += 1
                left[0, x] = 1.0
            arrived = ended[0, x] if x == n - 1 else ended[1, x + 1]
            if begun[1, x] == ended[1, x] and begun[1, x] < arrived:
                begun[1, x] += 1
                left[1, x] = 1.0
        step = np.inf
        for x in range(n):
            for lane in range(2):
                if begun[lane, x] > ended[lane, x]:
                    step = min(step, left[lane, x] * _lane_seconds(forward, backward, begun, ended, lane, x))
        now += step
        for x in range(n):
            seconds = (
                _lane_seconds(forward, backward, begun, ended, 0, x),
                _lane_seconds(forward, backward, begun, ended, 1, x),
            )
            done = np.zeros(2, np.bool_)
            for lane in range(2):
                if begun[lane, x] > ended[lane, x]:
                    rest = left[lane, x] * seconds[lane] - step
                    done[lane] = rest <= 1e-12 * seconds[lane]
                    left[lane, x] = 0.0 if done[lane] else rest / seconds[lane]
            for lane in range(2):
                ended[lane, x] += done[lane]
    return now


@compiled_part
def _lane_seconds(forward: Floats, backward: Floats, begun: Integers, ended: Integers, lane: int, x: int) -> float:
    """Return the seconds of a whole operation in a lane, as busy as its accelerator is now."""
    if begun[1 - lane, x] > ended[1 - lane, x]:
        return float(forward[x] + backward[x])
    return float(forward[x]) if lane == 0 else float(backward[x])
