"""Seconds of a stage whose replicas are unequal: those of the slowest with its share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.device_costs import profile_on
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.arrays import Floats


class BackwardSeconds(NamedTuple):
    """Seconds of a stage's backward: in all, with what it computes again; of each layer; and of its weights' part."""

    total: float
    layers: Floats
    weights: Floats


class ReplicaSeconds:
    """Seconds of the replicas of stages; what was computed for one stage is kept for the next."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self._profile = profile
        self._cluster = cluster
        self._known: dict[tuple[str | None, float], tuple[Floats, Floats, Floats]] = {}
        self._sums: dict[tuple[str | None, float], list[float]] = {}

    def slowest(self, stage: StagePlan, samples: float, recomputed: Sequence[range]) -> tuple[float, BackwardSeconds]:
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

    def compute_seconds(self, stage: StagePlan, samples: float) -> float:
        """Return the seconds of forward and backward of a micro-batch on the replica where they take longest.

        In less time than ``slowest`` and without re-computation. It may differ by rounding.
        """
        longest = 0.0
        for device, part in self._parts(stage, samples):
            key = self._cluster.kind_of(device), part
            if key not in self._sums:
                forward, backward, _ = self._rows(device, part)
                self._sums[key] = [0.0, *np.cumsum(forward + backward).tolist()]
            sums = self._sums[key]
            longest = max(longest, sums[stage.last_layer + 1] - sums[stage.first_layer])
        return longest

    def _parts(self, stage: StagePlan, samples: float) -> list[tuple[int, float]]:
        """Return a device of each kind in ``stage``, the one with most samples, and its samples."""
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
