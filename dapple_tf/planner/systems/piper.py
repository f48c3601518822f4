"""Planner "piper": Piper's dynamic program for the least maximum load (Tarnawski et al., NeurIPS 2021)."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.costs import ChainCosts, make_stages
from dapple_tf.planner.partition import Ways, from_the_end, partition
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.planner.systems.hierarchy import derive_hierarchy
from dapple_tf.profiler.linearise import Chain, without_unsplittable_cuts
from dapple_tf.simulator.arrays import Floats, runs

_MOST_DEVICES = 4096
_MOST_LOADS = 30_000_000  # loads of stages that one dynamic program may tabulate: some hundred megabytes
_LEAST_BLOCKS = 32


class PiperStage(NamedTuple):
    """A stage: blocks ``first`` to ``end`` (exclusive), its data-parallel degree d, and whether it re-computes."""

    first: int
    end: int
    degree: int
    recompute: bool


@planner("piper", candidate=True)
def plan_piper(problem: PlanningProblem) -> PlannerResult | None:
    """Return the stages with the least maximum load on at most K devices; None if nothing fits the memory.

    The load of a device is its time per micro-batch (the paper's TPS): computing, sending and receiving, and its share
    of AllReduce. A stage has a data-parallel degree d, and re-computes its activations or not; its device holds
    ceil(s / d) micro-batches, where s is the sum of d over this stage and all later ones. Piper's dynamic program
    runs over the downsets of a graph. Here the graph is linearised to a chain first, whose downsets are its prefixes.
    The cluster has one bandwidth, that of its slowest link. The micro-batch size is the fastest in the simulator; the
    schedule is 1F1B (``dapple-a``) unless the problem names another.

    Left out are tensor parallelism (t = 1) and other ways to run single layers. In the paper a replica takes every d-th
    micro-batch; here it takes a d-th of each. With ``recompute`` all stages re-compute. Blocks are merged where there
    are too many. Raises PlanError for more than 4096 devices.
    """
    problem.check_devices("piper", _MOST_DEVICES)
    chain = without_unsplittable_cuts(problem.chain)
    found = []
    for size in problem.micro_batch_sizes:
        costs = ChainCosts(problem, _limit_blocks(chain, problem, size), size)
        if stages := find_configuration(costs):
            found.append(_evaluate(costs, stages))
    return PlannerResult.fastest(found)


def find_configuration(costs: ChainCosts) -> tuple[PiperStage, ...]:
    """Return the stages with the least maximum load on at most all devices; empty where none fits the memory.

    dp[j][s] is the least maximum load of the blocks from j on (what is left of a downset) on exactly s devices. With
    t = 1 the paper's two parameters, devices and sum of data-parallel degrees, are one. Of equal loads the fewest
    devices are used, then the fewest replicas of the earliest stage, and activations are kept rather than re-computed.
    """
    devices, blocks = costs.problem.cluster.devices, costs.blocks
    levels = derive_hierarchy(costs.problem.cluster).levels
    bandwidth = min((level.bandwidth for level in levels), default=math.inf)  # of the slowest link
    most_held = _most_held(costs.problem, costs.size)
    tables = [_loads(costs, d, most, bandwidth) for d, most in enumerate(most_held, 1)]
    loads, again = (np.concatenate(parts) for parts in zip(*tables, strict=True))
    counts = np.array([len(table) for table, _ in tables])
    s, d = (part + 1 for part in np.nonzero(np.tri(devices, len(tables), dtype=np.bool_)))
    row = np.cumsum(counts)[d - 1] - counts[d - 1] + np.minimum(-(-s // d), counts[d - 1]) - 1
    ways = Ways.of_arrays(devices + 1, s, s - d, row)
    found = partition(from_the_end(loads), ways)
    used = int(np.argmin(found.values[1:, blocks])) + 1
    if not np.isfinite(found.values[used, blocks]):
        return ()
    stages = []
    for stage in reversed(found.stages(used)):
        first, end = blocks - stage.end, blocks - stage.first
        recompute = bool(again[ways.row[stage.way], first, end])
        stages.append(PiperStage(first, end, int(ways.state[stage.way] - ways.before[stage.way]), recompute))
    return tuple(stages)


def _most_held(problem: PlanningProblem, size: int) -> list[int]:
    """Return the most micro-batches in flight on a stage of degree d, for d from 1 to at most the samples."""
    devices, micro_batches = problem.cluster.devices, problem.global_batch_size // size
    return [min(-(-devices // d), micro_batches) for d in range(1, min(devices, size) + 1)]


def _loads(costs: ChainCosts, d: int, most: int, bandwidth: float) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the loads of stages of degree ``d``, and whether they re-compute; infinite where they do not fit.

    Both are [rows, N, N + 1]. There is a row for each number of micro-batches in flight up to ``most``. If even a stage
    of all blocks can hold the most without re-computation, one row is enough for all numbers.
    """
    memory, must = costs.memory_bytes, bool(costs.problem.recompute)
    forward_sums, backward_sums = costs.second_sums(costs.size / d)
    forward, boundary = runs(forward_sums), costs.boundary_bytes
    seconds = forward + backward_sums - backward_sums[:-1, None]
    seconds += 2 * (boundary[:-1, None] + boundary) / d / bandwidth
    seconds += 2 * (d - 1) / d * costs.parameter_runs / bandwidth / costs.micro_batches
    always, each = costs.held_bytes(1 / d, recompute=False)
    if not must and always[0, -1] + most * each[0, -1] <= memory:
        return seconds[None], np.zeros((1, *seconds.shape), np.bool_)
    held = np.arange(1, most + 1)[:, None, None]
    keeps = (always + held * each <= memory) & (not must)
    fits = costs.needed_bytes(held, 1 / d, recompute=True) <= memory
    return np.where(keeps, seconds, np.where(fits, seconds if must else seconds + forward, np.inf)), ~keeps


def _limit_blocks(chain: Chain, problem: PlanningProblem, size: int) -> Chain:
    """Return the chain with blocks merged until there are few enough loads to tabulate."""
    return coarsen(chain, max(_LEAST_BLOCKS, math.isqrt(_MOST_LOADS // sum(_most_held(problem, size)))))


def _evaluate(costs: ChainCosts, found: tuple[PiperStage, ...]) -> Candidate | None:
    """Return the stages on the devices in their order, simulated."""
    problem, positions = costs.problem, costs.chain.positions
    ends = itertools.accumulate(stage.degree for stage in found)
    devices = [range(end - stage.degree, end) for stage, end in zip(found, ends, strict=True)]
    stages = make_stages(costs.chain, [*(stage.first for stage in found), costs.blocks], devices)
    layers = [
        layer for stage in found if stage.recompute for layer in range(positions[stage.first], positions[stage.end])
    ]
    recompute = len(layers) == len(problem.profile.layers) or tuple(layers) or False
    return problem.evaluate(stages, costs.size, "piper", problem.schedule_or("dapple-a"), recompute)
