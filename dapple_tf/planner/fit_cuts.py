"""The best cuts for stages whose devices are given: the busiest stage as quick as it can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from dapple_tf.plan import StagePlan
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.simulator.compiled import Floats, Integers, compiled
from dapple_tf.simulator.memory import usable_bytes
from dapple_tf.simulator.transfer import allreduce_cost, link_tables, transfer_cost


def fit_cuts(
    problem: PlanningProblem, devices: Sequence[Sequence[int]], micro_batch_size: int
) -> tuple[StagePlan, ...] | None:
    """Stages on these ``devices``, cut so that the largest of M (F + B) + AllReduce, and of M transfers, is least.

    None where no cut fits the memory (of one micro-batch in flight), or there are more stages than blocks.
    """
    chain, homes = problem.chain, problem.cluster.homes
    if len(devices) > len(chain.parameter_bytes):
        return None
    links = link_tables(problem.cluster)
    servers = [[homes[d] for d in stage] for stage in devices]
    replicas = np.array([len(stage) for stage in devices], np.int64)
    distinct, row = np.unique(replicas, return_inverse=True)
    seconds = [sum(chain.block_seconds(micro_batch_size / r)) for r in distinct]
    if problem.recompute:
        seconds = [
            both + chain.block_seconds(micro_batch_size / r)[0] for r, both in zip(distinct, seconds, strict=True)
        ]
    sends = [(0.0, 0.0), *(transfer_cost(a, b, links) for a, b in itertools.pairwise(servers))]
    scale = micro_batch_size / problem.profile.batch_size
    starts = _fit(
        np.array(seconds),
        row,
        replicas,
        np.array([allreduce_cost(stage, links) for stage in servers]),
        np.array(sends),
        chain.parameter_bytes,
        np.concatenate([[0.0], chain.crossing_bytes]) * scale,
        chain.stash_bytes * scale,
        chain.working_bytes * scale,
        np.concatenate([[True], chain.splittable]),
        problem.global_batch_size // micro_batch_size,
        2.0 + problem.optimizer_slots,
        usable_bytes(problem.cluster.device_memory),
        bool(problem.recompute),
    )
    if len(starts) == 0:
        return None
    bounds = [chain.positions[start] for start in starts] + [len(problem.profile.layers)]
    return tuple(
        StagePlan(first, end - 1, tuple(stage)) for first, end, stage in zip(bounds, bounds[1:], devices, strict=False)
    )


@compiled
def _fit(
    seconds: Floats,
    row: Integers,
    replicas: Integers,
    ring: Floats,
    sends: Floats,
    parameters: Floats,
    crossing: Floats,
    stash: Floats,
    working: Floats,
    splittable: Integers,
    micro_batches: int,
    bytes_per_parameter_byte: float,
    memory: float,
    recompute: bool,
) -> Integers:
    """The first block of each stage; empty where nothing fits. By dynamic programming over (stages, blocks)."""
    stages, n = len(row), len(parameters)
    best = np.full(n + 1, np.inf)  # of the blocks before each place, in the stages so far
    best[0] = 0.0
    choice = np.zeros((stages, n + 1), np.int64)
    for s in range(stages):
        following = np.full(n + 1, np.inf)
        for start in range(s, n):
            if best[start] == np.inf or (s and replicas[s] != replicas[s - 1] and not splittable[start]):
                continue
            moved = micro_batches * (sends[s, 0] + sends[s, 1] * crossing[start]) if s else 0.0
            busy, held, kept, work = 0.0, 0.0, 0.0, 0.0
            for end in range(start + 1, n + 1 - (stages - 1 - s)):
                busy += micro_batches * seconds[row[s], end - 1] + ring[s] * parameters[end - 1]
                held += parameters[end - 1] * bytes_per_parameter_byte
                kept += stash[end - 1] / replicas[s]
                work = max(work, working[end - 1] / replicas[s])
                if held + kept + work + (crossing[start] / replicas[s] if recompute else 0.0) > memory:
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
