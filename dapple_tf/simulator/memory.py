"""Memory of a stage over time: stashes are added and freed as the executed order runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dapple_tf.graph_passes.schedules.schedule import FREEING
from dapple_tf.plans import Plan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.execution import Execution
from dapple_tf.timeline.stage_costs import MemoryLimit, StageCosts


def memory_over_time(execution: Execution, stage: int) -> tuple[Floats, Floats]:
    """Return times (seconds, the first 0), and the bytes that one device of ``stage`` holds from each on.

    Weights, gradients and slots of all stages on the device count all the time, and the largest of their working sets.
    A forward adds a stash when it starts; the backward of the micro-batch frees it when it ends, or its weight
    gradients where they are an action of their own.
    """
    worker = execution.order.worker_of[stage]
    stages = [s for s, w in enumerate(execution.order.worker_of) if w == worker]
    costs = [execution.costs[s] for s in stages]
    stashes = {s: execution.stash_bytes(s) for s in stages}
    # A column for each stage and size of stash: counts are exact, and sums of bytes may round.
    columns = sorted({(s, stash) for s in stages for stash in stashes[s]})
    column_of = {own: index for index, own in enumerate(columns)}
    times, changed, changes = [0.0], [0], [0]
    # A worker runs one action at a time, so these times are in order.
    for action in execution.actions[worker]:
        if action.kind == "F":
            times.append(execution.times.start_forward[action.stage, action.micro_batch])
        elif action.kind in FREEING:
            ends = execution.times.end_backward if action.kind == "B" else execution.times.end_weights
            times.append(ends[action.stage, action.micro_batch])
        else:
            continue
        changed.append(column_of[action.stage, stashes[action.stage][action.micro_batch]])
        changes.append(1 if action.kind == "F" else -1)
    base = sum(cost.fixed_bytes for cost in costs) + max(cost.working_bytes for cost in costs)
    in_flight = np.zeros((len(times), len(columns)), np.int64)
    in_flight[np.arange(len(times)), changed] = changes
    return np.array(times), base + in_flight.cumsum(axis=0) @ np.array([stash for _, stash in columns])


def values_per_weight(optimizer_slots: int, replicas: int = 1) -> float:
    """Return the number of values that a device stores for a weight: itself, its gradient, the optimizer's slots.

    ``replicas``: those that share the slots out among them (``Plan.slot_replicas``).
    """
    return 2.0 + optimizer_slots / replicas


def peak_bytes(execution: Execution) -> tuple[float, ...]:
    """Return the most bytes that one device of each stage holds."""
    return tuple(float(np.max(memory_over_time(execution, stage)[1])) for stage in range(execution.stages))


# --- The memory of unequal devices: which device of a stage is the first to run out, and the room of the stage then


def memory_limits(plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> tuple[MemoryLimit, ...]:
    """Return the device of each stage that is the first to run out of memory; ``costs``: of each stage.

    None are returned where all devices have equal memory and no stage has shares.
    """
    if len(set(cluster.memories)) == 1 and not plan.shares:
        return ()
    limits: dict[int, MemoryLimit] = {}
    for stages in plan.worker_map.stages_of:
        fixed, stage = sum(costs[s].fixed_bytes for s in stages), plan.stages[stages[0]].in_rows(plan.micro_batch_size)
        most = max(stage.fractions)
        found = [
            MemoryLimit(device, cluster.memory_of(device), fraction / most, fixed)
            for device, fraction in zip(stage.devices, stage.fractions, strict=True)
        ]
        limits |= dict.fromkeys(stages, min(found, key=lambda limit: limit.room))
    return tuple(limits[stage] for stage in range(len(costs)))


def fit_to_one_limit(plan: Plan, costs: Sequence[StageCosts], cluster: Cluster) -> tuple[tuple[StageCosts, ...], float]:
    """Return the costs changed so that one memory size, in bytes, can be compared with all stages; and this size.

    A stage with the returned costs fits a device of this size if and only if the stage fits its own devices. Where
    devices or shares are unequal, the fixed bytes of each stage grow by as much as its room is below the largest room
    of any stage (``MemoryLimit.room``).
    """
    limits = memory_limits(plan, costs, cluster)
    if not limits:
        return tuple(costs), cluster.memories[0]
    largest = max(limit.room for limit in limits)
    first = {stages[0] for stages in plan.worker_map.stages_of}  # counted once on each worker
    missing = [largest - limit.room if stage in first else 0.0 for stage, limit in enumerate(limits)]
    padded = [replace(cost, fixed_bytes=cost.fixed_bytes + more) for cost, more in zip(costs, missing, strict=True)]
    return tuple(padded), largest
