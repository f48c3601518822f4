"""The stashes that workers hold at once, from an order alone: a forward adds one, B or W frees it."""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.order import FORWARD, INPUTS, KIND_MASK, KIND_SHIFT, NONE, STAGE_SHIFT, Order


def count_in_flight(order: Order) -> Integers:
    """Return the most micro-batches that each stage has in flight at once."""
    stages = len(order.worker_of)
    held, most = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    for w in range(order.actions.shape[0]):
        for code in order.actions[w]:
            if code == NONE:
                break
            stage, kind = code >> STAGE_SHIFT, (code >> KIND_SHIFT) & KIND_MASK
            if kind == FORWARD:
                held[stage] += 1
                most[stage] = max(most[stage], held[stage])
            elif kind != INPUTS:
                held[stage] -= 1
    return most


def row_peak(row: Integers, stash: Floats) -> float:
    """Return the most ``stash`` that a worker with this row of actions holds at once.

    ``stash``: of a micro-batch on each stage, in bytes or any unit.
    """
    held = peak = 0.0
    for code in row:
        if code == NONE:
            break
        kind = (code >> KIND_SHIFT) & KIND_MASK
        if kind == FORWARD:
            held += stash[code >> STAGE_SHIFT]
            peak = max(peak, held)
        elif kind != INPUTS:
            held -= stash[code >> STAGE_SHIFT]
    return peak


def worker_peaks(order: Order, fixed: Floats, stash: Floats, working: Floats) -> Floats:
    """Return the most bytes that a device of each worker holds.

    That is the ``fixed`` bytes of its stages, the largest ``working`` bytes of one of them, and the most ``stash``
    bytes in flight. The arguments are bytes of each stage, on one device.
    """
    workers = order.actions.shape[0]
    peaks, largest = np.zeros(workers), np.zeros(workers)
    for w in range(workers):
        peaks[w] = row_peak(order.actions[w], stash)
    for s in range(len(fixed)):
        w = order.worker_of[s]
        peaks[w] += fixed[s]
        largest[w] = max(largest[w], working[s])
    return peaks + largest
