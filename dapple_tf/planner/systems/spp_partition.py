"""SPP's dynamic program W(l, xi, r, i): partition, replication and mapping, PRM (SPP, section IV.B.2, appendix A)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.systems.spp_execution import StageSeconds
from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.compiled import compiled


class LeastBandwidths(NamedTuple):
    """The least bandwidths between V devices, which are numbered in their order.

    ``among`` [V + 1, V + 1]: between the devices low to high (exclusive). ``between`` [V + 1, V + 1, V + 1]: from low
    to middle and those from there to high.
    """

    among: Floats
    between: Floats


class SppCosts(NamedTuple):
    """Costs of L layers on V devices in their order, and M micro-batches.

    ``forward``, ``backward`` [R + 1, L + 1]: prefix sums of p_l^f and p_l^b on each of r replicas, for r up to R, the
    most replicas that a stage may have. ``parameter_bytes`` [L + 1]: prefix sums of alpha_l. ``sent_bytes`` [L + 1]:
    d^f_{l,l+1} of a micro-batch, at l; d^b is as much. ``equal_only`` [L + 1]: whether stages with different replicas
    cannot meet behind layer l. ``least``: the bandwidths.
    """

    forward: Floats
    backward: Floats
    parameter_bytes: Floats
    sent_bytes: Floats
    equal_only: NDArray[np.bool_]
    least: LeastBandwidths
    micro_batches: int


@dataclass(frozen=True)
class SppStage:
    """A stage: layers ``first`` to ``end`` (exclusive), on the devices ``low`` to ``high`` (exclusive) of the order."""

    first: int
    end: int
    low: int
    high: int

    @property
    def replicas(self) -> int:
        """|F(s)|."""
        return self.high - self.low


class Partition(NamedTuple):
    """W(|S|) in seconds, and stages that reach it."""

    seconds: float
    stages: tuple[SppStage, ...]


def find_partitions(costs: SppCosts) -> tuple[Partition, ...]:
    """Return the stages with the least W for each number of stages xi from 1 on that there are any for (lines 5 to 8).

    All devices are used, in their order. W is the longest time of a stage (all micro-batches and the AllReduce) or of a
    channel (both directions together). ``r`` beyond the samples of a micro-batch is left out.
    """
    layers, devices = len(costs.parameter_bytes) - 1, len(costs.least.among) - 1
    values, cut, before = _solve(costs, min(layers, devices))
    found = []
    for xi in range(1, len(values)):
        replicas = int(np.argmin(values[xi]))
        if np.isfinite(values[xi, replicas]):
            found.append(Partition(float(values[xi, replicas]), _stages(cut, before, xi, layers, replicas, devices)))
    return tuple(found)


def stage_seconds(costs: SppCosts, stages: Sequence[SppStage]) -> StageSeconds:
    """Return the seconds of the stages, of the transfers between them, and of their AllReduces (equation 1)."""
    sends = [_send_seconds(costs, a.end, a.low, a.high, b.high) for a, b in itertools.pairwise(stages)]
    return StageSeconds(
        np.array([costs.forward[s.replicas, s.end] - costs.forward[s.replicas, s.first] for s in stages]),
        np.array([costs.backward[s.replicas, s.end] - costs.backward[s.replicas, s.first] for s in stages]),
        np.array(sends, np.float64),
        np.array([_allreduce_seconds(costs, s.first, s.end, s.low, s.high) for s in stages]),
    )


def least_bandwidths(bandwidths: Floats) -> LeastBandwidths:
    """Return the least bandwidths; ``bandwidths`` [V, V]: of the devices in their order."""
    return LeastBandwidths(*_least_bandwidths(bandwidths))


@compiled
def _least_bandwidths(bandwidths: Floats) -> tuple[Floats, Floats]:
    """Return the fields of ``LeastBandwidths``."""
    devices = len(bandwidths)
    among = np.full((devices + 1, devices + 1), np.inf)
    between = np.full((devices + 1, devices + 1, devices + 1), np.inf)
    for low in range(devices):
        for high in range(low + 2, devices + 1):
            newest = bandwidths[low : high - 1, high - 1].min()
            among[low, high] = min(among[low, high - 1], newest)
        for middle in range(low + 1, devices):
            for high in range(middle + 1, devices + 1):
                newest = bandwidths[low:middle, high - 1].min()
                between[low, middle, high] = min(between[low, middle, high - 1], newest)
    return among, between


@compiled
def _allreduce_seconds(costs: SppCosts, first: int, end: int, low: int, high: int) -> float:
    """Return A_s (equation 1): 2 (k - 1) / k x bytes over the least bandwidth between any two of the k replicas."""
    k = high - low
    if k == 1:
        return 0.0
    total = costs.parameter_bytes[end] - costs.parameter_bytes[first]
    return float(2 * (k - 1) * total / (k * costs.least.among[low, high]))


@compiled
def _send_seconds(costs: SppCosts, layer: int, low: int, middle: int, high: int) -> float:
    """Return c^f (and c^b) behind ``layer``: d / (|F(s_n)| |F(s_{n+1})|) over the least bandwidth between them.

    In section III.B the bandwidth stands behind the fraction; Algorithm 4 divides by it.
    """
    pairs = (middle - low) * (high - middle)
    return float(costs.sent_bytes[layer] / (pairs * costs.least.between[low, middle, high]))


@compiled
def _solve(costs: SppCosts, most_stages: int) -> tuple[Floats, NDArray[np.int16], NDArray[np.int16]]:
    """Return W(L, xi, r, V) [xi, r], and l' and r' of each W(l, xi, r, i) [xi, l, r, i].

    r' does not depend on l, so the best one of each l' is found first.
    """
    replicas = costs.forward.shape[0] - 1
    layers, devices, m = len(costs.parameter_bytes) - 1, len(costs.least.among) - 1, costs.micro_batches
    values = np.full((most_stages + 1, replicas + 1), np.inf)
    cut = np.zeros((most_stages + 1, layers + 1, replicas + 1, devices + 1), np.int16)
    before = np.zeros((most_stages + 1, layers + 1, replicas + 1, devices + 1), np.int16)
    compute = costs.forward + costs.backward
    now = np.full((layers + 1, replicas + 1, devices + 1), np.inf)
    for r in range(1, min(replicas, devices) + 1):
        for layer in range(1, layers + 1):
            now[layer, r, r] = m * compute[r, layer] + _allreduce_seconds(costs, 0, layer, 0, r)
    values[1] = now[layers, :, devices]
    entering = np.full(layers + 1, np.inf)
    chosen = np.zeros(layers + 1, np.int16)
    for xi in range(2, most_stages + 1):
        earlier = now
        now = np.full((layers + 1, replicas + 1, devices + 1), np.inf)
        for i in range(xi, devices + 1):
            for r in range(1, min(replicas, i - xi + 1) + 1):
                middle = i - r
                for cut_at in range(xi - 1, layers):
                    entering[cut_at] = np.inf
                    for r_before in range(1, min(replicas, middle - xi + 2) + 1):
                        if costs.equal_only[cut_at] and r_before != r:
                            continue
                        both = 2 * m * _send_seconds(costs, cut_at, middle - r_before, middle, i)
                        longest = max(earlier[cut_at, r_before, middle], both)
                        if longest < entering[cut_at]:
                            entering[cut_at], chosen[cut_at] = longest, r_before
                for layer in range(xi, layers + 1):
                    for cut_at in range(layer - 1, xi - 2, -1):
                        own = m * (compute[r, layer] - compute[r, cut_at])
                        own += _allreduce_seconds(costs, cut_at, layer, middle, i)
                        if own >= now[layer, r, i]:
                            break  # the earlier the cut, the longer takes the last stage
                        longest = max(entering[cut_at], own)
                        if longest < now[layer, r, i]:
                            now[layer, r, i] = longest
                            cut[xi, layer, r, i], before[xi, layer, r, i] = cut_at, chosen[cut_at]
        values[xi] = now[layers, :, devices]
    return values, cut, before


def _stages(cut: Integers, before: Integers, xi: int, layers: int, replicas: int, devices: int) -> tuple[SppStage, ...]:
    """Return the stages of W(layers, xi, replicas, devices)."""
    found: list[SppStage] = []
    end, r, i = layers, replicas, devices
    for count in range(xi, 0, -1):
        first, r_before = int(cut[count, end, r, i]), int(before[count, end, r, i])
        found.append(SppStage(first, end, i - r, i))
        end, r, i = first, r_before, i - r
    return tuple(reversed(found))
