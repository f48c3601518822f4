"""AutoPipe's pipeline simulator: iteration time, critical path and master stage (AutoPipe, section III.B.1).

Letters: n stages, m micro-batches, f_x and b_x the seconds of FP and BP on stage x, Comm those of one communication.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.compiled import compiled, compiled_part


@compiled
def simulate_1f1b(f: Floats, b: Floats, comm: float, micro_batches: int) -> tuple[float, int]:
    """Return the iteration time (seconds) and the master stage.

    Each FP but those of stage 0, and each BP but those of stage n - 1, starts Comm after the later of two: the end of
    the stage's operation before, and that of the same micro-batch's on the neighbour. (So printed for the 1F1B and
    Cooldown phases: a stage communicates between two operations, it does not overlap that. The Warmup phase, for which
    the paper estimates the first micro-batch's FP only, is computed in the same way.)

    Of the longest paths the critical one is closest to the last stage: where both are equally late, it comes from the
    stage nearer to that. The master stage is the one on which the critical path has most operations of the 1F1B phase;
    if several have equally many, the last of them.
    """
    n, m = len(f), micro_batches
    start = np.full((2, n, m), np.inf)  # of FP (0) and BP (1)
    from_own = np.zeros((2, n, m), np.bool_)  # whether the stage's operation before is on the path to it
    head = np.zeros(n, np.int64)
    free = np.zeros(n)
    moved = True
    while moved:
        moved = False
        for x in range(n):
            while head[x] < 2 * m:
                z, y = _operation(head[x], min(n - 1 - x, m), m)
                neighbour = x - 1 if z == 0 else x + 1
                ready = 0.0
                if 0 <= neighbour < n:
                    ready = start[z, neighbour, y] + (f[neighbour] if z == 0 else b[neighbour])
                    if ready == np.inf:
                        break
                if z == 0:
                    from_own[z, x, y] = head[x] > 0 and (x == 0 or free[x] >= ready)
                else:
                    from_own[z, x, y] = x == n - 1 or free[x] > ready
                start[z, x, y] = max(free[x], ready) + (comm if 0 <= neighbour < n else 0.0)
                free[x] = start[z, x, y] + (f[x] if z == 0 else b[x])
                head[x] += 1
                moved = True
    return free[0], _master_stage(from_own, n, m)


@compiled_part
def _operation(index: int, ahead: int, m: int) -> tuple[int, int]:
    """Return the kind (0 FP, 1 BP) and the micro-batch of a stage's operation in 1F1B.

    ``ahead``: the FPs of its Warmup phase; then FP and BP in turn (the 1F1B phase), then BPs (Cooldown).
    """
    if index < ahead:
        return 0, index
    if index >= 2 * m - ahead:
        return 1, index - m
    pair = (index - ahead) // 2
    return (0, ahead + pair) if (index - ahead) % 2 == 0 else (1, pair)


@compiled_part
def _index(z: int, y: int, ahead: int, m: int) -> int:
    """Return the index of an operation among those of its stage; see ``_operation``."""
    if z == 0:
        return y if y < ahead else 2 * y - ahead
    return ahead + 2 * y + 1 if y < m - ahead else m + y


@compiled_part
def _master_stage(from_own: NDArray[np.bool_], n: int, m: int) -> int:
    """Return the stage of the most operations of the 1F1B phase on the path that ends with stage 0's last BP."""
    counts = np.zeros(n, np.int64)
    x, z, y = 0, 1, m - 1
    while True:
        ahead = min(n - 1 - x, m)
        index = _index(z, y, ahead, m)
        if ahead <= index < 2 * m - ahead:
            counts[x] += 1
        if from_own[z, x, y]:
            z, y = _operation(index - 1, ahead, m)
        elif z == 0:
            if x == 0:
                break
            x -= 1
        else:
            x += 1
    master = n - 1
    for x in range(n - 1, -1, -1):
        if counts[x] > counts[master]:
            master = x
    return master
