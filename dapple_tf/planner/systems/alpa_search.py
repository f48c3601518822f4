"""Alpa's dynamic program: slice operators into stages on submeshes (Zheng et al., OSDI 2022, section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.compiled import compiled

# A little less than 1: a bound times this is no more than the seconds that it bounds, however these are rounded.
_BELOW = 1 - 1e-9


class MeshCosts(NamedTuple):
    """Costs of the runs of operators i to j (inclusive) on each submesh, [submeshes, K, K].

    ``seconds``: t_intra of a micro-batch. ``fixed_bytes`` and ``stash_bytes`` of a device: mem_stage and mem_act.
    ``sizes`` [submeshes]: devices. ``devices``: N M. ``micro_batches``: B. ``memory_bytes``: mem_device.
    """

    seconds: Floats
    fixed_bytes: Floats
    stash_bytes: Floats
    sizes: Integers
    devices: int
    micro_batches: int
    memory_bytes: float


def slice_operators(costs: MeshCosts) -> tuple[tuple[int, int, int], ...]:
    """Return the stages (first operator, last operator, submesh) with the least T; empty where none fits the memory.

    F(s, k, d; t_max) is the least sum of latencies of operators k to K in s stages on d devices, none slower than
    t_max. The paper tries t_max in rising order until (B - 1) t_max alone is too much. Here intervals of t_max are
    halved. An interval is left out if F at its upper end plus (B - 1) times its lower end is no less than the best T so
    far. This is exact too, since F does not rise with t_max. F is solved without s first, as if each stage held one
    micro-batch: where the stages found fit the memory, that is F.
    """
    limits, more = _limits(costs), costs.micro_batches - 1
    first = _solve(costs, np.inf)
    stages, best = first.stages, first.latency
    intervals = [(0, len(limits) - 1, first.total)]
    while intervals:
        low, high, least = intervals.pop()
        if low > high or least + more * limits[low] >= best * _BELOW:
            continue
        middle = (low + high) // 2
        found = _solve(costs, limits[middle])
        if found.latency < best:
            stages, best = found.stages, found.latency
        intervals += [(middle + 1, high, least), (low, middle - 1, found.total)]
    return stages


def count_steps(operators: int, sizes: Sequence[int]) -> int:
    """Return the steps of one dynamic program: stages, first and last operators, devices, submeshes."""
    return min(operators, max(sizes)) * operators**2 // 2 * max(sizes) * len(sizes)


def _limits(costs: MeshCosts) -> Floats:
    """Return every latency that a stage can have, ascending."""
    rows, columns = np.triu_indices(costs.seconds.shape[1])
    found = np.unique(costs.seconds[:, rows, columns])
    limits: Floats = found[np.isfinite(found)]
    return limits


class _Solved(NamedTuple):
    """The stages with the least ``total`` of latencies under a t_max, and their T; infinite where there are none."""

    stages: tuple[tuple[int, int, int], ...]
    total: float
    latency: float


_NOTHING = _Solved((), np.inf, np.inf)


def _solve(costs: MeshCosts, limit: float) -> _Solved:
    """Return F(s, 1, N M; t_max) of the best s, at t_max = ``limit``."""
    sums, last, mesh = _fill_without_s(*costs, limit)
    if not np.isfinite(sums[0, costs.devices]):
        return _NOTHING
    stages, k, d = list[tuple[int, int, int]](), 0, costs.devices
    while k < sums.shape[0] - 1:
        stages.append((k, int(last[k, d]), int(mesh[k, d])))
        k, d = stages[-1][1] + 1, d - int(costs.sizes[stages[-1][2]])
    if _fits(costs, stages):
        return _with_latency(costs, stages, float(sums[0, costs.devices]))
    return _solve_with_s(costs, limit)


def _solve_with_s(costs: MeshCosts, limit: float) -> _Solved:
    """Return what ``_solve`` does, where each stage holds as many micro-batches as there are stages from it on."""
    sums, last, mesh = _fill(*costs, limit)
    of_stages = sums[:, 0, costs.devices]
    s = int(np.argmin(of_stages))
    if not np.isfinite(of_stages[s]):
        return _NOTHING
    stages, k, d = list[tuple[int, int, int]](), 0, costs.devices
    for left in range(s, 0, -1):
        stages.append((k, int(last[left, k, d]), int(mesh[left, k, d])))
        k, d = stages[-1][1] + 1, d - int(costs.sizes[stages[-1][2]])
    return _with_latency(costs, stages, float(of_stages[s]))


def _fits(costs: MeshCosts, stages: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether every stage fits the memory with the micro-batches that it holds."""
    for index, (first, last, mesh) in enumerate(stages):
        at, held = (mesh, first, last), min(len(stages) - index, costs.micro_batches)
        if costs.fixed_bytes[at] + held * costs.stash_bytes[at] > costs.memory_bytes:
            return False
    return True


