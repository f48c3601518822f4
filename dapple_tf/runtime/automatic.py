"""``stages="auto"``: profile the model on the device at hand, and plan it for the cluster at hand."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dapple_tf.errors import PlanError
from dapple_tf.planner.fit import fit_cuts
from dapple_tf.planner.make import decide, make_task, predicted
from dapple_tf.planner.plan import Plan
from dapple_tf.planner.requested import Request, check_batch
from dapple_tf.planner.task import Decision, Task
from dapple_tf.profiling import profile
from profiler.cluster import Cluster


def plan_automatically(
    loss_fn: Callable[..., Any],
    batch: Sequence[Any],
    request: Request,
    *,
    slots: int,
    devices: int,
    cluster: Cluster | None,
    replicable: bool,
) -> Plan:
    """Planner "best" on a profile taken now, for the request's number of micro-batches, on so many ``devices``.

    ``cluster``: the devices that the plan may use; by default those of this process that really run beside each other.
    ``slots``: values that the optimizer keeps of each weight.
    Not ``replicable``: the result depends on how samples are shared out (dropout, batch norm), so stages get one
    device each. Raises PlanError where the cluster has more devices than there are, or nothing fits.
    """
    size = int(tf.nest.flatten(tuple(batch))[0].shape[0])
    micro_batches = request.micro_batches
    check_batch(size, micro_batches, (1,))
    samples = size // micro_batches
    where = cluster or Cluster.detect(usable_devices(devices))
    if where.devices > devices:
        raise PlanError(f"the cluster has {where.devices} devices, but here are {devices}: make as many or use fewer")
    rows = tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf)[:samples], tuple(batch))
    slices = sorted({max(1, samples // r) for r in (2, where.devices)} - {samples}) if replicable else []
    measured = profile(loss_fn, rows, batch_sizes=slices)
    task = make_task(
        measured,
        where,
        global_batch_size=micro_batches * samples,
        micro_batch_size=samples,
        schedule=request.schedule,
        optimizer_slots=slots,
    )
    decision = decide(task, "best") if replicable else _straight(task)
    plan, _ = predicted(task, decision.chosen, "best")
    return dataclasses.replace(plan, global_batch_size=size, micro_batch_size=-(-size // micro_batches))


def usable_devices(devices: int) -> int:
    """Devices that can run at the same time: all GPUs; of logical CPU devices as many as there are cores."""
    if tf.config.list_logical_devices("GPU"):
        return devices
    return max(1, min(devices, len(os.sched_getaffinity(0))))


def count_slots(optimizer: Any, trained: Sequence[tf.Variable]) -> int:
    """Values that a built optimizer keeps of each of the ``trained`` weights; 2, as Adam does, before it is built."""
    weights = sum(math.prod(variable.shape) for variable in trained)
    if not weights or not getattr(optimizer, "built", False):
        return 2
    kept = sum(math.prod(variable.shape) for variable in optimizer.variables)  # and a few scalars, such as the rate
    return round(float(kept) / float(weights))


def _straight(task: Task) -> Decision:
    """The best pipeline of one device a stage."""
    size = task.micro_batch_sizes[0]
    found = []
    for stages in range(1, task.cluster.devices + 1):
        fitted = fit_cuts(task, [(device,) for device in range(stages)], size)
        candidate = fitted and task.price(fitted, size, "straight")
        if candidate:
            found.append(candidate)
    return Decision(min(found, key=lambda c: c.seconds)) if found else decide(task, "gpipe")
