"""Shares of rows by speed: a stage's micro-batch is cut into whole rows so that its slowest devices end earliest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dapple_tf.planner.search.row_cuts import share_by_kind
from dapple_tf.plans import StagePlan
from profiler.cluster import Cluster
from profiler.device_costs import profile_on
from profiler.profile import Profile


def share_rows(
    stages: Sequence[StagePlan], micro_batch_size: int, profile: Profile, cluster: Cluster
) -> tuple[StagePlan, ...]:
    """Return the stages with shares by the speeds of their devices; those that have shares keep them.

    Shares are whole rows of a micro-batch of ``micro_batch_size`` samples, for which the longest forward and the
    longest backward of a replica together are least. A device that is too slow for a row is left out. A stage whose
    devices are equally fast has no shares: it shares equally. Stages on the same devices get the same shares, by the
    seconds of all their layers. Nothing changes where all devices are of one kind. Raises ProfileError for a kind
    without costs.
    """
    if cluster.is_uniform:
        return tuple(stages)
    by_devices: dict[tuple[int, ...], list[StagePlan]] = {}
    for stage in stages:
        by_devices.setdefault(stage.devices, []).append(stage)
    return tuple(
        _with_shares(stage, by_devices[stage.devices], micro_batch_size, profile, cluster)
        if stage.shares is None and stage.replicas > 1
        else stage
        for stage in stages
    )


def can_meet(stages: Sequence[StagePlan], profile: Profile) -> bool:
    """Return whether stages meet with equal shares wherever tensors cannot be split."""
    return not any(
        right.first_layer in profile.unsplittable
        and (left.replicas != right.replicas or left.row_shares != right.row_shares)
        for left, right in itertools.pairwise(stages)
    )


def _with_shares(
    stage: StagePlan, together: Sequence[StagePlan], size: int, profile: Profile, cluster: Cluster
) -> StagePlan:
    """Return ``stage`` with the shares of all stages ``together`` on its devices."""
    of_devices = [cluster.kind_of(device) for device in stage.devices]
    names = list(dict.fromkeys(of_devices))
    forward, backward = np.array(
        [
            _seconds(
                together, size / stage.replicas, profile_on(profile, cluster, stage.devices[of_devices.index(name)])
            )
            for name in names
        ]
    ).T.copy()
    if len(set(forward)) == len(set(backward)) == 1:  # shares equally, as where all devices of the cluster are equal
        return replace(stage, devices=stage.devices[:size])
    rows = share_by_kind(size, np.array([names.index(name) for name in of_devices]), forward, backward)
    kept = [(device, float(count)) for device, count in zip(stage.devices, rows, strict=True) if count]
    devices, shares = zip(*kept, strict=True)
    return replace(stage, devices=devices, shares=None if len(set(shares)) == 1 else shares)


def _seconds(stages: Sequence[StagePlan], samples: float, profile: Profile) -> tuple[float, float]:
    """Return the seconds of forward and of backward of all these stages."""
    forward, backward = (
        sum(float(seconds[stage.first_layer : stage.last_layer + 1].sum()) for stage in stages)
        for seconds in (profile.forward_seconds(samples), profile.backward_seconds(samples))
    )
    return forward, backward
