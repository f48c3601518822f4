"""Planner "bapipe": balanced partition and exploration of schedules on a chain of accelerators (BaPipe, section 3).

Zhao et al., "BaPipe: Exploration of Balanced Pipeline Parallelism for DNN Training", 2020.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dapple_tf.planner.baselines import data_parallel
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.planner.systems.bapipe_partition import (
    Accelerators,
    Cuts,
    balance,
    coarse_cuts,
    feature_threshold,
    fits,
    ideal_seconds,
    intra_layer_seconds,
    slowest,
)
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import Link
from dapple_tf.profiler.device_costs import profile_on
from dapple_tf.profiler.linearise import Chain, cut_chain
from dapple_tf.simulator.arrays import Floats, Integers, prefix_sums
from dapple_tf.simulator.compiled import compiled, compiled_part
from dapple_tf.simulator.compiled_engine import step_seconds
from dapple_tf.simulator.memory import usable_bytes
from dapple_tf.simulator.order import early_backward_order

_ORIGIN = "BaPipe's partition"
_SYNCHRONOUS = {"1F1B-SNO": "1f1b-sno", "1F1B-SO": "1f1b-so"}
_MOST_BLOCKS = 400


class _Network(NamedTuple):
    """The blocks of a model on accelerators 0, 1 ... at a micro-batch size.

    ``forward``, ``backward`` [N, L + 1]: prefix sums of seconds on each accelerator. ``crossing_bytes`` [L - 1]: a of
    each cut. ``links`` [N - 1]: those between neighbours.
    """

    chain: Chain
    forward: Floats
    backward: Floats
    crossing_bytes: Floats
    links: tuple[Link, ...]


class _Explored(NamedTuple):
    """A partition under a schedule, and its seconds of a mini-batch."""

    seconds: float
    schedule: str
    candidate: Candidate


@planner("bapipe", unequal=True, candidate=True)
def plan_bapipe(problem: PlanningProblem, *, pipelines_only: bool = False) -> PlannerResult | None:
    """Return the fastest of what BaPipe explores; None if nothing fits the memory.

    Each accelerator holds a stage, in the order of the devices; with fewer blocks of layers than devices only
    the first devices do. The inter-layer partition is balanced over accelerators that may be unequal; where sending
    takes longer than computing, over the coarse-grained network; where memory is short, within it. Then 1F1B-SNO and
    1F1B-SO are simulated at every micro-batch size (or the schedule that the problem names), and unless
    ``pipelines_only`` data parallelism, which the paper finds best for ResNet-50.

    Where the cluster says ``execution: async``, 1F1B-AS or FBP-AS is chosen, with intra-layer partition; its seconds
    are ``PlannerResult.formula_seconds``. No graph runs these: the plan has the layers of the inter-layer partition and
    the schedule of synchronous execution that holds as many micro-batches. Left out: pipelines replicated by data
    parallelism, which the paper calls orthogonal. More than 400 blocks are merged.
    """
    if problem.cluster.execution == "async":
        explored = min(_explore_asynchronous(problem), key=lambda found: found.seconds, default=None)
        if explored is None:
            return None
        formula = f"{explored.schedule} on accelerators of asynchronous execution"
        return PlannerResult(explored.candidate, formula_seconds=explored.seconds, formula=formula)
    found = list(_explore_synchronous(problem))
    found += [] if pipelines_only else problem.evaluate_all_sizes(data_parallel(problem), "DP")
    return PlannerResult(min(found, key=lambda candidate: candidate.seconds)) if found else None


def _explore_synchronous(problem: PlanningProblem) -> Iterator[Candidate]:
    """Yield the partition of each micro-batch size under 1F1B-SNO and 1F1B-SO, or the given schedule, that fits."""
    given = {"1F1B-SNO": problem.schedule}  # stages are tuned as if they held as many micro-batches
    for size in problem.micro_batch_sizes:
        for schedule, name in (_SYNCHRONOUS if problem.schedule == "auto" else given).items():
            found = _partition(problem, size, schedule)
            if found is not None and (candidate := problem.evaluate(_stages(*found[:2]), size, _ORIGIN, name)):
                yield candidate


def _explore_asynchronous(problem: PlanningProblem) -> Iterator[_Explored]:
    """Yield the partition of each micro-batch size under 1F1B-AS and FBP-AS that fits, with simulated seconds."""
    for size in problem.micro_batch_sizes:
        for schedule, synchronous in AS_SCHEDULES.items():
            found = _partition(problem, size, schedule)
            if found is None:
                continue
            network, cuts, is_bound = found
            name = synchronous if problem.schedule == "auto" else problem.schedule
            candidate = problem.evaluate(_stages(network, cuts), size, _ORIGIN, name)
            if candidate is not None:
                forward, backward = (_of_stages(sums, cuts) for sums in (network.forward, network.backward))
                if not is_bound:
                    even = intra_layer_seconds(network.forward + network.backward)
                    both = np.where(forward + backward > 0, forward + backward, 1.0)
                    forward, backward = even * forward / both, even * backward / both
                sending = np.array(
                    [
                        network.crossing_bytes[cut - 1] / link.bandwidth
                        for cut, link in zip(cuts[1:-1], network.links, strict=True)
                    ]
                )
                micro_batches = problem.global_batch_size // size
                seconds = asynchronous_seconds(schedule, forward, backward, sending, micro_batches)
                yield _Explored(seconds, schedule, candidate)


def _partition(problem: PlanningProblem, size: int, schedule: str) -> tuple[_Network, Cuts, bool] | None:
    """Return the network and its balanced partition (section 3.3), and whether communication is the bottleneck.

    None if no partition fits the memory.
    """
    chain = (
        problem.chain if len(problem.chain.parameter_bytes) <= _MOST_BLOCKS else coarsen(problem.chain, _MOST_BLOCKS)
    )
    network = _make_network(problem, chain, size)
    accelerators = _make_accelerators(problem, network, size, schedule)
    cuts = balance(accelerators, by_memory=False)
    assert cuts is not None, "there is always a partition where memory does not count"
    is_bound = _is_bound_by_communication(network, cuts, slowest(accelerators, cuts))
    if is_bound:
        network = _coarsen_by_communication(problem, network, size)
        accelerators = _make_accelerators(problem, network, size, schedule)
        cuts = balance(accelerators, by_memory=False)
        assert cuts is not None, "there is always a partition where memory does not count"
    if not fits(accelerators, cuts):
        cuts = balance(accelerators, by_memory=True)
    return None if cuts is None else (network, cuts, is_bound)


def _is_bound_by_communication(network: _Network, cuts: Cuts, seconds: float) -> bool:
    """Return whether sending features over some link takes longer than the slowest stage (section 3.3.3)."""
    pairs = zip(cuts[1:-1], network.links, strict=True)
    return any(link.latency + network.crossing_bytes[cut - 1] / link.bandwidth > seconds for cut, link in pairs)


def _coarsen_by_communication(problem: PlanningProblem, network: _Network, size: int) -> _Network:
    """Return the coarse-grained network, whose features over the slowest link are sent within T.

    With fewer blocks than accelerators it is on the first of these. Where no cut is left, it has one block.
    """
    ideal = ideal_seconds(network.forward[:, -1] + network.backward[:, -1])
    threshold = min(feature_threshold(ideal, link.bandwidth, link.latency) for link in network.links)
    kept = coarse_cuts(network.crossing_bytes, threshold)
    positions = network.chain.positions
    return _make_network(problem, cut_chain(problem.profile, [positions[cut] for cut in kept]), size)


def _make_network(problem: PlanningProblem, chain: Chain, size: int) -> _Network:
    """Return the blocks of ``chain`` on as many accelerators as can have a stage."""
    cluster = problem.cluster
    count = min(cluster.devices, len(chain.parameter_bytes))
    by_kind = {}
    for device, kind in enumerate(cluster.device_kinds[:count]):
        if kind not in by_kind:
            profile = profile_on(problem.profile, cluster, device)
            rows = profile.forward_seconds(size), profile.backward_seconds(size)
            forward, backward = (np.add.reduceat(row, chain.positions[:-1]) for row in rows)
            backward = backward + forward if problem.recompute else backward
            by_kind[kind] = tuple(prefix_sums(row) for row in (forward, backward))
    sums = [by_kind[kind] for kind in cluster.device_kinds[:count]]
    return _Network(
        chain,
        np.array([forward for forward, _ in sums]),
        np.array([backward for _, backward in sums]),
        chain.crossing_bytes * (size / chain.batch_size),
        tuple(cluster.link(a, b) for a, b in itertools.pairwise(cluster.homes[:count])),
    )


def _make_accelerators(problem: PlanningProblem, network: _Network, size: int, schedule: str) -> Accelerators:
    """Return what a partition of the network needs to know; re-computed layers have no stash."""
    chain, scale = network.chain, size / network.chain.batch_size
    stash = prefix_sums(chain.stash_bytes) * scale
    count = len(network.forward)
    return Accelerators(
        network.forward + network.backward,
        np.array([usable_bytes(memory) for memory in problem.cluster.memories[:count]]),
        prefix_sums(chain.parameter_bytes) * problem.values_per_weight,
        np.zeros_like(stash) if problem.recompute else stash,
        chain.working_bytes * scale,
        in_flight(schedule, count, problem.global_batch_size // size),
    )


def _stages(network: _Network, cuts: Cuts) -> tuple[StagePlan, ...]:
    """Return the stages, each on the accelerator of its number."""
    positions = network.chain.positions
    return tuple(
        StagePlan(positions[first], positions[end] - 1, (n,)) for n, (first, end) in enumerate(itertools.pairwise(cuts))
    )


def _of_stages(sums: Floats, cuts: Cuts) -> Floats:
    """Return the seconds of each stage on its accelerator."""
    return np.array([sums[n, end] - sums[n, first] for n, (first, end) in enumerate(itertools.pairwise(cuts))])


# --- BaPipe's pipeline scheduling with asynchronous execution, simulated: 1F1B-AS and FBP-AS (BaPipe, section 3.2.1)


AS_SCHEDULES = {"1F1B-AS": "1f1b-sno", "FBP-AS": "1f1b-so"}
"""Each schedule of asynchronous execution, and the one of synchronous execution that holds as many micro-batches."""


def in_flight(schedule: str, stages: int, micro_batches: int) -> Integers:
    """Return the micro-batches whose features each stage holds (Tables 1 and 2), from stage 0 on.

    N - i + 1 under 1F1B-AS and 1F1B-SNO, with i from 1, and twice as many under FBP-AS and 1F1B-SO.
    """
    factor = 2 if schedule in ("FBP-AS", "1F1B-SO") else 1
    return np.minimum(factor * np.arange(stages, 0, -1), micro_batches)


def asynchronous_seconds(
    schedule: str, forward: Floats, backward: Floats, sending: Floats, micro_batches: int
) -> float:
    """Return the seconds of a mini-batch; ``schedule``: of ``AS_SCHEDULES``.

    ``forward``, ``backward`` [N]: F and B of each stage. ``sending`` [N - 1]: the seconds of a over each link.
    """
    before, behind = np.concatenate([[0.0], sending]), np.concatenate([sending, [0.0]])
    held = in_flight(schedule, len(forward), micro_batches)
    if schedule == "1F1B-AS":
        f, b = np.maximum(forward, np.maximum(before, behind)), np.maximum(backward, np.maximum(before, behind))
        nothing = np.zeros(len(f))
        order = early_backward_order(held, micro_batches)
        return float(step_seconds(order, f, b, np.zeros(0), nothing, nothing, nothing))
    both = forward + backward
    waiting = np.maximum(2 * np.maximum(before, behind), both)
    longer = np.divide(waiting, both, out=np.ones(len(both)), where=both > 0)
    return float(two_lanes(forward * longer, backward * longer, held, micro_batches))


@compiled
def two_lanes(forward: Floats, backward: Floats, held: Integers, micro_batches: int) -> float:
    """Return the seconds of FBP-AS: each accelerator runs forwards in one lane and backwards in another.

    While both lanes are busy, a forward and a backward take F + B each; while one is, it has the accelerator to itself.
    ``held``: the micro-batches that a stage may have begun and not ended.
    """
    n, m = len(forward), micro_batches
    begun = np.zeros((2, n), np.int64)  # operations that a lane (forward 0, backward 1) has begun
    ended = np.zeros((2, n), np.int64)
    left = np.zeros((2, n))  # what is left of the operation in a lane, as a fraction
    now = 0.0
    while ended[1, 0] < m:
        for x in range(n):
            arrived = m if x == 0 else ended[0, x - 1]
            if begun[0, x] == ended[0, x] and begun[0, x] < arrived and begun[0, x] - ended[1, x] < held[x]:
                begun[0, x] += 1
                left[0, x] = 1.0
            arrived = ended[0, x] if x == n - 1 else ended[1, x + 1]
            if begun[1, x] == ended[1, x] and begun[1, x] < arrived:
                begun[1, x] += 1
                left[1, x] = 1.0
        step = np.inf
        for x in range(n):
            for lane in range(2):
                if begun[lane, x] > ended[lane, x]:
                    step = min(step, left[lane, x] * _lane_seconds(forward, backward, begun, ended, lane, x))
        now += step
        for x in range(n):
            seconds = (
                _lane_seconds(forward, backward, begun, ended, 0, x),
                _lane_seconds(forward, backward, begun, ended, 1, x),
            )
            done = np.zeros(2, np.bool_)
            for lane in range(2):
                if begun[lane, x] > ended[lane, x]:
                    rest = left[lane, x] * seconds[lane] - step
                    done[lane] = rest <= 1e-12 * seconds[lane]
                    left[lane, x] = 0.0 if done[lane] else rest / seconds[lane]
            for lane in range(2):
                ended[lane, x] += done[lane]
    return now


@compiled_part
def _lane_seconds(forward: Floats, backward: Floats, begun: Integers, ended: Integers, lane: int, x: int) -> float:
    """Return the seconds of a whole operation in a lane, as busy as its accelerator is now."""
    if begun[1 - lane, x] > ended[1 - lane, x]:
        return float(forward[x] + backward[x])
    return float(forward[x]) if lane == 0 else float(backward[x])
