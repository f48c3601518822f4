"""Memory of a stage's device over time, as the executed order fills and frees it."""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.compiled import Floats
from dapple_tf.simulator.execution import Execution


def memory_over_time(execution: Execution, stage: int) -> tuple[Floats, Floats]:
    """Times (seconds) and the bytes that one device of ``stage`` holds from each on, the first at 0.

    Weights, gradients, slots and the largest working set are always there; a forward adds a stash when it starts, its
    backward frees it when it ends; where gradients of weights are actions of their own, these do.
    """
    order, cost, m = execution.order[stage], execution.costs[stage], execution.micro_batches
    ends, frees = (execution.end_weights, -1 - m) if execution.splits else (execution.end_backward, -1)
    order = order[(order >= 0) | (order <= frees)]  # less what changes nothing
    forwards = order >= 0
    micro_batch = np.where(forwards, order, frees - order)
    # A stage runs one action at a time, so its order is also the order of these times.
    times = np.where(forwards, execution.start_forward[stage, micro_batch], ends[stage, micro_batch])
    in_flight = np.cumsum(np.where(forwards, 1, -1))
    base = cost.fixed_bytes + cost.working_bytes
    return np.concatenate(([0.0], times)), np.concatenate(([base], base + in_flight * cost.stash_bytes))


def usable_bytes(device_memory: float) -> float:
    """What may be used of a device's memory: sums of bytes round, so a little more, but less than a byte."""
    return device_memory * (1 + 1e-12)


def peak_bytes(execution: Execution) -> tuple[float, ...]:
    """The most that one device of each stage holds."""
    return tuple(float(np.max(memory_over_time(execution, stage)[1])) for stage in range(execution.stages))
