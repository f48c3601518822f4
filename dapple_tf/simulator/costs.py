"""The cost model: seconds and bytes of each stage of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile, profile_on, profiles_on
from dapple_tf.simulator.arrays import Floats
from dapple_tf.simulator.memory import values_per_weight
from dapple_tf.simulator.transfer import LinkCosts, ring_seconds
from dapple_tf.timeline.stage_costs import StageCosts


def stage_costs(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    optimizer_slots: int = 2,
    samples: int | None = None,
    whole_rows: bool = True,
) -> tuple[StageCosts, ...]:
    """Return the costs of every stage of ``plan``: the profile scaled to a micro-batch, over the cluster's links.

    ``optimizer_slots``: values that the optimizer keeps of each weight (2 for Adam, 0 for plain SGD). ``samples``: of
    the micro-batch; without it, ``plan.micro_batch_size``. A stage takes as long as the device that needs longest for
    its rows, and has the stash of the device with most rows. ``whole_rows``: without it replicas that have no shares
    take equal fractions of the rows, as in the papers. Re-computed layers form runs of consecutive layers: backward
    runs the forward of one run at a time again, and only the run's inputs are stashed (DAPPLE, section VI.E). Raises
    ProfileError for a kind of devices without costs.
    """
    model = CostModel(profile, cluster, whole_rows=whole_rows)
    return model.stage_costs(plan, optimizer_slots=optimizer_slots, samples=samples)


def one_device_seconds(profile: Profile, cluster: Cluster, samples: int) -> float:
    """Return the seconds that the fastest device of the cluster takes for a micro-batch of ``samples`` samples."""
    return min(own.model_seconds(samples) for own in profiles_on(profile, cluster))


class BackwardSeconds(NamedTuple):
    """Seconds of a stage's backward.

    ``total``: of all layers, with the forwards that are computed again. ``layers``: of each layer, without these.
    ``weights``: of each layer's gradients of weights.
    """

    total: float
    layers: Floats
    weights: Floats


class CostModel:
    """The cost model of one profile on one cluster; the costs of links and replicas are kept from plan to plan."""

    def __init__(self, profile: Profile, cluster: Cluster, *, whole_rows: bool = True) -> None:
        self._profile, self._cluster, self._whole_rows = profile, cluster, whole_rows
        self._links = LinkCosts(cluster)
        self._known: dict[tuple[str | None, float], tuple[Floats, Floats, Floats]] = {}
        self._sums: dict[tuple[str | None, float], list[float]] = {}
        self._crossing, self._working = profile.crossing_bytes(), profile.working_bytes()
        self._parameter_sums = [0.0, *np.cumsum(profile.parameter_bytes).tolist()]

    def in_rows(self, stage: StagePlan, samples: int) -> StagePlan:
        """Return the stage with the rows of a micro-batch as its shares, where rows are whole or shares are given."""
        return stage.in_rows(samples) if self._whole_rows or stage.row_shares else stage

    def allreduce_seconds(self, stage: StagePlan) -> float:
        """Return the seconds of one AllReduce of all gradients of ``stage``, as in ``stage_costs`` up to rounding."""
        trained = self._parameter_sums[stage.last_layer + 1] - self._parameter_sums[stage.first_layer]
        return ring_seconds(*self._links.allreduce(tuple(self._cluster.homes[d] for d in stage.devices)), trained)

    def stage_costs(
        self, plan: Plan, *, optimizer_slots: int = 2, samples: int | None = None
    ) -> tuple[StageCosts, ...]:
        """Return the costs of every stage of ``plan``; see the function ``stage_costs``."""
        homes = [tuple(self._cluster.homes[d] for d in stage.devices) for stage in plan.stages]
        parameters = self._profile.parameter_bytes
        samples = plan.micro_batch_size if samples is None else samples
        stages = [self.in_rows(stage, samples) for stage in plan.stages]
        splits = plan.spec.splits_backward
        ends_split = plan.spec.ends_split(len(plan.stages), plan.micro_batches)
        scale = samples / self._profile.batch_size
        found = []
        for index, stage in enumerate(stages):
            layers = slice(stage.first_layer, stage.last_layer + 1)
            runs = plan.runs(index)
            forward, backward = self._slowest(stage, samples, runs)
            send = 0.0
            if index + 1 < len(stages) and stages[index + 1].devices != stage.devices:
                shares = stage.row_shares, stages[index + 1].row_shares
                latency, per_byte = self._links.transfer(homes[index], homes[index + 1], shares=shares)
                send = latency + per_byte * float(self._crossing[stage.last_layer]) * scale
            parts = sum(stage.row_shares) / max(stage.row_shares) if stage.row_shares else stage.replicas
            trained = float(parameters[layers].sum())
            stashed, work = self._memory(layers, runs)
            ring_cost = self._links.allreduce(homes[index])
            # Where AllReduce overlaps backward each layer with parameters has a ring of its own and pays its latency.
            rings = [ring_seconds(*ring_cost, x) for x in (parameters[layers] if plan.overlap else [trained])]
            total, gradients = float(sum(rings)), backward.weights if index in ends_split else backward.layers
            found.append(
                StageCosts(
                    forward_seconds=forward,
                    backward_seconds=backward.total,
                    send_forward_seconds=send,
                    send_backward_seconds=send,
                    allreduce_seconds=total,
                    exposed_seconds=exposed_seconds(gradients, np.array(rings)) if plan.overlap else total,
                    fixed_bytes=trained * values_per_weight(optimizer_slots, plan.slot_replicas(stage)),
                    stash_bytes=stashed * scale / parts,
                    working_bytes=work * scale / parts,
                    weights_seconds=float(backward.weights.sum()) if splits else 0.0,
                    rings=overlapped_rings(gradients, rings) if plan.overlap else (),
                )
            )
        return tuple(found)

    def _slowest(self, stage: StagePlan, samples: float, recomputed: Sequence[range]) -> tuple[float, BackwardSeconds]:
        """Return the seconds of forward and of backward of a stage, each on the replica where it takes longest.

        ``samples``: of a micro-batch. ``recomputed``: the ranges of layers whose forward is a part of backward.
        """
        layers, forwards, backwards = slice(stage.first_layer, stage.last_layer + 1), [], []
        for device, part in self._parts(stage, samples):
            forward, backward, weights = (row[layers] for row in self._rows(device, part))
            again = sum(float(forward[run.start - layers.start : run.stop - layers.start].sum()) for run in recomputed)
            forwards.append(float(forward.sum()))
            backwards.append(BackwardSeconds(float(backward.sum()) + again, backward, weights))
        return max(forwards), max(backwards, key=lambda found: found.total)

    def _memory(self, layers: slice, runs: Sequence[range]) -> tuple[float, float]:
        """Return the bytes of a stage's stash, and of its largest working set, for the profile's batch.

        A re-computed run adds its inputs to the stash, and all its stash to its working set.
        """
        stash, working = self._profile.stash_bytes, self._working
        if not runs:
            return float(stash[layers].sum()), float(working[layers].max())
        run_inputs = sum(float(self._crossing[run.start - 1]) for run in runs if run.start)
        others = [layer for layer in range(layers.start, layers.stop) if not any(layer in run for run in runs)]
        of_runs = [float(working[run.start : run.stop].max() + stash[run.start : run.stop].sum()) for run in runs]
        return float(stash[others].sum()) + run_inputs, max([float(working[layers].max()), *of_runs])

    def compute_seconds(self, stage: StagePlan, samples: int) -> float:
        """Return the seconds of forward and backward of a micro-batch on the replica where they take longest.

        This is quicker than ``stage_costs``, from which it may differ by rounding. Re-computation is left out.
        """
        longest = 0.0
        for device, part in self._parts(self.in_rows(stage, samples), samples):
            key = self._cluster.kind_of(device), part
            if key not in self._sums:
                forward, backward, _ = self._rows(device, part)
                self._sums[key] = [0.0, *np.cumsum(forward + backward).tolist()]
            sums = self._sums[key]
            longest = max(longest, sums[stage.last_layer + 1] - sums[stage.first_layer])
        return longest

    def _parts(self, stage: StagePlan, samples: float) -> list[tuple[int, float]]:
        """Return for each kind of device in ``stage`` the device with most samples, and its samples."""
        shares = stage.row_shares
        if self._cluster.is_uniform and not shares:
            return [(stage.devices[0], samples / stage.replicas)]
        largest: dict[str | None, tuple[int, int]] = {}
        for replica, device in enumerate(stage.devices):
            kind, share = self._cluster.kind_of(device), shares[replica] if shares else 1
            largest[kind] = max(largest.get(kind, (0, device)), (share, device))
        whole = sum(shares) or stage.replicas
        return [(device, samples * share / whole) for share, device in largest.values()]

    def _rows(self, device: int, samples: float) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of every layer on a device: of forward, backward, and the weights' part of backward."""
        key = self._cluster.kind_of(device), samples
        if key not in self._known:
            own = profile_on(self._profile, self._cluster, device)
            self._known[key] = own.forward_seconds(samples), own.backward_seconds(samples), own.weights_seconds(samples)
        return self._known[key]


def exposed_seconds(backward: Sequence[float] | Floats, ring: Floats) -> float:
    """Return the seconds of AllReduce after the last backward, if each layer's starts as soon as its gradient exists.

    ``backward``, ``ring``: seconds of each layer's backward and AllReduce, in forward order; one AllReduce runs at a
    time.
    """
    ready, done = 0.0, 0.0
    for layer in range(len(ring) - 1, -1, -1):
        ready += backward[layer]
        done = max(done, ready) + ring[layer]
    return float(max(0.0, done - ready))


def overlapped_rings(backward: Floats, rings: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Return ``StageCosts.rings``; the arguments are as in ``exposed_seconds``."""
    before = np.cumsum(backward) - backward  # seconds of the layers whose backward comes later
    pairs = zip(before.tolist(), rings, strict=True)
    return tuple((left, seconds) for left, seconds in reversed(list(pairs)) if seconds > 0)
