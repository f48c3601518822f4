"""What each stage of a plan costs: seconds of a micro-batch, of its transfers and AllReduce, and bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dapple_tf.plan import Plan
from dapple_tf.simulator.compiled import Floats, compiled
from dapple_tf.simulator.transfer import allreduce_cost, link_tables, transfer_cost
from dapple_tf.timeline.stage_costs import StageCosts
from graph_passes.schedules.policies import splits_backward
from profiler.cluster import Cluster
from profiler.profile import Profile


def stage_costs(plan: Plan, profile: Profile, cluster: Cluster, *, optimizer_slots: int = 2) -> tuple[StageCosts, ...]:
    """The costs of every stage of ``plan`` under the design's cost model.

    ``optimizer_slots``: values that the optimizer keeps of each weight (2 for Adam, 0 for plain SGD). Of layers that
    are re-computed backward runs the forward again, a run at a time; only what enters a run is stashed (DAPPLE, VI.E).
    """
    tables = link_tables(cluster)
    homes = [[cluster.homes[d] for d in stage.devices] for stage in plan.stages]
    crossing, working = profile.crossing_bytes(), profile.working_bytes()
    parameters, stash = profile.parameter_bytes, profile.stash_bytes
    slices = {r: plan.micro_batch_size / r for r in plan.replicas}
    seconds = {
        r: (profile.forward_seconds(n), profile.backward_seconds(n), profile.weights_seconds(n))
        for r, n in slices.items()
    }
    splits = splits_backward(plan.schedule)
    scale = plan.micro_batch_size / profile.batch_size
    found = []
    for index, stage in enumerate(plan.stages):
        r, held = stage.replicas, slice(stage.first_layer, stage.last_layer + 1)
        forward, backward, weights = (row[held] for row in seconds[r])
        send = 0.0
        if index + 1 < len(plan.stages):
            latency, per_byte = transfer_cost(homes[index], homes[index + 1], tables)
            send = latency + per_byte * float(crossing[stage.last_layer]) * scale
        runs = plan.runs(index)
        again = sum(float(forward[run.start - held.start : run.stop - held.start].sum()) for run in runs)
        kept, work = _memory(held, runs, stash, working, crossing)
        ring = allreduce_cost(homes[index], tables) * parameters[held]
        total = float(ring.sum())
        found.append(
            StageCosts(
                forward_seconds=float(forward.sum()),
                backward_seconds=float(backward.sum()) + again,
                send_forward_seconds=send,
                send_backward_seconds=send,
                allreduce_seconds=total,
                exposed_seconds=exposed_seconds(weights if splits else backward, ring) if plan.overlap else total,
                fixed_bytes=float(parameters[held].sum()) * (2 + optimizer_slots),
                stash_bytes=kept * scale / r,
                working_bytes=work * scale / r,
                weights_seconds=float(weights.sum()) if splits else 0.0,
            )
        )
    return tuple(found)


def _memory(
    held: slice, runs: Sequence[range], stash: Floats, working: Floats, crossing: Floats
) -> tuple[float, float]:
    """Bytes of a stage's stash and of its largest working set, what a run makes again included, at the profile's batch.

    ``held``: the stage's layers; ``crossing``: bytes over the cut after each layer.
    """
    entering = sum(float(crossing[run.start - 1]) for run in runs if run.start)
    kept = [layer for layer in range(held.start, held.stop) if not any(layer in run for run in runs)]
    again = [float(working[run.start : run.stop].max() + stash[run.start : run.stop].sum()) for run in runs]
    return float(stash[kept].sum()) + entering, max([float(working[held].max()), *again])


def exposed_seconds(backward: Sequence[float] | Floats, ring: Floats) -> float:
    """Seconds of AllReduce after the last backward when each layer's starts as soon as its gradient is there.

    ``backward``, ``ring``: seconds of each layer's backward and AllReduce, in forward order; one AllReduce at a time.
    """
    return float(exposed_of(np.asarray(backward, np.float64), ring, 0, len(ring)))


@compiled
def exposed_of(backward: Floats, ring: Floats, first: int, end: int) -> float:
    """``exposed_seconds`` of the layers ``first`` to ``end`` (exclusive), for compiled callers."""
    ready, done = 0.0, 0.0
    for layer in range(end - 1, first - 1, -1):
        ready += backward[layer]
        done = max(done, ready) + ring[layer]
    return max(0.0, done - ready)
