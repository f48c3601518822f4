"""The best cuts for given devices of each stage: the busiest stage is as fast as possible."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.plans import StagePlan
from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.compiled import compiled
from dapple_tf.simulator.memory import usable_bytes
from dapple_tf.simulator.transfer import allreduce_cost, link_tables, transfer_cost


class _CutCosts(NamedTuple):
    """Costs of N blocks in S stages with given devices: seconds of the step, bytes of one micro-batch."""

    compute: Floats  # [replica counts, N] seconds of forward and backward
    row: Integers  # [S] row of each stage's replica count
    replicas: Integers  # [S]
    allreduce: Floats  # [S, 2] latency (seconds) and seconds per byte
    transfer: Floats  # [S, 2] latency (seconds) and seconds per byte of the transfer into each stage
    parameter_bytes: Floats  # [N]
    boundary_bytes: Floats  # [N] that cross the cut before each block
    stash_bytes: Floats  # [N]
    working_bytes: Floats  # [N]
    splittable: NDArray[np.bool_]  # [N] whether stages of unequal replica counts can meet before each block
    micro_batches: int
    fixed_bytes_per_parameter_byte: float
    memory_bytes: float
    recompute: bool


def fit_cuts(
    problem: PlanningProblem, devices: Sequence[Sequence[int]], micro_batch_size: int
) -> tuple[StagePlan, ...] | None:
    """Return stages on these ``devices``, cut so that the largest of M (F + B) + AllReduce and M transfers is least.

    M is the number of micro-batches. None if no cut fits the memory with one micro-batch in flight, or if there are
    more stages than blocks of layers.
    """
    chain = problem.chain
    if len(devices) > len(chain.parameter_bytes):
        return None
    starts = _fit(_cut_costs(problem, devices, micro_batch_size))
    if len(starts) == 0:
        return None
    bounds = [chain.positions[start] for start in starts] + [len(problem.profile.layers)]
    return tuple(
        StagePlan(first, end - 1, tuple(stage)) for first, end, stage in zip(bounds, bounds[1:], devices, strict=False)
    )


def _cut_costs(problem: PlanningProblem, devices: Sequence[Sequence[int]], micro_batch_size: int) -> _CutCosts:
    chain, homes, links = problem.chain, problem.cluster.homes, link_tables(problem.cluster)
    servers = [[homes[d] for d in stage] for stage in devices]
    replicas = np.array([len(stage) for stage in devices], np.int64)
    counts, row = np.unique(replicas, return_inverse=True)
    compute = []
    for r in counts:
        forward, backward = chain.block_seconds(micro_batch_size / r)
        compute.append(forward + backward + forward if problem.recompute else forward + backward)
    scale = micro_batch_size / problem.profile.batch_size
    return _CutCosts(
        compute=np.array(compute),
        row=row,
        replicas=replicas,
        allreduce=np.array([allreduce_cost(stage, links) for stage in servers]),
        transfer=np.array([(0.0, 0.0), *(transfer_cost(a, b, links) for a, b in itertools.pairwise(servers))]),
        parameter_bytes=chain.parameter_bytes,
        boundary_bytes=chain.boundary_bytes[:-1] * scale,
        stash_bytes=chain.stash_bytes * scale,
        working_bytes=chain.working_bytes * scale,
        splittable=np.concatenate([[True], chain.splittable]),
        micro_batches=problem.global_batch_size // micro_batch_size,
        fixed_bytes_per_parameter_byte=problem.values_per_weight,
        memory_bytes=usable_bytes(problem.cluster.least_memory),
        recompute=bool(problem.recompute),
    )


@compiled
def _fit(c: _CutCosts) -> Integers:
    """Return the first block of each stage; empty if nothing fits. By dynamic programming over (stages, blocks)."""
    stages, n = len(c.row), len(c.parameter_bytes)
    best = np.full(n + 1, np.inf)  # best[i]: the busiest stage (seconds) with the first i blocks in the stages so far
    best[0] = 0.0
    choice = np.zeros((stages, n + 1), np.int64)
    for s in range(stages):
        following = np.full(n + 1, np.inf)
        r = c.replicas[s]
        for start in range(s, n):
            if best[start] == np.inf or (s and r != c.replicas[s - 1] and not c.splittable[start]):
                continue
            entering = c.boundary_bytes[start]
            moved = c.micro_batches * (c.transfer[s, 0] + c.transfer[s, 1] * entering) if s else 0.0
            busy, fixed, stash, work = 0.0, 0.0, 0.0, 0.0
            for end in range(start + 1, n + 1 - (stages - 1 - s)):
                parameters = c.parameter_bytes[end - 1]
                if fixed == 0.0 and parameters > 0:
                    busy += c.allreduce[s, 0]
                busy += c.micro_batches * c.compute[c.row[s], end - 1] + c.allreduce[s, 1] * parameters
                fixed += parameters * c.fixed_bytes_per_parameter_byte
                stash += c.stash_bytes[end - 1] / r
                work = max(work, c.working_bytes[end - 1] / r)
                if fixed + stash + work + (entering / r if c.recompute else 0.0) > c.memory_bytes:
                    break
                largest = max(best[start], moved, busy)
                if largest < following[end]:
                    following[end], choice[s, end] = largest, start
        best = following
    starts = np.zeros(stages if best[n] < np.inf else 0, np.int64)
    end = n
    for s in range(len(starts) - 1, -1, -1):
        end = choice[s, end]
        starts[s] = end
    return starts
