"""Shares of rows by speed: a stage's micro-batch is cut into whole rows so that its slowest devices end earliest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile, profile_on
from dapple_tf.simulator.arrays import Floats, Integers

_SAME = 1e-9  # a relative difference below this is a rounding error
_HALVINGS = 50


def share_rows(
    stages: Sequence[StagePlan], micro_batch_size: int, profile: Profile, cluster: Cluster
) -> tuple[StagePlan, ...]:
    """Return the stages with shares by the speeds of their devices; those that have shares keep them.

    Shares are whole rows of a micro-batch of ``micro_batch_size`` samples, chosen so that the longest forward plus the
    longest backward of a replica is least. A device that is too slow for even one row is left out. A stage whose
    devices are equally fast keeps no shares, which means equal rows. Stages on the same devices get the same shares, by
    the seconds of all their layers. Nothing changes where all devices are of one kind. Raises ProfileError for a kind
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
    """Return whether neighbouring stages have equal shares at every cut whose tensors cannot be split."""
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
    profiles = [profile_on(profile, cluster, stage.devices[of_devices.index(name)]) for name in names]
    forward, backward = np.array([_seconds(together, size / stage.replicas, own) for own in profiles]).T.copy()
    if len(set(forward)) == len(set(backward)) == 1:  # equal rows, as if all devices of the cluster were equal
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


# --- Whole rows for each device of a stage
# The search of planner "best" does the same in C++ (``Evaluator::share_by_kind``); a test holds the steps equal.


def cut_rows(rows: int, speeds: Floats) -> Integers:
    """Return whole numbers of rows, in all ``rows``, so that the largest of rows / speed is least.

    Of equally good cuts, rows go to the earlier devices. A device may get none; one of speed 0 gets none.
    """
    counts: Integers = (rows * speeds / speeds.sum() * (1 + _SAME)).astype(np.int64)
    for _ in range(rows - counts.sum()):
        chosen, least = 0, np.inf
        for i, speed in enumerate(speeds):
            if speed > 0 and (counts[i] + 1) / speed < least * (1 - _SAME):
                chosen, least = i, (counts[i] + 1) / speed
        counts[chosen] += 1
    return counts


def share_by_kind(rows: int, kinds: Integers, forward: Floats, backward: Floats) -> Integers:
    """Return the rows of each device, in all ``rows``, so that the longest forward plus the longest backward is least.

    ``kinds``: the number of each device's kind. ``forward``, ``backward`` [kinds]: seconds of the same samples on each
    kind; seconds grow in proportion to the rows. The longest forward and the longest backward may be on different
    devices. If no other rows are better, the result is that of ``cut_rows`` for the sum of forward and backward.
    """
    used, kinds = np.unique(kinds, return_inverse=True)
    forward, backward = forward[used], backward[used]
    both = forward + backward
    found = cut_rows(rows, np.array([1 / both[k] if both[k] > 0 else 1.0 for k in kinds]))
    counts, proportional = np.zeros(len(forward), np.int64), True
    for k in kinds:
        counts[k] += 1
        if forward[k] <= 0 or backward[k] <= 0:
            return found
        ratio = forward[kinds[0]] * backward[k]
        proportional = proportional and abs(forward[k] * backward[kinds[0]] - ratio) <= _SAME * ratio
    if proportional:
        return found
    least = _longest(found, kinds, forward) + _longest(found, kinds, backward)
    caps, better = np.zeros(len(forward), np.int64), False
    shortest_forward = _longest(cut_rows(rows, 1 / forward[kinds]), kinds, forward)
    shortest_backward = _longest(cut_rows(rows, 1 / backward[kinds]), kinds, backward)
    for p in range(len(forward)):  # the kind whose forward is the longest
        count = int(np.ceil(shortest_forward / forward[p] * (1 - _SAME)))
        while count * forward[p] + shortest_backward < least * (1 - _SAME):
            most = (count * forward[p] / forward * (1 + _SAME)).astype(np.int64)
            low, high = shortest_backward * (1 - _SAME), least * (1 - _SAME) - count * forward[p]
            if _room(high, most, counts, backward) >= rows:
                for _ in range(_HALVINGS):
                    middle = (low + high) / 2
                    if _room(middle, most, counts, backward) >= rows:
                        high = middle
                    else:
                        low = middle
                least, better = count * forward[p] + high, True
                caps = np.minimum(most, (high / backward * (1 + _SAME)).astype(np.int64))
            count += 1
    return cut_rows(rows, caps[kinds].astype(np.float64)) if better else found


def _longest(rows: Integers, kinds: Integers, seconds: Floats) -> float:
    """Return the seconds of the device that takes longest for its rows."""
    return float(np.max(rows * seconds[kinds], initial=0.0))


def _room(backward_seconds: float, most: Integers, counts: Integers, backward: Floats) -> int:
    """Return how many rows all devices can compute backward in this time, each at most the ``most`` of its kind."""
    fit = (min(most[k], int(backward_seconds / backward[k] * (1 + _SAME))) for k in range(len(counts)))
    return sum(count * rows for count, rows in zip(counts.tolist(), fit, strict=True))
