"""Planner "alpa-inter": Alpa's inter-operator dynamic program over t_max (Zheng et al., OSDI 2022, section 5)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dapple_tf.errors import PlanError
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.planner.systems.alpa_search import MeshCosts, count_steps, slice_operators
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.linearise import Chain, without_unsplittable_cuts
from dapple_tf.simulator.arrays import run_sums
from dapple_tf.simulator.memory import usable_bytes

_MOST_DEVICES = 1024
_MOST_STEPS = 4_000_000  # of one dynamic program: some milliseconds
_LEAST_LAYERS = 16


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
    is the latency t_intra of a stage on its submesh; a boundary between stages takes no time, as in the paper. Each
    stage and the s - 1 after it satisfy mem_stage + s mem_act <= mem_device (1F1B). The micro-batch size is the fastest
    in the simulator; the schedule is 1F1B (``dapple-a``) unless the problem names another.

    Left out is the intra-operator pass (section 4): every submesh runs data parallelism. Its AllReduce runs once a
    step, over the slowest link of the submesh; a B-th of its seconds is part of t_intra. Operators are clustered to
    layers of nearly equal compute, not by the dynamic program of section 5.2, and only where there are too many. The
    paper's M is a power of two, so that every choice of submeshes covers the cluster; with another M a submesh may span
    servers. Raises PlanError for servers of unequal numbers of devices, which are no mesh, and for more than 1024
    devices.
    """
    counts = sorted({server.devices for server in problem.cluster.servers})
    if len(counts) > 1:
        raise PlanError(
            f"planner 'alpa-inter' takes a cluster as a mesh, but its servers have {', '.join(map(str, counts))} "
            "devices: use planner 'best', or servers with equally many devices"
        )
    if problem.cluster.devices > _MOST_DEVICES:
        raise PlanError(
            f"the cluster has {problem.cluster.devices} devices; planner 'alpa-inter' is for at most {_MOST_DEVICES}: "
            "use planner 'best'"
        )
    meshes = list_submeshes(problem)
    chain = _limit_layers(without_unsplittable_cuts(problem.chain), meshes)
    schedule = "dapple-a" if problem.schedule == "auto" else problem.schedule
    found = []
    for size in problem.micro_batch_sizes:
        sliced = slice_operators(mesh_costs(problem, chain, meshes, size))
        if sliced:
            stages = _assign_devices(problem, chain, meshes, sliced)
            found.append(problem.evaluate(stages, size, "alpa-inter", schedule))
    return PlannerResult.fastest(found)


def list_submeshes(problem: PlanningProblem) -> Submeshes:
    """Return the submeshes of the problem's cluster."""
    cluster, servers = problem.cluster, range(len(problem.cluster.servers))
    count = cluster.servers[0].devices
    shapes = [(1, 2**k) for k in range(count.bit_length()) if 2**k < count] + [(n + 1, count) for n in servers]
    inside = min((cluster.link(i, i).bandwidth for i in servers), default=math.inf)
    between = min((cluster.link(i, j).bandwidth for i, j in itertools.combinations(servers, 2)), default=math.inf)
    return Submeshes(
        tuple(shapes),
        tuple(min(inside if m > 1 else math.inf, between if n > 1 else math.inf) for n, m in shapes),
    )


def mesh_costs(problem: PlanningProblem, chain: Chain, meshes: Submeshes, size: int) -> MeshCosts:
    """Return t_intra and the memory of all runs of the chain's blocks on all submeshes, for micro-batches of ``size``.

    A submesh of more devices than the micro-batch has samples takes infinitely long.
    """
    micro_batches, scale = problem.global_batch_size // size, size / chain.batch_size
    parameters = run_sums(chain.parameter_bytes)
    seconds = np.full((len(meshes.shapes), *parameters.shape), np.inf)
    fixed, stash = np.zeros(seconds.shape), np.zeros(seconds.shape)
    inputs = chain.boundary_bytes[:-1, None] * scale
    working = np.maximum.accumulate(np.tril(np.ones(parameters.shape)).T * chain.working_bytes, axis=1)
    for c, (r, bandwidth) in enumerate(zip(meshes.sizes, meshes.bandwidths, strict=True)):
        if r > size:
            continue
        forward, backward = (run_sums(row) for row in chain.block_seconds(size / r))
        kept = run_sums(chain.stash_bytes) * (scale / r)
        again = bool(problem.recompute)
        seconds[c] = forward + backward + (forward if again else 0.0)
        seconds[c] += 2 * (r - 1) / r * parameters / bandwidth / micro_batches
        fixed[c] = parameters * problem.values_per_weight + working * (scale / r) + (kept if again else 0.0)
        stash[c] = inputs / r if again else kept
    memory = usable_bytes(problem.cluster.least_memory)
    return MeshCosts(seconds, fixed, stash, np.array(meshes.sizes), problem.cluster.devices, micro_batches, memory)


def _limit_layers(chain: Chain, meshes: Submeshes) -> Chain:
    """Return the chain with blocks merged until a dynamic program takes few enough steps."""
    blocks = fewer = len(chain.parameter_bytes)
    while fewer > _LEAST_LAYERS and count_steps(fewer, meshes.sizes) > _MOST_STEPS:
        fewer -= 1
    return chain if fewer == blocks else coarsen(chain, fewer)


def _assign_devices(
    problem: PlanningProblem, chain: Chain, meshes: Submeshes, sliced: tuple[tuple[int, int, int], ...]
) -> tuple[StagePlan, ...]:
    """Return the stages with their devices; the largest submeshes get theirs first, server by server (theorem 1)."""
    sizes = [meshes.sizes[mesh] for _, _, mesh in sliced]
    first = 0
    devices = dict[int, tuple[int, ...]]()
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        devices[index] = tuple(range(first, first + sizes[index]))
        first += sizes[index]
    return tuple(
        StagePlan(chain.positions[begin], chain.positions[last + 1] - 1, devices[index])
        for index, (begin, last, _) in enumerate(sliced)
    )
