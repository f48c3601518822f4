"""Planner "alpa-inter": Alpa's inter-operator dynamic program over t_max (Zheng et al., OSDI 2022, section 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dapple_tf.errors import PlanError
from dapple_tf.planner.costs import ChainCosts, make_stages
from dapple_tf.planner.partition import Ways, from_the_end, partition
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.planner.systems.device_order import server_bandwidths
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.linearise import Chain, without_unsplittable_cuts
from dapple_tf.simulator.arrays import Floats, Integers, runs

_MOST_DEVICES = 1024
_MOST_STEPS = 4_000_000  # of one dynamic program: some milliseconds
_LEAST_LAYERS = 16
# A little less than 1: a lower bound times this is below the bounded seconds even after rounding errors.
_BELOW = 1 - 1e-9


@dataclass(frozen=True)
class Submeshes:
    """The submeshes (n, m) of a cluster mesh N x M: (1, 1), (1, 2), (1, 4) ... (1, M), (2, M) ... (N, M).

    ``bandwidths``: bytes per second of the slowest link inside any submesh of each shape.
    """

    shapes: tuple[tuple[int, int], ...]
    bandwidths: tuple[float, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The devices of each, n m."""
        return tuple(n * m for n, m in self.shapes)


@planner("alpa-inter", candidate=True)
def plan_alpa_inter(problem: PlanningProblem) -> PlannerResult | None:
    """Return the slicing into stages and submeshes with the least T of section 5.1; None if nothing fits the memory.

    T = t_1 + ... + t_S + (B - 1) max_j t_j for B micro-batches, where the submeshes together are the whole cluster. t_i
    is the latency t_intra of a stage on its submesh; a boundary between stages takes no time, as in the paper. A stage
    that is followed by s - 1 others must satisfy mem_stage + s mem_act <= mem_device (1F1B). The micro-batch size is
    the fastest in the simulator; the schedule is 1F1B (``dapple-a``) unless the problem names another.

    The intra-operator pass (section 4) is left out: every submesh runs data parallelism. Its AllReduce runs once a
    step, over the slowest link of the submesh; 1 / B of its seconds are part of t_intra. Operators are clustered into
    layers of nearly equal compute only where there are too many, and not by the dynamic program of section 5.2. The
    paper's M is a power of two, so that every choice of submeshes covers the cluster; with another M a submesh may span
    servers. Raises PlanError for servers of unequal numbers of devices, which form no mesh, and for more than 1024
    devices.
    """
    counts = sorted({server.devices for server in problem.cluster.servers})
    if len(counts) > 1:
        raise PlanError(
            f"planner 'alpa-inter' takes a cluster as a mesh, but its servers have {', '.join(map(str, counts))} "
            "devices: use planner 'best', or servers with equally many devices"
        )
    problem.check_devices("alpa-inter", _MOST_DEVICES)
    meshes = list_submeshes(problem)
    chain = _limit_layers(without_unsplittable_cuts(problem.chain), meshes)
    schedule = problem.schedule_or("dapple-a")
    found = []
    for size in problem.micro_batch_sizes:
        if sliced := slice_operators(mesh_costs(ChainCosts(problem, chain, size), meshes)):
            found.append(problem.evaluate(_assign_devices(chain, meshes, sliced), size, "alpa-inter", schedule))
    return PlannerResult.fastest(found)


def list_submeshes(problem: PlanningProblem) -> Submeshes:
    """Return the submeshes of the problem's cluster."""
    cluster, servers = problem.cluster, range(len(problem.cluster.servers))
    count = cluster.servers[0].devices
    shapes = [(1, 2**k) for k in range(count.bit_length()) if 2**k < count] + [(n + 1, count) for n in servers]
    bandwidths = server_bandwidths(cluster)
    inside = float(bandwidths.diagonal().min())
    between = float(bandwidths[~np.eye(len(servers), dtype=bool)].min(initial=np.inf))
    return Submeshes(
        tuple(shapes),
        tuple(min(inside if m > 1 else math.inf, between if n > 1 else math.inf) for n, m in shapes),
    )


