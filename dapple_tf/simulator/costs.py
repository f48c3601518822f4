"""The cost model: seconds and bytes of each stage of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dapple_tf.plan import Plan
from dapple_tf.simulator.compiled import Floats, compiled
from dapple_tf.simulator.transfer import allreduce_cost, link_tables, transfer_cost
from dapple_tf.timeline.stage_costs import StageCosts
from graph_passes.schedules.policies import splits_backward, stages_ending_split
from profiler.cluster import Cluster
from profiler.profile import Profile


def stage_costs(
    plan: Plan, profile: Profile, cluster: Cluster, *, optimizer_slots: int = 2, samples: int | None = None
) -> tuple[StageCosts, ...]:
    """Return the costs of every stage of ``plan``: the profile scaled to a micro-batch, over the cluster's links.

    ``optimizer_slots``: values that the optimizer keeps of each weight (2 for Adam, 0 for plain SGD). ``samples``: of
    the micro-batch; without it, ``plan.micro_batch_size``. Re-computed
    layers form runs of consecutive layers: backward runs the forward of one run at a time again, and only the run's
    inputs are stashed (DAPPLE, section VI.E).
    """
    tables = link_tables(cluster)
    homes = [[cluster.homes[d] for d in stage.devices] for stage in plan.stages]
    crossing, working = profile.crossing_bytes(), profile.working_bytes()
    parameters, stash = profile.parameter_bytes, profile.stash_bytes
    samples = plan.micro_batch_size if samples is None else samples
    slices = {r: samples / r for r in plan.replicas}
    seconds = {
        r: (profile.forward_seconds(n), profile.backward_seconds(n), profile.weights_seconds(n))
        for r, n in slices.items()
    }
    splits = splits_backward(plan.schedule)
    ends_split = stages_ending_split(plan.schedule, len(plan.stages), plan.micro_batches)
    scale = samples / profile.batch_size
    found = []
    for index, stage in enumerate(plan.stages):
        r, layers = stage.replicas, slice(stage.first_layer, stage.last_layer + 1)
        forward, backward, weights = (row[layers] for row in seconds[r])
        send = 0.0
        if index + 1 < len(plan.stages) and plan.stages[index + 1].devices != stage.devices:
            latency, per_byte = transfer_cost(homes[index], homes[index + 1], tables)
            send = latency + per_byte * float(crossing[stage.last_layer]) * scale
        runs = plan.runs(index)
        recomputed = sum(float(forward[run.start - layers.start : run.stop - layers.start].sum()) for run in runs)
        stashed, work = _memory(layers, runs, stash, working, crossing)
        ring = allreduce_cost(homes[index], tables) * parameters[layers]
        total = float(ring.sum())
        found.append(
            StageCosts(
                forward_seconds=float(forward.sum()),
                backward_seconds=float(backward.sum()) + recomputed,
                send_forward_seconds=send,
                send_backward_seconds=send,
                allreduce_seconds=total,
                exposed_seconds=exposed_seconds(weights if index in ends_split else backward, ring)
                if plan.overlap
                else total,
                fixed_bytes=float(parameters[layers].sum()) * (2 + optimizer_slots),
                stash_bytes=stashed * scale / r,
                working_bytes=work * scale / r,
                weights_seconds=float(weights.sum()) if splits else 0.0,
            )
        )
    return tuple(found)


def _memory(
    layers: slice, runs: Sequence[range], stash: Floats, working: Floats, crossing: Floats
) -> tuple[float, float]:
    """Return the bytes of a stage's stash, and of its largest working set, for the profile's batch.

    A re-computed run adds its inputs to the stash, and all its stash to its working set. ``crossing``: bytes that cross
    the cut after each layer.
    """
    run_inputs = sum(float(crossing[run.start - 1]) for run in runs if run.start)
    others = [layer for layer in range(layers.start, layers.stop) if not any(layer in run for run in runs)]
    of_runs = [float(working[run.start : run.stop].max() + stash[run.start : run.stop].sum()) for run in runs]
    return float(stash[others].sum()) + run_inputs, max([float(working[layers].max()), *of_runs])


def exposed_seconds(backward: Sequence[float] | Floats, ring: Floats) -> float:
    """Return the seconds of AllReduce after the last backward, if each layer's starts as soon as its gradient exists.

    ``backward``, ``ring``: seconds of each layer's backward and AllReduce, in forward order; one AllReduce runs at a
    time.
    """
    return float(exposed_of(np.asarray(backward, np.float64), ring, 0, len(ring)))


@compiled
def exposed_of(backward: Floats, ring: Floats, first: int, end: int) -> float:
    """Return ``exposed_seconds`` of the layers ``first`` to ``end`` (exclusive), for compiled callers."""
    ready, done = 0.0, 0.0
    for layer in range(end - 1, first - 1, -1):
        ready += backward[layer]
        done = max(done, ready) + ring[layer]
    return max(0.0, done - ready)
