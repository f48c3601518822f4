"""``stages="auto"``: profile the model on the device at hand, and plan it for the cluster at hand."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dapple_tf.errors import ClusterError, DappleWarning, PlanError
from dapple_tf.planner.fit import fit_cuts
from dapple_tf.planner.make import decide, make_task, predicted
from dapple_tf.planner.plan import Plan
from dapple_tf.planner.requested import Request, check_batch
from dapple_tf.planner.simple import fitted_candidates, simple_candidates
from dapple_tf.planner.task import Candidate, Task
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
    ranks: bool = False,
) -> Plan:
    """Planner "best" on a profile taken now, for the request's number of micro-batches, on so many ``devices``.

    ``cluster``: the devices that the plan may use; by default those of this process that really run beside each other.
    ``slots``: values that the optimizer keeps of each weight.
    Not ``replicable``: the result depends on how samples are shared out (dropout, batch norm), so stages get one
    device each. ``ranks``: the devices are a job's processes, of which none may be left out; this is one of them.
    Raises PlanError where the cluster has more devices than there are (or fewer than ranks), several servers are joined
    by nobody knows what, nothing fits, or nothing uses all ranks.
    """
    size = int(tf.nest.flatten(tuple(batch))[0].shape[0])
    micro_batches = request.micro_batches
    check_batch(size, micro_batches, (1,))
    samples = size // micro_batches
    where = cluster or (_cluster_of_job() if ranks else Cluster.detect(usable_devices(devices)))
    if ranks and where.devices != devices:
        raise PlanError(
            f"the cluster has {where.devices} devices, but the job has {devices} ranks, a device each: start as many "
            "as the cluster has, or describe the servers that the job runs on"
        )
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
    candidates = _find(task) if replicable else _straight(task)
    chosen = _on_every_rank(task, candidates, replicable) if ranks else _fastest(candidates)
    plan, _ = predicted(task, chosen, "best")
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


def _cluster_of_job() -> Cluster:
    try:
        return Cluster.detect()
    except ClusterError as error:
        raise PlanError(
            f'stages="auto" must know what joins the ranks: {error}. Give dapple.pipeline(cluster=...), or a plan made '
            "for the cluster (dapple plan)"
        ) from error


def _find(task: Task) -> list[Candidate]:
    """What planner "best" finds, the best first."""
    decision = decide(task, "best")
    return [decision.chosen, *decision.others]


def _straight(task: Task) -> list[Candidate]:
    """Pipelines of one device a stage."""
    size = task.micro_batch_sizes[0]
    found = []
    for stages in range(1, task.cluster.devices + 1):
        fitted = fit_cuts(task, [(device,) for device in range(stages)], size)
        candidate = fitted and task.price(fitted, size, "straight")
        if candidate:
            found.append(candidate)
    return found or [decide(task, "gpipe").chosen]


def _on_every_rank(task: Task, candidates: Sequence[Candidate], replicable: bool) -> Candidate:
    """The fastest that uses all devices; warns where one on fewer is faster, for the user started the job."""
    every = task.cluster.devices
    known = [*candidates, *simple_candidates(task), *fitted_candidates(task)] if replicable else list(candidates)
    whole = [candidate for candidate in known if _count_devices(candidate) == every]
    fastest = _fastest(candidates)
    fewer = _count_devices(fastest)
    if not whole:
        why = (
            f"a micro-batch has {task.micro_batch_sizes[0]} samples"
            if replicable
            else "what the model computes depends on how samples are shared out (random numbers, batch norm), so "
            "stages are not replicated"
        )
        raise PlanError(
            f"no plan that fits uses all {every} ranks of the job: {why}, and {len(task.chain.parameter_bytes)} blocks "
            f"of {task.profile.model!r} can be stages; start {fewer} process{'es' * (fewer > 1)}, or give stages and "
            "replicas"
        )
    chosen = _fastest(whole)
    if chosen.seconds > fastest.seconds:
        warnings.warn(
            f"{fewer} of the job's {every} ranks would be faster, at {fastest.seconds:.3g} s a step, than all of them, "
            f"at {chosen.seconds:.3g} s: start fewer processes, or make batches larger",
            DappleWarning,
            stacklevel=3,
        )
    return chosen


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda candidate: candidate.seconds)


def _count_devices(candidate: Candidate) -> int:
    return sum(stage.replicas for stage in candidate.stages)
