"""PipeDream's prediction of a plan: its throughput and its number of minibatches in flight (sections 3.1 and 3.2)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dapple_tf.errors import PlanError
from dapple_tf.planner.systems.hierarchy import Hierarchy
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.arrays import Floats, prefix_sums


@dataclass(frozen=True)
class PipedreamPrediction:
    """The steady state of a plan by PipeDream's formulas.

    ``minibatch_seconds``: the time between the ends of two minibatches of ``minibatch_size`` samples. This is
    A^L(0 -> N, m_L) of the plan. ``noam``: the minibatches in flight per replica of the first stage.
    """

    minibatch_seconds: float
    minibatch_size: int
    noam: int

    @property
    def samples_per_second(self) -> float:
        """The throughput; infinite for a model whose layers take no time."""
        return self.minibatch_size / self.minibatch_seconds if self.minibatch_seconds else float("inf")


def predict_throughput(
    stages: Sequence[StagePlan], profile: Profile, hierarchy: Hierarchy, minibatch_size: int | None = None
) -> PipedreamPrediction:
    """Return the steady state of ``stages`` by the formulas of section 3.1.

    ``minibatch_size``: samples of a minibatch, which one replica of each stage computes; by default the profile's
    batch, as in the paper. T^k is the time of a stage that is alone on m components, or of several stages that divide
    each of the m components in the same way; a boundary between components takes 2 a / B_k. Raises PlanError if stages
    share components but divide them in different ways. With ``hierarchy.flatten()``, which has one level, every plan of
    one stage per device has a prediction.
    """
    size = profile.batch_size if minibatch_size is None else check_minibatch_size(minibatch_size)
    index_of = {device: index for index, device in enumerate(hierarchy.devices)}
    _check_devices(stages, index_of)
    seconds = profile.forward_seconds(size) + profile.backward_seconds(size)
    costs = _Costs(
        hierarchy,
        prefix_sums(seconds).tolist(),
        prefix_sums(profile.parameter_bytes).tolist(),
        [0.0, *(profile.crossing_bytes() * (size / profile.batch_size)).tolist()],
        {stage.first_layer: index for index, stage in enumerate(stages)},
    )
    numbered = [_on(stage, (index_of[device] for device in stage.devices)) for stage in stages]
    slowest = costs.slowest(len(hierarchy.levels), numbered)
    return PipedreamPrediction(slowest, size, count_active_minibatches([stage.replicas for stage in stages]))


def count_active_minibatches(replicas: Sequence[int]) -> int:
    """Return NOAM (section 3.2): ceil(workers / replicas of the first stage); ``replicas``: of each stage."""
    return -(-sum(replicas) // replicas[0])


def check_minibatch_size(size: object) -> int:
    """Return the samples of a minibatch; PlanError unless they are a whole number of at least 1."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(f"minibatch_size is {size!r}, not a whole number of at least 1")
    return size


def replicated_seconds(inner: Floats | float, parameter_bytes: Floats | float, bandwidth: float, m: int) -> Floats:
    """Return T^k as printed in section 3.1: max(inner, 2 (m - 1) bytes / B_k) / m, in seconds per minibatch.

    ``inner``: A^(k-1) of the stage's layers. ``m``: components of level k - 1. The text on the profiler disagrees with
    the formula: there each worker sends (m - 1) / m of the parameters' bytes and receives as many while m minibatches
    are computed, 2 (m - 1) / m x bytes / B_k, which is m times less than the second term of the printed maximum. The
    printed formula is used.
    """
    return np.maximum(inner, 2 * (m - 1) * parameter_bytes / bandwidth) / m


def _check_devices(stages: Sequence[StagePlan], known: Container[int]) -> None:
    """Raise PlanError unless the stages are on different devices, which are all ``known``."""
    stage_of: dict[int, int] = {}
    for index, stage in enumerate(stages):
        for device in stage.devices:
            if device not in known:
                raise PlanError(f"stage {index} is on device {device}, which the hierarchy does not have")
            if stage_of.setdefault(device, index) != index:
                raise PlanError(
                    f"stages {stage_of[device]} and {index} share device {device}: PipeDream's formulas are for one "
                    "stage per device"
                )


@dataclass(frozen=True)
class _Costs:
    """Prefix sums over layers (seconds of a minibatch, parameter bytes), and the bytes that enter each layer's cut.

    ``index_of``: the index of each stage, by its first layer. The methods take stages, or the parts of stages in one
    component; the devices of a part are numbered from the first device of the component.
    """

    hierarchy: Hierarchy
    seconds: list[float]
    parameters: list[float]
    crossing: list[float]
    index_of: dict[int, int]

    def slowest(self, level: int, stages: Sequence[StagePlan]) -> float:
        """Return the seconds per minibatch of the slowest of ``stages``, which share one component of ``level``."""
        first, last = stages[0].first_layer, stages[-1].last_layer
        if level == 0:  # one device, and so one stage
            return self.seconds[last + 1] - self.seconds[first]
        size, bandwidth = self.hierarchy.sizes[level - 1], self.hierarchy.levels[level - 1].bandwidth
        found = []
        for group in self._divide(level, stages, size):
            first, last = group[0].first_layer, group[-1].last_layer
            components = sorted(_components(group[0], size))
            inner = [self.slowest(level - 1, [_within(stage, c, size) for stage in group]) for c in components]
            parameters = self.parameters[last + 1] - self.parameters[first]
            found.append(float(replicated_seconds(max(inner), parameters, bandwidth, len(components))))
            if first > stages[0].first_layer:
                found.append(2 * self.crossing[first] / bandwidth)
        return max(found)

    def _divide(self, level: int, stages: Sequence[StagePlan], size: int) -> list[list[StagePlan]]:
        """Return the stages in groups: those of a group are on the same components, and each component has one group.

        ``size``: the devices of a component. Raises PlanError if the stages cannot be divided so.
        """
        groups: list[list[StagePlan]] = []
        owner: dict[int, int] = {}  # the group of each component
        for stage in stages:
            components = _components(stage, size)
            if not groups or components != _components(groups[-1][0], size):
                groups.append([])
            groups[-1].append(stage)
            shared = any(owner.setdefault(component, len(groups) - 1) != len(groups) - 1 for component in components)
            if shared or len({_within(stage, component, size).replicas for component in components}) > 1:
                raise PlanError(
                    f"stage {self.index_of[stage.first_layer]} divides components of level {level - 1} otherwise than "
                    "the hierarchy allows: stages that share components must have the same ones, and equally many "
                    "devices of each; use hierarchy.flatten()"
                )
        return groups


def _on(stage: StagePlan, devices: Iterable[int]) -> StagePlan:
    return StagePlan(stage.first_layer, stage.last_layer, tuple(sorted(devices)))


def _components(stage: StagePlan, size: int) -> set[int]:
    """Return the components of ``size`` devices that a stage is on."""
    return {device // size for device in stage.devices}


def _within(stage: StagePlan, component: int, size: int) -> StagePlan:
    """Return the part of a stage in one component of ``size`` devices, numbered from the component's first device."""
    return _on(stage, (device % size for device in stage.devices if device // size == component))
