"""A step of virtual workers: each a pipeline of all layers, joined by AllReduce (HetPipe, made synchronous)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.costs import one_device_seconds, stage_costs
from dapple_tf.simulator.execution import Execution, execute
from dapple_tf.simulator.memory import memory_limits
from dapple_tf.simulator.order import named_order
from dapple_tf.simulator.simulated_step import SimulatedStep


def simulate_workers(
    plan: Plan, profile: Profile, cluster: Cluster, *, optimizer_slots: int = 2
) -> tuple[SimulatedStep, ...]:
    """Return the step of each virtual worker of ``plan``, which ends when its weights are reduced with the others'.

    Layers are reduced together, in one ring, if in each worker they are on one device; the ring joins these devices.
    The ring starts when the last of its stages has ended its backwards and its devices are free of other rings. If
    several rings could start, the one whose backwards ended first starts first. Rings do not overlap backward. A
    stage's ``exposed_seconds`` last from its own last backward to the end of its last ring, so they include waiting for
    other workers.
    """
    parts = plan.virtual_workers
    executions = []
    for part in parts:
        costs = stage_costs(part, profile, cluster, optimizer_slots=optimizer_slots)
        executions.append(execute(named_order(part.schedule, len(part.stages), part.micro_batches).order, costs))
    ends = _reduce(plan, parts, executions, profile, cluster)
    whole = plan.micro_batches * len(parts)
    seconds = whole * one_device_seconds(profile, cluster, plan.micro_batch_size)
    steps = []
    for part, execution in zip(parts, executions, strict=True):
        costs = tuple(
            replace(cost, exposed_seconds=ends[stage.devices[0]] - float(last))
            for cost, stage, last in zip(execution.costs, part.stages, execution.last_gradients, strict=True)
        )
        limits = memory_limits(part, costs, cluster)
        reduced = np.array([ends[stage.devices[0]] for stage in part.stages])
        joined = replace(execution, costs=costs, allreduce_end=reduced)
        steps.append(SimulatedStep(part, joined, seconds, cluster.least_memory, limits))
    return tuple(steps)


def predict_workers(plan: Plan, profile: Profile, cluster: Cluster, *, optimizer_slots: int = 2) -> dict[str, Any]:
    """Return "bubble" and "peak_memory_bytes" of a prediction, over the stages of all virtual workers."""
    steps = simulate_workers(plan, profile, cluster, optimizer_slots=optimizer_slots)
    busy = [fraction for step in steps for fraction in step.stage_utilisation]
    peaks = [peak for step in steps for peak in step.peak_memory_bytes]
    return {"bubble": 1 - float(np.mean(busy)), "peak_memory_bytes": peaks}


def _reduce(
    plan: Plan, parts: Sequence[Plan], executions: Sequence[Execution], profile: Profile, cluster: Cluster
) -> dict[int, float]:
    """Return when the last ring of each device ends (seconds)."""
    free = {
        stage.devices[0]: float(last)
        for part, execution in zip(parts, executions, strict=True)
        for stage, last in zip(part.stages, execution.last_gradients, strict=True)
    }
    layers = len(profile.layers)
    cuts = sorted({0, layers, *itertools.chain.from_iterable(part.starts for part in parts)})
    # Of each worker, the device that has a layer.
    holders = [
        {layer: s.devices[0] for s in part.stages for layer in range(s.first_layer, s.last_layer + 1)} for part in parts
    ]
    joint_stages = tuple(
        StagePlan(first, end - 1, tuple(of_worker[first] for of_worker in holders))
        for first, end in itertools.pairwise(cuts)
    )
    # The cost model has an AllReduce for each stage: here a stage is the layers of one ring.
    as_stages = replace(plan, stages=joint_stages, schedule="dapple-a", overlap=False, recompute=False)
    seconds = [cost.allreduce_seconds for cost in stage_costs(as_stages, profile, cluster)]
    rings = [
        (max(free[d] for d in joint.devices), joint.devices, took)
        for joint, took in zip(joint_stages, seconds, strict=True)
    ]
    for _, devices, took in sorted(rings, key=lambda ring: ring[0]):
        end = max(free[d] for d in devices) + took
        free |= dict.fromkeys(devices, end)
    return free
