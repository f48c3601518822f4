"""A lower bound of the step of every plan: what the devices must compute."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.planning_problem import PlanningProblem
from profiler.profile import Profile


def least_compute_seconds(problem: PlanningProblem) -> float:
    """Return a lower bound (seconds) of the step of any plan of this problem, under any schedule.

    A device that computes x samples of a micro-batch in a layer needs, for each sample, the layer's seconds for x
    samples divided by x. On equal devices the busiest computes at least as long as the mean of all. On devices of
    several kinds each second of a device of kind k is weighted by w_k, where the weights of all devices add up to 1:
    the step is at least the weighted sum of all devices' seconds, and each sample of a layer costs at least the least
    of w_k times its seconds there. The weights are the speeds of the kinds for the whole model.
    """
    cluster, sizes = problem.cluster, problem.micro_batch_sizes
    kinds = list(dict.fromkeys(cluster.device_kinds))
    seconds = np.array(
        [
            _seconds_of_a_sample(problem.profile.of_kind(kind, cluster.kind_speed(kind)), sizes, cluster.devices)
            for kind in kinds
        ]
    )
    speeds = 1 / np.maximum(seconds.sum(axis=1), 1e-300)
    total = sum(speeds[kinds.index(kind)] for kind in cluster.device_kinds)
    weighted = seconds * (speeds / total)[:, None]
    return float(weighted.min(axis=0).sum()) * problem.global_batch_size


def _seconds_of_a_sample(profile: Profile, sizes: tuple[int, ...], devices: int) -> NDArray[np.float64]:
    """Return the least seconds of forward and backward of each layer for one sample, at any number of samples."""
    # Seconds are linear in the samples between measured sizes, so seconds / x is least at one of them or at an end.
    least, most = min(sizes) / devices, float(max(sizes))
    points = [least, most, *(float(size) for size in profile.measured_sizes if least < size < most)]
    rows = [(profile.forward_seconds(x) + profile.backward_seconds(x)) / x for x in points]
    least_seconds: NDArray[np.float64] = np.array(rows).min(axis=0)
    return least_seconds
