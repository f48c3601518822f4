"""Memory of a stage over time: stashes are added and freed as the executed order runs."""

from __future__ import annotations

import numpy as np

from dapple_tf.simulator.compiled import Floats
from dapple_tf.simulator.execution import Execution


def memory_over_time(execution: Execution, stage: int) -> tuple[Floats, Floats]:
    """Return times (seconds, the first 0), and the bytes that one device of ``stage`` holds from each on.

    Weights, gradients, slots and the largest working set count all the time. A forward adds a stash when it starts; the
    backward of the micro-batch frees it when it ends, or its weight gradients where they are actions of their own.
    """
    order, cost, m = execution.order[stage], execution.costs[stage], execution.micro_batches
    ends, frees = (execution.end_weights, -1 - m) if execution.splits else (execution.end_backward, -1)
    order = order[(order >= 0) | (order <= frees)]  # without actions that change nothing
    forwards = order >= 0
    micro_batch = np.where(forwards, order, frees - order)
    # A stage runs one action at a time, so these times are in order.
    times = np.where(forwards, execution.start_forward[stage, micro_batch], ends[stage, micro_batch])
    in_flight = np.cumsum(np.where(forwards, 1, -1))
    base = cost.fixed_bytes + cost.working_bytes
    return np.concatenate(([0.0], times)), np.concatenate(([base], base + in_flight * cost.stash_bytes))


def usable_bytes(device_memory: float) -> float:
    """Return the bytes of a device's memory, and a little more (less than a byte), for sums of bytes are rounded."""
    return device_memory * (1 + 1e-12)


def peak_bytes(execution: Execution) -> tuple[float, ...]:
    """Return the most bytes that one device of each stage holds."""
    return tuple(float(np.max(memory_over_time(execution, stage)[1])) for stage in range(execution.stages))
