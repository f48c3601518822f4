"""Local search over orders: moves of single actions within their workers, in compiled code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.compiled import call_from_compiled, compiled, compiled_part
from dapple_tf.simulator.compiled_engine import step_seconds
from dapple_tf.simulator.held_stash import row_peak
from dapple_tf.simulator.order import KIND_SHIFT, NONE, Order

call_from_compiled(row_peak)


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
    stop: NDArray[np.bool_],
) -> float:
    """Move single actions within their workers, at random, while the step gets no longer; return its seconds.

    The actions of a stage and kind stay in micro-batch order: micro-batches are alike, and variables that calls write
    are then written in the order of the samples. ``order`` is written to. ``stash``: of a micro-batch on each stage;
    ``most``: of each worker. The other arguments are as in ``step_seconds``. Tries ``moves`` moves; the same arguments
    give the same result. ``stop``: see ``stop_flag``; it ends the search after the present move.
    """
    np.random.seed(0)
    actions = order.actions
    workers = actions.shape[0]
    lengths = np.array([np.sum(actions[w] != NONE) for w in range(workers)])
    best = step_seconds(order, forward, backward, weights, send_forward, send_backward, exposed)
    for _ in range(moves):
        if stop[0]:
            break
        w = np.random.randint(workers)
        row, source = actions[w], np.random.randint(lengths[w])
        distance = 1 + int(np.random.exponential(4.0))
        target = source + (distance if np.random.random() < 0.5 else -distance)
        if target < 0 or target >= lengths[w] or _passes_another(row, source, target):
            continue
        _shift(row, source, target)
        seconds = np.inf
        if row_peak(row, stash) <= most[w]:
            seconds = step_seconds(order, forward, backward, weights, send_forward, send_backward, exposed)
        if seconds <= best:
            best = seconds
        else:
            _shift(row, target, source)
    return best


@compiled_part
def _passes_another(row: Integers, source: int, target: int) -> bool:
    """Return whether the entry at ``source`` would pass one of the same stage and kind on its way to ``target``."""
    for i in range(min(source, target), max(source, target) + 1):
        if i != source and row[i] >> KIND_SHIFT == row[source] >> KIND_SHIFT:
            return True
    return False


@compiled_part
def _shift(row: Integers, source: int, target: int) -> None:
    """Move the entry at ``source`` to ``target``."""
    moved, step = row[source], 1 if target > source else -1
    for i in range(source, target, step):
        row[i] = row[i + step]
    row[target] = moved
