"""Planner "spp": synchronous pipeline planning over any links between devices (SPP, Algorithm 3).

Luo et al., "Efficient Pipeline Planning for Expedited Distributed DNN Training", 2022.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dapple_tf.errors import PlanError
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.planner.systems.device_order import device_bandwidths, order_by_cuts
from dapple_tf.planner.systems.spp_execution import makespan, schedule_name
from dapple_tf.planner.systems.spp_partition import (
    LeastBandwidths,
    SppCosts,
    SppStage,
    find_partitions,
    least_bandwidths,
    stage_seconds,
)
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.linearise import Chain
from dapple_tf.simulator.arrays import Floats, prefix_sums

_MOST_DEVICES = 64  # the minimum cuts of more would take minutes
_MOST_BLOCKS = 400


class _Choice(NamedTuple):
    """Stages of a number that Algorithm 3 tries, at a micro-batch size, and T_PE of them (seconds)."""

    seconds: float
    micro_batch_size: int
    stages: tuple[StagePlan, ...]
    schedule: str


@planner("spp", candidate=True)
def plan_spp(problem: PlanningProblem) -> PlannerResult | None:
    """Return the plan with the least T_PE of all numbers of stages (Algorithm 3); None if nothing fits the memory.

    RDO orders the devices, PRM finds the stages of each number xi, and PE orders their micro-batches, which is the
    plan's schedule unless the problem names another one. All devices are used. M and Z are given in the paper; here
    each micro-batch size that the problem allows is tried. The paper's costs leave out latency, network interfaces
    that devices share, and memory: of the plans tried, the best that fits is taken. At cuts where stages with different
    numbers of replicas cannot meet, both stages have equally many. More than 400 blocks of layers are merged. Raises
    PlanError for more than 64 devices.
    """
    cluster = problem.cluster
    if cluster.devices > _MOST_DEVICES:
        raise PlanError(
            f"the cluster has {cluster.devices} devices; planner 'spp' is for at most {_MOST_DEVICES}: use planner "
            "'best'"
        )
    bandwidths = device_bandwidths(cluster)
    order = order_by_cuts(bandwidths)
    least = least_bandwidths(bandwidths[np.ix_(order, order)])
    chain = (
        problem.chain if len(problem.chain.parameter_bytes) <= _MOST_BLOCKS else coarsen(problem.chain, _MOST_BLOCKS)
    )
    choices: list[_Choice] = []
    for size in problem.micro_batch_sizes:
        costs = _make_costs(problem, chain, least, size)
        for _, stages in find_partitions(costs):
            seconds = makespan(stage_seconds(costs, stages), costs.micro_batches)
            name = schedule_name(len(stages), costs.micro_batches)
            choices.append(_Choice(seconds, size, _stage_plans(chain, stages, order), name))
    unbounded = replace(problem, ceiling=math.inf)  # None must mean that a choice does not fit
    for choice in sorted(choices, key=lambda choice: choice.seconds):
        schedule = choice.schedule if problem.schedule == "auto" else problem.schedule
        found = unbounded.evaluate(choice.stages, choice.micro_batch_size, "SPP's algorithm 3", schedule)
        if found is not None:
            result = PlannerResult(found, formula_seconds=choice.seconds, formula="T_PE by SPP's costs")
            return result if found.seconds < problem.ceiling else None
    return None


def _stage_plans(chain: Chain, stages: tuple[SppStage, ...], order: tuple[int, ...]) -> tuple[StagePlan, ...]:
    """Return the stages with their layers and devices."""
    return tuple(StagePlan(chain.positions[s.first], chain.positions[s.end] - 1, order[s.low : s.high]) for s in stages)


def _make_costs(problem: PlanningProblem, chain: Chain, least: LeastBandwidths, size: int) -> SppCosts:
    """Return the costs of the blocks for micro-batches of ``size`` samples.

    A replica of r has the seconds of 1/r of the samples (the paper's footnote 2), which are 1/r of the seconds where
    the profile has one batch size.
    """
    replicas = min(len(least.among) - 1, size)
    seconds = [chain.block_seconds(size / r) for r in range(1, replicas + 1)]
    forward, backward = (np.array([entry[i] for entry in seconds]) for i in (0, 1))
    if problem.recompute:
        backward = backward + forward
    sent = chain.crossing_bytes * (size / chain.batch_size)
    return SppCosts(
        _rows_from_1(forward),
        _rows_from_1(backward),
        prefix_sums(chain.parameter_bytes),
        np.concatenate([[0.0], sent, [0.0]]),
        np.concatenate([[False], ~chain.splittable, [False]]),
        least,
        problem.global_batch_size // size,
    )


def _rows_from_1(rows: Floats) -> Floats:
    """Return the prefix sums of rows 1, 2 ..., and a row 0 that is not used."""
    return np.concatenate([np.zeros((1, rows.shape[1] + 1)), prefix_sums(rows)])
