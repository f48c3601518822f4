"""Planner "spp": synchronous pipeline planning over any links between devices (SPP, Algorithm 3).

Luo et al., "Efficient Pipeline Planning for Expedited Distributed DNN Training", 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.costs import ChainCosts, make_stages
from dapple_tf.planner.partition import Partition, Ways, partition
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.planner.systems.device_order import device_bandwidths, order_by_cuts
from dapple_tf.plans import StagePlan
from dapple_tf.simulator.arrays import Floats, Integers, runs
from dapple_tf.simulator.engine import step_seconds
from dapple_tf.simulator.order import early_backward_order

_MOST_DEVICES = 64  # with more, the minimum cuts would take minutes
_MOST_BLOCKS = 400


class _Choice(NamedTuple):
    """The stages that Algorithm 3 finds for one number of stages and one micro-batch size, and their T_PE (seconds)."""

    seconds: float
    micro_batch_size: int
    stages: tuple[StagePlan, ...]
    schedule: str


@planner("spp", candidate=True)
def plan_spp(problem: PlanningProblem) -> PlannerResult | None:
    """Return the plan with the least T_PE of all numbers of stages (Algorithm 3); None if nothing fits the memory.

    RDO orders the devices. PRM finds the stages for each number of stages xi. PE orders their micro-batches; this order
    is the plan's schedule unless the problem names another one. All devices are used. M and Z are given in the paper;
    here each micro-batch size that the problem allows is tried. The paper's costs leave out latency, network interfaces
    that devices share, and memory: of the plans tried, the best that fits is taken. At cuts where stages with different
    numbers of replicas cannot meet, both stages have the same number. More than 400 blocks of layers are merged. Raises
    PlanError for more than 64 devices.
    """
    cluster = problem.cluster
    problem.check_devices("spp", _MOST_DEVICES)
    bandwidths = device_bandwidths(cluster)
    order = order_by_cuts(bandwidths)
    least = least_bandwidths(bandwidths[np.ix_(order, order)])
    chain = coarsen(problem.chain, _MOST_BLOCKS)
    choices: list[_Choice] = []
    for size in problem.micro_batch_sizes:
        costs = make_costs(ChainCosts(problem, chain, size), least)
        for _, stages in find_partitions(costs):
            seconds = makespan(stage_seconds(costs, stages), costs.micro_batches)
            name = schedule_name(len(stages), costs.micro_batches)
            bounds = [*(stage.first for stage in stages), costs.layers]
            devices = [order[stage.low : stage.high] for stage in stages]
            choices.append(_Choice(seconds, size, make_stages(chain, bounds, devices), name))
    for choice in sorted(choices, key=lambda choice: choice.seconds):
        schedule = problem.schedule_or(choice.schedule)
        found = problem.evaluate(choice.stages, choice.micro_batch_size, "SPP's algorithm 3", schedule)
        if found is not None:
            return PlannerResult(found, formula_seconds=choice.seconds, formula="T_PE by SPP's costs")
    return None


# --- The dynamic program W(l, xi, r, i): partition, replication and mapping, PRM (SPP, section IV.B.2, appendix A)


class LeastBandwidths(NamedTuple):
    """The least bandwidths between V devices, which are numbered in their order.

    ``among`` [V + 1, V + 1]: between any two of the devices low to high (exclusive). ``between`` [V + 1, V + 1, V + 1]:
    between any device of low to middle and any device of middle to high.
    """

    among: Floats
    between: Floats


class SppCosts(NamedTuple):
    """Costs of L layers on V devices in their order, and M micro-batches.

    ``forward``, ``backward`` [R, L + 1]: prefix sums of p_l^f and p_l^b on each of r replicas, in row r - 1, for r up
    to R, the most replicas that a stage may have. ``parameter_bytes`` [L + 1]: prefix sums of alpha_l. ``sent_bytes``
    [L + 1]: entry l is d^f_{l,l+1} of a micro-batch; d^b is the same. ``equal_only`` [L + 1]: whether stages with
    different replicas cannot meet behind layer l. ``least``: the bandwidths.
    """

    forward: Floats
    backward: Floats
    parameter_bytes: Floats
    sent_bytes: Floats
    equal_only: NDArray[np.bool_]
    least: LeastBandwidths
    micro_batches: int

    @property
    def layers(self) -> int:
        """L."""
        return len(self.parameter_bytes) - 1

    @property
    def devices(self) -> int:
        """V."""
        return len(self.least.among) - 1


@dataclass(frozen=True)
class SppStage:
    """A stage: layers ``first`` to ``end`` (exclusive), on the devices ``low`` to ``high`` (exclusive) of the order."""

    first: int
    end: int
    low: int
    high: int


class Mapped(NamedTuple):
    """W(|S|) in seconds, and stages that have this W."""

    seconds: float
    stages: tuple[SppStage, ...]


def make_costs(costs: ChainCosts, least: LeastBandwidths) -> SppCosts:
    """Return the costs of the blocks.

    One of r replicas takes the seconds of 1/r of the samples (the paper's footnote 2). If the profile has one batch
    size, these are 1/r of the seconds.
    """
    replicas = min(len(least.among) - 1, costs.size)
    sums = [costs.second_sums(costs.size / r) for r in range(1, replicas + 1)]
    forward, backward = (np.array(rows) for rows in zip(*sums, strict=True))
    sent, equal_only = costs.boundary_bytes, ~costs.splittable
    return SppCosts(forward, backward, costs.parameter_bytes, sent, equal_only, least, costs.micro_batches)


def find_partitions(costs: SppCosts) -> tuple[Mapped, ...]:
    """Return the stages with the least W for each number of stages xi that is possible (lines 5 to 8).

    All devices are used, in their order. W is the longest time of a stage (all micro-batches and the AllReduce) or of a
    channel (both directions together). Replica counts r above the samples of a micro-batch are left out.
    """
    ways, last = _prm_ways(costs)
    found = partition(
        costs.micro_batches * runs(costs.forward + costs.backward),
        ways,
        boundary_bytes=costs.sent_bytes,
        parameter_bytes=costs.parameter_bytes,
        splittable=~costs.equal_only,
    )
    mapped = []
    for states in last:
        state = int(states[np.argmin(found.values[states, -1])]) if len(states) else 0
        if np.isfinite(found.values[state, -1]):
            mapped.append(Mapped(float(found.values[state, -1]), _mapped_stages(found, ways, state)))
    return tuple(mapped)


def _prm_ways(costs: SppCosts) -> tuple[Ways, list[Integers]]:
    """Return the ways of the states (xi, i, r), and for each xi the states that use all devices, by rising r.

    In a state xi stages use i devices, and the last stage has r replicas.
    """
    devices, replicas, m = costs.devices, len(costs.forward), costs.micro_batches
    i, r = (part + 1 for part in np.indices((devices, replicas)))
    numbers, count = np.full((devices + 1, replicas + 1), -1), 0  # by i and r, of the states of the xi before
    numbers[0, 0] = 0
    fields, last = list[tuple[NDArray[np.generic], ...]](), list[Integers]()
    for xi in range(1, min(costs.layers, devices) + 1):
        used, own = (each[r <= i - xi + 1] for each in (i, r))
        state, middle = count + 1 + np.arange(len(used)), used - own
        entry, r_before = np.nonzero(numbers[middle] >= 0)
        before = numbers[middle[entry], r_before]
        slowest = costs.least.between[middle[entry] - r_before, middle[entry], used[entry]]  # infinite if xi = 1
        per_byte = 2 * m / (np.maximum(r_before, 1) * own[entry] * slowest)
        ring = 2 * (own - 1) / (own * costs.least.among[middle, used])
        fields.append((state[entry], before, own[entry] - 1, per_byte, ring[entry], r_before == own[entry]))
        numbers[:], count = -1, count + len(used)
        numbers[used, own] = state
        last.append(state[used == devices])
    state, before, row, per_byte, ring, alike = (np.concatenate(column) for column in zip(*fields, strict=True))
    link, ring = (np.stack([np.zeros(len(each)), each], axis=1) for each in (per_byte, ring))
    return Ways.of_arrays(count + 1, state, before, row, link, ring, alike), last


def _mapped_stages(found: Partition, ways: Ways, state: int) -> tuple[SppStage, ...]:
    """Return the stages of a state with their devices."""
    stages, low = list[SppStage](), 0
    for stage in found.stages(state):
        high = low + int(ways.row[stage.way]) + 1
        stages.append(SppStage(stage.first, stage.end, low, high))
        low = high
    return tuple(stages)


def stage_seconds(costs: SppCosts, stages: Sequence[SppStage]) -> StageSeconds:
    """Return the seconds of the stages, of the transfers between them, and of their AllReduces (equation 1).

    c^f (and c^b) after a stage is d / (|F(s_n)| |F(s_{n+1})|), divided by the least bandwidth between the two stages.
    (Section III.B prints the bandwidth after the fraction; Algorithm 4 divides by it.) A_s is 2 (k - 1) / k x bytes,
    divided by the least bandwidth between any two of the k replicas; it is 0 for one replica.
    """
    first, end, low, high = np.array([(s.first, s.end, s.low, s.high) for s in stages]).T
    k = high - low
    forward, backward = (sums[k - 1, end] - sums[k - 1, first] for sums in (costs.forward, costs.backward))
    total = costs.parameter_bytes[end] - costs.parameter_bytes[first]
    slowest = costs.least.between[low[:-1], high[:-1], high[1:]]
    sends = costs.sent_bytes[end[:-1]] / (k[:-1] * k[1:] * slowest)
    return StageSeconds(forward, backward, sends, 2 * (k - 1) * total / (k * costs.least.among[low, high]))


def least_bandwidths(bandwidths: Floats) -> LeastBandwidths:
    """Return the least bandwidths; ``bandwidths`` [V, V]: of the devices in their order."""
    count = len(bandwidths)
    among, between = np.full((count + 1,) * 2, np.inf), np.full((count + 1,) * 3, np.inf)
    later = np.where(np.tri(count, dtype=np.bool_), np.inf, bandwidths)  # of each device with those behind it
    for low in range(count):
        among[low, low + 1 :] = np.minimum.accumulate(later[low:].min(axis=0)[low:])
        for middle in range(low + 1, count):
            nearest = bandwidths[low:middle].min(axis=0)[middle:]
            between[low, middle, middle + 1 :] = np.minimum.accumulate(nearest)
    return LeastBandwidths(among, between)


# --- The pipeline execution scheduler, PE (SPP, section IV.A and Algorithm 1)


class StageSeconds(NamedTuple):
    """Seconds of each stage, arrays [|S|]: of a micro-batch's forward and backward, and A_s of the AllReduce.

    ``send`` [|S| - 1]: c^f_{s_n, s_{n+1}}, and as much for c^b_{s_{n+1}, s_n}.
    """

    forward: Floats
    backward: Floats
    send: Floats
    allreduce: Floats


def warm_up_of_queues(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Return K of each stage, for which a schedule such as ``K=9,5,1`` has the order of the queues U_s (Algorithm 1).

    Blocks J = 1 ... 4 |S| - 3 are the computation and communication blocks of a micro-batch, from the first stage's
    forward to its backward; forward and backward of the last stage are one block. Each pass over the blocks pops a
    micro-batch of each queue Q_j that held one when the pass began. (The paper prints lines 1 to 8
    as a loop over the j whose Q_j is not empty. If this loop saw what was pushed in the same pass, it would run one
    micro-batch after the other. But the text says that "at most one microbatch to be processed by each block" can run
    "about simultaneously", as in Fig. 4.)
    Queues are first in, first out, so micro-batch m is in block j in pass m + j, however many micro-batches there are.
    So stage n (from 1) runs K = min(4 (|S| - n) + 1, M) forwards before its first backward, and then a backward and a
    forward in turn.
    """
    return tuple(min(4 * (stages - n) + 1, micro_batches) for n in range(1, stages + 1))


def schedule_name(stages: int, micro_batches: int) -> str:
    """Return the name of the schedule with these K."""
    return "K=" + ",".join(map(str, warm_up_of_queues(stages, micro_batches)))


def makespan(seconds: StageSeconds, micro_batches: int) -> float:
    """Return T_PE (Algorithm 1, lines 9 to 26), in seconds.

    A stage runs the first action of U_s as soon as it is ready, and its AllReduce once all backwards are done. Each
    communication block is a channel of its own: both directions of a boundary can send at a time.
    """
    warm = np.array(warm_up_of_queues(len(seconds.forward), micro_batches), np.int64)
    order = early_backward_order(warm, micro_batches)
    send, no_weights = np.append(seconds.send, 0.0), np.zeros(0)
    return float(step_seconds(order, seconds.forward, seconds.backward, no_weights, send, send, seconds.allreduce))
