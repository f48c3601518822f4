"""Planner "piper": Piper's dynamic program for the least maximum load (Tarnawski et al., NeurIPS 2021)."""

from __future__ import annotations

import math

import numpy as np

from dapple_tf.errors import PlanError
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.planner.systems.hierarchy import derive_hierarchy
from dapple_tf.planner.systems.piper_search import PiperCosts, PiperStage, count_steps, find_configuration, largest_load
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.linearise import Chain, without_unsplittable_cuts
from dapple_tf.simulator.arrays import prefix_sums
from dapple_tf.simulator.memory import usable_bytes

_MOST_DEVICES = 4096
_MOST_STEPS = 1_000_000_000  # of one dynamic program: some seconds
_LEAST_BLOCKS = 32


@planner("piper", candidate=True)
def plan_piper(problem: PlanningProblem) -> PlannerResult | None:
    """Return the stages with the least maximum load on at most K devices; None if nothing fits the memory.

    The load of a device is its time per micro-batch (the paper's TPS): computing, sending and receiving, and its share
    of AllReduce. A stage has a data-parallel degree d, and re-computes its activations or not; its device holds as many
    micro-batches as ceil(s / d), where s is the sum of d over this stage and all later ones. Piper's dynamic program
    over downsets takes those of a chain here, which are its prefixes: the graph is linearised first. The cluster has
    one bandwidth, that of its slowest link. The micro-batch size is the fastest in the simulator; the schedule is 1F1B
    (``dapple-a``) unless the problem names another.

    Left out are tensor parallelism (t = 1) and other ways to run single layers. In the paper a replica takes every d-th
    micro-batch; here it takes a d-th of each. With ``recompute`` all stages re-compute. Blocks are merged where there
    are too many. Raises PlanError for more than 4096 devices.
    """
    if problem.cluster.devices > _MOST_DEVICES:
        raise PlanError(
            f"the cluster has {problem.cluster.devices} devices; planner 'piper' is for at most {_MOST_DEVICES}: use "
            "planner 'best'"
        )
    chain = _limit_blocks(without_unsplittable_cuts(problem.chain), problem.cluster.devices)
    found = []
    for size in problem.micro_batch_sizes:
        stages = find_piper(problem, chain, size)
        if stages:
            found.append(_evaluate(problem, chain, stages, size))
    return PlannerResult.fastest(found)


def find_piper(problem: PlanningProblem, chain: Chain, size: int) -> tuple[PiperStage, ...]:
    """Return the configuration of the chain's blocks; one of merged blocks, if there are many, is a ceiling for it."""
    costs, devices, ceiling = piper_costs(problem, chain, size), problem.cluster.devices, math.inf
    if len(chain.parameter_bytes) >= 2 * _LEAST_BLOCKS:
        merged = coarsen(chain, _LEAST_BLOCKS)
        index_of = {position: index for index, position in enumerate(chain.positions)}
        known = tuple(
            stage._replace(first=index_of[merged.positions[stage.first]], end=index_of[merged.positions[stage.end]])
            for stage in find_configuration(piper_costs(problem, merged, size), devices)
        )
        ceiling = largest_load(costs, known)
    return find_configuration(costs, devices, ceiling)


def piper_costs(problem: PlanningProblem, chain: Chain, size: int) -> PiperCosts:
    """Return the costs of the chain's blocks for micro-batches of ``size`` samples."""
    devices, scale = problem.cluster.devices, size / chain.batch_size
    most = min(devices, size)  # each replica needs a sample
    rows = [chain.block_seconds(size / d) for d in range(1, most + 1)]
    crossing = chain.boundary_bytes * scale
    return PiperCosts(
        forward=np.array([prefix_sums(forward) for forward, _ in rows]),
        backward=np.array([prefix_sums(backward) for _, backward in rows]),
        crossing_bytes=crossing,
        parameter_bytes=prefix_sums(chain.parameter_bytes),
        stash_bytes=prefix_sums(chain.stash_bytes * scale),
        working_bytes=chain.working_bytes * scale,
        values_per_weight=problem.values_per_weight,
        bandwidth=_least_bandwidth(problem.cluster),
        micro_batches=problem.global_batch_size // size,
        memory_bytes=usable_bytes(problem.cluster.least_memory),
        must_recompute=bool(problem.recompute),
    )


def _least_bandwidth(cluster: Cluster) -> float:
    """Return the bytes per second of the slowest link; infinity for one device."""
    levels = derive_hierarchy(cluster).levels
    return float(min((level.bandwidth for level in levels), default=math.inf))


def _limit_blocks(chain: Chain, devices: int) -> Chain:
    """Return the chain with blocks merged until a dynamic program takes few enough steps."""
    blocks = fewer = len(chain.parameter_bytes)
    while fewer > _LEAST_BLOCKS and count_steps(fewer, devices) > _MOST_STEPS:
        fewer = max(_LEAST_BLOCKS, int(fewer * 0.9))
    return chain if fewer == blocks else coarsen(chain, fewer)


def _evaluate(problem: PlanningProblem, chain: Chain, found: tuple[PiperStage, ...], size: int) -> Candidate | None:
    """Return the stages on the devices in their order, simulated."""
    stages, layers, first = list[StagePlan](), list[int](), 0
    for stage in found:
        begin, end = chain.positions[stage.first], chain.positions[stage.end]
        stages.append(StagePlan(begin, end - 1, tuple(range(first, first + stage.degree))))
        first += stage.degree
        layers += range(begin, end) if stage.recompute else ()
    everything = len(layers) == len(problem.profile.layers)
    schedule = "dapple-a" if problem.schedule == "auto" else problem.schedule
    recompute = everything or (tuple(layers) if layers else False)
    return problem.evaluate(stages, size, "piper", schedule, recompute)