def _with_latency(costs: MeshCosts, stages: Sequence[tuple[int, int, int]], total: float) -> _Solved:
    slowest = max(float(costs.seconds[mesh, first, last]) for first, last, mesh in stages)
    return _Solved(tuple(stages), total, total + (costs.micro_batches - 1) * slowest)


@compiled
def _fill_without_s(
    seconds: Floats,
    fixed: Floats,
    stash: Floats,
    sizes: Integers,
    devices: int,
    micro_batches: int,
    memory: float,
    limit: float,
) -> tuple[Floats, Integers, Integers]:
    """Return F(k, d; t_max) of any s, [K + 1, devices + 1], and the last operator and submesh of the first stage.

    Every stage holds one micro-batch.
    """
    count = seconds.shape[1]
    sums = np.full((count + 1, devices + 1), np.inf)
    last = np.zeros((count + 1, devices + 1), np.int64)
    mesh = np.zeros((count + 1, devices + 1), np.int64)
    sums[count, 0] = 0.0
    for k in range(count - 1, -1, -1):
        for c in range(len(sizes)):
            for end in range(k, count):
                t = seconds[c, k, end]
                if t > limit or fixed[c, k, end] + stash[c, k, end] > memory:
                    break  # a longer run needs no less
                for d in range(sizes[c], devices + 1):
                    total = t + sums[end + 1, d - sizes[c]]
                    if total < sums[k, d]:
                        sums[k, d], last[k, d], mesh[k, d] = total, end, c
    return sums, last, mesh


@compiled
def _fill(
    seconds: Floats,
    fixed: Floats,
    stash: Floats,
    sizes: Integers,
    devices: int,
    micro_batches: int,
    memory: float,
    limit: float,
) -> tuple[Floats, Integers, Integers]:
    """Return F(s, k, d; t_max), [s + 1, K + 1, devices + 1], and the last operator and submesh of the first stage."""
    count = seconds.shape[1]
    most = min(count, devices)
    sums = np.full((most + 1, count + 1, devices + 1), np.inf)
    last = np.zeros((most + 1, count + 1, devices + 1), np.int64)
    mesh = np.zeros((most + 1, count + 1, devices + 1), np.int64)
    sums[0, count, 0] = 0.0
    for s in range(1, most + 1):
        held = min(s, micro_batches)
        for k in range(count - s, -1, -1):
            for c in range(len(sizes)):
                for end in range(k, count - s + 1):
                    t = seconds[c, k, end]
                    if t > limit or fixed[c, k, end] + held * stash[c, k, end] > memory:
                        break  # a longer run needs no less
                    for d in range(sizes[c], devices + 1):
                        total = t + sums[s - 1, end + 1, d - sizes[c]]
                        if total < sums[s, k, d]:
                            sums[s, k, d], last[s, k, d], mesh[s, k, d] = total, end, c
    return sums, last, mesh
