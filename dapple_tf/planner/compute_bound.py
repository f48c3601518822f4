"""A lower bound of the step of every plan on a number of equal devices: what they must compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profiler.profile import Profile


def least_compute_seconds(profile: Profile, devices: int, global_batch_size: int, sizes: Sequence[int]) -> float:
    """Return the least seconds of a step of any plan on up to ``devices`` devices, of micro-batches of these ``sizes``.

    Each of r replicas computes x = b / r samples of a micro-batch of b. So a layer needs, for each sample, its seconds
    for x samples divided by x, on some device. The busiest device computes at least as long as the mean of all devices.
    """
    # Seconds are linear in the samples between measured sizes, so seconds / x is least at one of them or at an end.
    least, most = min(sizes) / devices, float(max(sizes))
    points = [least, most, *(float(size) for size in profile.measured_sizes if least < size < most)]
    rows = [(profile.forward_seconds(x) + profile.backward_seconds(x)) / x for x in points]
    return float(np.min(rows, axis=0).sum()) * global_batch_size / devices
