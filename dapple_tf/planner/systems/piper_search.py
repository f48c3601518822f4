"""Piper's dynamic program over downsets of a chain (Tarnawski et al., NeurIPS 2021, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.compiled import compiled

# A little more than 1: a ceiling times it is above the load that it was computed from, however that was rounded.
_ABOVE = 1 + 1e-9


class PiperCosts(NamedTuple):
    """Costs of N blocks for a micro-batch.

    Sums over the first 0 to N blocks: ``forward`` and ``backward`` seconds of a replica, [degrees, N + 1], where row
    d - 1 is for d replicas; ``parameter_bytes`` and ``stash_bytes``, [N + 1]. ``crossing_bytes`` [N + 1]: before each
    block, 0 at the ends. ``working_bytes`` [N]. ``values_per_weight``: the weight, its gradient, and slots.
    ``bandwidth``: bytes per second. ``must_recompute``: whether a stage that keeps its activations is not allowed.
    """

    forward: Floats
    backward: Floats
    crossing_bytes: Floats
    parameter_bytes: Floats
    stash_bytes: Floats
    working_bytes: Floats
    values_per_weight: float
    bandwidth: float
    micro_batches: int
    memory_bytes: float
    must_recompute: bool


class PiperStage(NamedTuple):
    """A stage: blocks ``first`` to ``end`` (exclusive), its data-parallel degree d, and whether it re-computes."""

    first: int
    end: int
    degree: int
    recompute: bool


def find_configuration(costs: PiperCosts, devices: int, ceiling: float = np.inf) -> tuple[PiperStage, ...]:
    """Return the stages with the least maximum load on at most ``devices`` devices; empty where none fits the memory.

    dp[j][s] is the least maximum load of the blocks from j on (what is left of a downset) on exactly s devices. With
    t = 1 the paper's two parameters, devices and sum of data-parallel degrees, are one. Of equal loads the fewest
    devices are used, then the fewest replicas of the earliest stage, and activations are kept rather than re-computed.
    ``ceiling``: a load that is known to be reached; entries that cannot stay within it are left out.
    """
    load, end, degree, again = _fill(costs, devices, ceiling * _ABOVE)
    used = int(np.argmin(load[0, 1:])) + 1
    if not np.isfinite(load[0, used]):
        return ()
    stages, first = list[PiperStage](), 0
    while first < load.shape[0] - 1:
        at = first, used
        stages.append(PiperStage(first, int(end[at]), int(degree[at]), bool(again[at])))
        first, used = int(end[at]), used - int(degree[at])
    return tuple(stages)


def largest_load(costs: PiperCosts, stages: Sequence[PiperStage]) -> float:
    """Return the maximum load of ``stages``; infinite where there are none, or one does not fit."""
    found, left = [np.inf][: not stages], sum(stage.degree for stage in stages)
    for stage in stages:
        working = float(costs.working_bytes[stage.first : stage.end].max())
        found.append(_stage_load(costs, stage.first, stage.end, stage.degree, left, working)[0])
        left -= stage.degree
    return max(found)


def count_steps(blocks: int, devices: int) -> int:
    """Return the stages that one dynamic program tries."""
    return blocks**2 * devices**2 // 4


@compiled
def _stage_load(c: PiperCosts, first: int, end: int, d: int, s: int, working: float) -> tuple[float, bool]:
    """Return the load of blocks ``first`` to ``end`` on ``d`` devices, and whether it re-computes; infinite if neither.

    ``s``: the devices of this stage and of all later ones. ``working``: the largest ``working_bytes`` of the blocks.
    """
    held = min((s + d - 1) // d, c.micro_batches)
    parameters = c.parameter_bytes[end] - c.parameter_bytes[first]
    forward = c.forward[d - 1, end] - c.forward[d - 1, first]
    seconds = forward + c.backward[d - 1, end] - c.backward[d - 1, first]
    seconds += 2 * (c.crossing_bytes[first] + c.crossing_bytes[end]) / d / c.bandwidth
    seconds += 2 * (d - 1) / d * parameters / c.bandwidth / c.micro_batches
    stash = (c.stash_bytes[end] - c.stash_bytes[first]) / d
    fixed = parameters * c.values_per_weight + working / d
    if not c.must_recompute and fixed + held * stash <= c.memory_bytes:
        return seconds, False
    if fixed + stash + held * c.crossing_bytes[first] / d <= c.memory_bytes:
        return seconds + forward, True
    return np.inf, True


@compiled
def _fill(c: PiperCosts, devices: int, ceiling: float) -> tuple[Floats, Integers, Integers, Integers]:
    """Return dp, [N + 1, devices + 1], and the end, degree and re-computation of the first stage of each entry.

    Loads of ``ceiling`` and more are infinite.
    """
    blocks, most = len(c.working_bytes), len(c.forward)
    load = np.full((blocks + 1, devices + 1), np.inf)
    end = np.zeros((blocks + 1, devices + 1), np.int64)
    degree = np.zeros((blocks + 1, devices + 1), np.int64)
    again = np.zeros((blocks + 1, devices + 1), np.int64)
    load[blocks, 0] = 0.0
    work = np.zeros(blocks + 1)  # the least seconds of all devices together that the blocks from each on take
    for j in range(blocks - 1, -1, -1):
        least = np.inf
        for d in range(1, most + 1):
            seconds = c.forward[d - 1, j + 1] - c.forward[d - 1, j] + c.backward[d - 1, j + 1] - c.backward[d - 1, j]
            least = min(least, d * seconds)
        work[j] = work[j + 1] + least
    for j in range(blocks - 1, -1, -1):
        for s in range(1, devices + 1):
            if work[j] > s * ceiling or work[0] - work[j] > (devices - s) * ceiling:
                continue
            best = ceiling
            for d in range(1, min(s, most) + 1):
                forward, backward, working = c.forward[d - 1], c.backward[d - 1], 0.0
                for i in range(j + 1, blocks + 1):
                    working = max(working, c.working_bytes[i - 1])
                    if load[i, s - d] >= best:
                        continue
                    if forward[i] - forward[j] + backward[i] - backward[j] >= best:
                        break  # a longer stage computes no less
                    own, recompute = _stage_load(c, j, i, d, s, working)
                    largest = max(own, load[i, s - d])
                    if largest < best:
                        best = largest
                        load[j, s], end[j, s], degree[j, s], again[j, s] = largest, i, d, recompute
    return load, end, degree, again