class MeshCosts(NamedTuple):
    """Costs of the runs of operators i to j (exclusive) as stages on each submesh, [submeshes, K, K + 1].

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

    def limited(self, held: int) -> Floats:
        """Return t_intra, infinite where a device cannot hold ``held`` micro-batches."""
        return np.where(self.fixed_bytes + held * self.stash_bytes <= self.memory_bytes, self.seconds, np.inf)


class MeshStage(NamedTuple):
    """A stage: operators ``first`` to ``end`` (exclusive), and the number of the submesh."""

    first: int
    end: int
    mesh: int


def mesh_costs(costs: ChainCosts, meshes: Submeshes) -> MeshCosts:
    """Return t_intra and the memory of all runs of the chain's blocks on all submeshes.

    A submesh of more devices than the micro-batch has samples takes infinitely long.
    """
    shape = len(meshes.shapes), costs.blocks, costs.blocks + 1
    seconds, fixed, stash = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
    for c, (r, bandwidth) in enumerate(zip(meshes.sizes, meshes.bandwidths, strict=True)):
        if r <= costs.size:
            forward, backward = costs.second_sums(costs.size / r)
            seconds[c] = runs(forward) + runs(backward)
            seconds[c] += 2 * (r - 1) / r * costs.parameter_runs / bandwidth / costs.micro_batches
            fixed[c], stash[c] = costs.held_bytes(1 / r)
    sizes, devices = np.array(meshes.sizes), costs.problem.cluster.devices
    return MeshCosts(seconds, fixed, stash, sizes, devices, costs.micro_batches, costs.memory_bytes)


# --- The dynamic program of section 5.2: slice operators into stages on submeshes


class _Solved(NamedTuple):
    """The stages with the least sum of latencies (``total``) under a t_max, and their T; infinite without stages."""

    stages: tuple[MeshStage, ...] = ()
    total: float = np.inf
    latency: float = np.inf


def slice_operators(costs: MeshCosts) -> tuple[MeshStage, ...]:
    """Return the stages with the least T; empty where none fits the memory.

    F(s, k, d; t_max) is the least sum of latencies of operators k to K in s stages on d devices, none slower than
    t_max. The paper tries t_max in rising order until (B - 1) t_max alone is too much. Here intervals of t_max are
    halved. An interval is left out if F at its upper end plus (B - 1) times its lower end is no less than the best T so
    far. This is exact too, since F does not rise with t_max. F is first solved without s, as if each stage held one
    micro-batch. If the stages that this finds fit the memory, the result is F.
    """
    program, more = _Program(costs), costs.micro_batches - 1
    limits = np.unique(costs.seconds[:, np.arange(costs.seconds.shape[1])[:, None] < np.arange(costs.seconds.shape[2])])
    limits = limits[np.isfinite(limits)]
    best = first = program.solve(np.inf)
    intervals = [(0, len(limits) - 1, first.total)]
    while intervals:
        low, high, least = intervals.pop()
        if low > high or least + more * limits[low] >= best.latency * _BELOW:
            continue
        middle = (low + high) // 2
        found = program.solve(limits[middle])
        best = found if found.latency < best.latency else best
        intervals += [(middle + 1, high, least), (low, middle - 1, found.total)]
    return best.stages


class _Program:
    """The dynamic program for one set of costs, from the last operator to the first."""

    def __init__(self, costs: MeshCosts) -> None:
        self._costs = costs
        devices, meshes = (part.ravel() for part in np.indices((costs.devices + 1, len(costs.sizes))))
        fits = devices >= costs.sizes[meshes]
        self._devices, self._meshes = devices[fits], meshes[fits]
        before = self._devices - costs.sizes[self._meshes]
        self._without_s = (
            from_the_end(costs.limited(1)),
            Ways.of_arrays(costs.devices + 1, self._devices, before, self._meshes),
        )

    @cached_property
    def _with_s(self) -> tuple[Floats, Ways]:
        """The seconds and ways of the states (s, d). A state has the number s (N M + 1) + d; rows are (s, submesh)."""
        costs, count, width = self._costs, len(self._costs.sizes), self._costs.devices + 1
        most = min(costs.seconds.shape[1], costs.devices)
        seconds = np.concatenate([costs.limited(min(s, costs.micro_batches)) for s in range(1, most + 1)])
        s = np.repeat(np.arange(1, most + 1), len(self._devices))
        devices, meshes = np.tile(self._devices, most), np.tile(self._meshes, most)
        before = (s - 1) * width + devices - costs.sizes[meshes]
        ways = Ways.of_arrays((most + 1) * width, s * width + devices, before, (s - 1) * count + meshes)
        return from_the_end(seconds), ways

    def solve(self, limit: float) -> _Solved:
        """Return F(s, 1, N M; t_max) of the best s, at t_max = ``limit``."""
        found = self._run(self._without_s, np.array([self._costs.devices]), limit)
        if found.stages and not self._fits(found.stages):
            width = self._costs.devices + 1
            every = np.arange(1, len(self._with_s[0]) // len(self._costs.sizes) + 1)
            return self._run(self._with_s, every * width + self._costs.devices, limit)
        return found

    def _run(self, program: tuple[Floats, Ways], states: Integers, limit: float) -> _Solved:
        """Return the least sum of latencies of these states."""
        (seconds, ways), costs = program, self._costs
        found, blocks = partition(seconds, ways, add=True, limit=limit), seconds.shape[1]
        state = int(states[np.argmin(found.values[states, blocks])])
        total = float(found.values[state, blocks])
        if not np.isfinite(total):
            return _Solved()
        stages = tuple(
            MeshStage(blocks - s.end, blocks - s.first, int(ways.row[s.way]) % len(costs.sizes))
            for s in reversed(found.stages(state))
        )
        slowest = max(float(costs.seconds[mesh, first, end]) for first, end, mesh in stages)
        return _Solved(stages, total, total + (costs.micro_batches - 1) * slowest)

    def _fits(self, stages: Sequence[MeshStage]) -> bool:
        """Return whether every stage fits the memory with the micro-batches that it holds."""
        costs, (first, end, mesh) = self._costs, np.array(stages).T
        held = np.minimum(np.arange(len(stages), 0, -1), costs.micro_batches)
        needed = costs.fixed_bytes[mesh, first, end] + held * costs.stash_bytes[mesh, first, end]
        return bool((needed <= costs.memory_bytes).all())


def _limit_layers(chain: Chain, meshes: Submeshes) -> Chain:
    """Return the chain with blocks merged until a dynamic program takes few enough steps."""
    layers = len(chain.parameter_bytes)
    while layers > _LEAST_LAYERS and _count_steps(layers, meshes.sizes) > _MOST_STEPS:
        layers -= 1
    return coarsen(chain, layers)


def _count_steps(operators: int, sizes: Sequence[int]) -> int:
    """Return the steps of one dynamic program: stages, first and last operators, devices, submeshes."""
    return min(operators, max(sizes)) * operators**2 // 2 * max(sizes) * len(sizes)


def _assign_devices(chain: Chain, meshes: Submeshes, sliced: tuple[MeshStage, ...]) -> tuple[StagePlan, ...]:
    """Return the stages with their devices; the largest submeshes get theirs first, server by server (theorem 1)."""
    sizes = [meshes.sizes[stage.mesh] for stage in sliced]
    first = 0
    devices = dict[int, tuple[int, ...]]()
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        devices[index] = tuple(range(first, first + sizes[index]))
        first += sizes[index]
    bounds = [*(stage.first for stage in sliced), len(chain.parameter_bytes)]
    return make_stages(chain, bounds, [devices[index] for index in range(len(sliced))])
