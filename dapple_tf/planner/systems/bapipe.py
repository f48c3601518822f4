"""Planner "bapipe": balanced partition and exploration of schedules on a chain of accelerators (BaPipe, section 3).

Zhao et al., "BaPipe: Exploration of Balanced Pipeline Parallelism for DNN Training", 2020.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.baselines import data_parallel
from dapple_tf.planner.costs import ChainCosts, make_stages
from dapple_tf.planner.partition import least_slowest
from dapple_tf.planner.planning_problem import Candidate, PlannerResult, PlanningProblem
from dapple_tf.planner.registration import planner
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.profiler.cluster import Link
from dapple_tf.profiler.linearise import cut_chain
from dapple_tf.simulator.arrays import Floats, Integers, runs
from dapple_tf.simulator.engine import step_seconds
from dapple_tf.simulator.order import early_backward_order
from dapple_tf.timeline.stage_costs import usable_bytes

_ORIGIN = "BaPipe's partition"
_SYNCHRONOUS = {"1F1B-SNO": "1f1b-sno", "1F1B-SO": "1f1b-so"}
_MOST_BLOCKS = 400


Cuts = tuple[int, ...]
"""The first layer of each stage, and the number of layers."""


class _Network(NamedTuple):
    """The blocks of a model on accelerators 0, 1 ...; ``links`` [N - 1]: those between neighbours.

    ``forward``, ``backward`` [N, L + 1]: prefix sums of seconds on each accelerator.
    """

    costs: ChainCosts
    forward: Floats
    backward: Floats
    links: tuple[Link, ...]

    @property
    def seconds(self) -> Floats:
        """Prefix sums of forward and backward on each accelerator."""
        return self.forward + self.backward

    @property
    def crossing_bytes(self) -> Floats:
        """The bytes a of each cut, [L - 1]."""
        return self.costs.boundary_bytes[1:-1]


class _Explored(NamedTuple):
    """A balanced partition for a schedule, simulated; ``sending_bound``: whether communication is the bottleneck."""

    schedule: str
    network: _Network
    cuts: Cuts
    sending_bound: bool
    candidate: Candidate


@planner("bapipe", unequal=True, candidate=True)
def plan_bapipe(problem: PlanningProblem, *, pipelines_only: bool = False) -> PlannerResult | None:
    """Return the fastest of what BaPipe explores; None if nothing fits the memory.

    Each accelerator holds a stage, in the order of the devices. If there are fewer blocks of layers than devices, only
    the first devices hold one. The inter-layer partition is balanced over accelerators that may be unequal. If sending
    over some link takes longer than the slowest stage computes, the coarse-grained network is partitioned instead. If
    this partition does not fit the memory, the best one that fits is taken. Then 1F1B-SNO and 1F1B-SO (or the schedule
    that the problem names) are simulated at every micro-batch size. Data parallelism, which the paper finds best for
    ResNet-50, is simulated too, unless ``pipelines_only``.

    Where the cluster says ``execution: async``, 1F1B-AS or FBP-AS is chosen, with intra-layer partition; its seconds
    are ``PlannerResult.formula_seconds``. No graph runs these: the plan has the layers of the inter-layer partition and
    the schedule of synchronous execution that holds as many micro-batches. Left out: pipelines replicated by data
    parallelism, which the paper calls orthogonal. More than 400 blocks are merged.
    """
    auto = problem.schedule == "auto"
    if problem.cluster.execution == "async":
        schedules = AS_SCHEDULES if auto else dict.fromkeys(AS_SCHEDULES, problem.schedule)
        timed = [(_seconds_of_minibatch(explored), explored) for explored in _explore(problem, schedules)]
        if not timed:
            return None
        seconds, explored = min(timed, key=lambda entry: entry[0])
        formula = f"{explored.schedule} on accelerators of asynchronous execution"
        return PlannerResult(explored.candidate, formula_seconds=seconds, formula=formula)
    # Under a given schedule stages are tuned as if they held as many micro-batches as under 1F1B-SNO.
    schedules = _SYNCHRONOUS if auto else {"1F1B-SNO": problem.schedule}
    found = [explored.candidate for explored in _explore(problem, schedules)]
    found += [] if pipelines_only else problem.evaluate_all_sizes(data_parallel(problem), "DP")
    return PlannerResult.fastest(found)


def _explore(problem: PlanningProblem, schedules: Mapping[str, str]) -> Iterator[_Explored]:
    """Yield the balanced partition (section 3.3) of each micro-batch size under each schedule, if it fits the memory.

    ``schedules``: the schedules that are simulated, by the names that BaPipe has for them.
    """
    for size in problem.micro_batch_sizes:
        for schedule, name in schedules.items():
            network = _make_network(ChainCosts(problem, coarsen(problem.chain, _MOST_BLOCKS), size))
            if sending_bound := _is_bound_by_communication(network):
                network = _coarsen_by_communication(network)
            cuts = balance(network.seconds, _fitting(network, schedule))
            stages = make_stages(network.costs.chain, cuts, ((n,) for n in range(len(cuts) - 1)))
            if cuts and (candidate := problem.evaluate(stages, size, _ORIGIN, name)):
                yield _Explored(schedule, network, cuts, sending_bound, candidate)


def _seconds_of_minibatch(explored: _Explored) -> float:
    """Return the simulated seconds of a mini-batch under a schedule of asynchronous execution."""
    network, cuts = explored.network, explored.cuts
    forward, backward = (_of_stages(sums, cuts) for sums in (network.forward, network.backward))
    if not explored.sending_bound:
        even = intra_layer_seconds(network.seconds)
        both = np.where(forward + backward > 0, forward + backward, 1.0)
        forward, backward = even * forward / both, even * backward / both
    pairs = zip(cuts[1:-1], network.links, strict=True)
    sending = np.array([network.crossing_bytes[cut - 1] / link.bandwidth for cut, link in pairs])
    return asynchronous_seconds(explored.schedule, forward, backward, sending, network.costs.micro_batches)


def _is_bound_by_communication(network: _Network) -> bool:
    """Return whether sending features over some link takes longer than the slowest stage (section 3.3.3)."""
    cuts = balance(network.seconds)
    seconds = slowest(network.seconds, cuts)
    pairs = zip(cuts[1:-1], network.links, strict=True)
    return any(link.latency + network.crossing_bytes[cut - 1] / link.bandwidth > seconds for cut, link in pairs)


def _coarsen_by_communication(network: _Network) -> _Network:
    """Return the coarse-grained network, in which the features of each cut can be sent over the slowest link within T.

    If it has fewer blocks than there are accelerators, it is on the first ones. If no cut is left, it has one block.
    """
    ideal = ideal_seconds(network.seconds[:, -1])
    threshold = min(feature_threshold(ideal, link.bandwidth, link.latency) for link in network.links)
    kept, chain = coarse_cuts(network.crossing_bytes, threshold), network.costs.chain
    coarse = cut_chain(chain.profile, [chain.positions[cut] for cut in kept])
    return _make_network(ChainCosts(network.costs.problem, coarse, network.costs.size))


def _make_network(costs: ChainCosts) -> _Network:
    """Return the blocks on as many accelerators as can have a stage."""
    cluster = costs.problem.cluster
    count = min(cluster.devices, costs.blocks)
    sums = [costs.second_sums(costs.size, device) for device in range(count)]
    forward, backward = (np.array(rows) for rows in zip(*sums, strict=True))
    links = tuple(cluster.link(a, b) for a, b in itertools.pairwise(cluster.homes[:count]))
    return _Network(costs, forward, backward, links)


def _fitting(network: _Network, schedule: str) -> NDArray[np.bool_]:
    """Return [N, L, L + 1]: whether accelerator n has the memory for a stage of the blocks i to j (exclusive)."""
    costs, count = network.costs, len(network.forward)
    memory = [usable_bytes(memory) for memory in costs.problem.cluster.memories[:count]]
    held = in_flight(schedule, count, costs.micro_batches).tolist()
    needed = {pair: costs.needed_bytes(pair[0]) <= pair[1] for pair in set(zip(held, memory, strict=True))}
    return np.array([needed[pair] for pair in zip(held, memory, strict=True)])


def _of_stages(sums: Floats, cuts: Cuts) -> Floats:
    """Return the seconds of each stage on its accelerator."""
    return np.array([sums[n, end] - sums[n, first] for n, (first, end) in enumerate(itertools.pairwise(cuts))])


# --- BaPipe's pipeline scheduling with asynchronous execution, simulated: 1F1B-AS and FBP-AS (BaPipe, section 3.2.1)


AS_SCHEDULES = {"1F1B-AS": "1f1b-sno", "FBP-AS": "1f1b-so"}
"""Each schedule of asynchronous execution, and the one of synchronous execution that holds as many micro-batches."""


def in_flight(schedule: str, stages: int, micro_batches: int) -> Integers:
    """Return how many micro-batches' features each stage holds (Tables 1 and 2), from stage 0 on.

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
        return float(step_seconds(order, f, b, nothing, nothing, nothing, nothing))
    both = forward + backward
    waiting = np.maximum(2 * np.maximum(before, behind), both)
    longer = np.divide(waiting, both, out=np.ones(len(both)), where=both > 0)
    return float(two_lanes(forward * longer, backward * longer, held, micro_batches))


def two_lanes(forward: Floats, backward: Floats, held: Integers, micro_batches: int) -> float:
    """Return the seconds of FBP-AS: each accelerator runs forwards in one lane and backwards in another.

    While both lanes are busy, a forward and a backward take F + B seconds each. While only one lane is busy, it has the
    accelerator for itself.
    ``held``: the micro-batches that a stage may have begun and not ended.
    """
    count = len(forward)
    begun, ended = (np.zeros((2, count), np.int64) for _ in range(2))  # operations of a lane: forward 0, backward 1
    left, alone = np.zeros((2, count)), np.array([forward, backward])  # left: fraction of a lane's operation
    now = 0.0
    while ended[1, 0] < micro_batches:
        arrived = np.append(micro_batches, ended[0, :-1]), np.append(ended[1, 1:], 0)
        idle = begun == ended
        starts_forward = idle[0] & (begun[0] < arrived[0]) & (begun[0] - ended[1] < held)
        begun[0] += starts_forward
        arrived[1][-1] = ended[0, -1]
        starts_backward = idle[1] & (begun[1] < arrived[1])
        begun[1] += starts_backward
        left[0, starts_forward] = left[1, starts_backward] = 1.0
        busy = begun > ended
        seconds = np.where(busy.all(axis=0), forward + backward, alone)
        rest = left * seconds
        step = float(rest[busy].min())
        now += step
        rest -= step
        done = busy & (rest <= 1e-12 * seconds)
        left = np.divide(rest, seconds, out=np.zeros_like(rest), where=busy & ~done)
        ended += done
    return now


# --- The balanced partition over unequal accelerators (BaPipe, section 3.3)
#
# Letters: N accelerators in a daisy chain, of which accelerator n takes T_n for a micro-batch of the whole network of L
# layers; T the ideal time of a stage; a the bytes of the features that cross a cut. ``seconds`` [N, L + 1] are prefix
# sums of each layer's forward and backward of a micro-batch, on each accelerator.


def ideal_seconds(whole: Floats) -> float:
    """Return T (formula 1), in seconds; ``whole`` [N]: T_n. 0 where some accelerator takes no time."""
    return float(1 / (1 / whole).sum()) if (whole > 0).all() else 0.0


def partition_by_ideal(seconds: Floats) -> Cuts:
    """Return the partition in which each stage takes nearly T on its accelerator.

    A stage ends at the layer that is nearest to where it reaches T. Each stage has at least one layer.
    """
    count, layers = seconds.shape[0], seconds.shape[1] - 1
    ideal = ideal_seconds(seconds[:, -1])
    cuts = [0]
    for n in range(count - 1):
        first, most = cuts[-1], layers - (count - 1 - n)
        reached = seconds[n] - seconds[n, first]
        nearest = first + 1 + int(np.argmin(np.abs(reached[first + 1 : most + 1] - ideal)))
        cuts.append(nearest)
    return (*cuts, layers)


def balance(seconds: Floats, fitting: NDArray[np.bool_] | None = None) -> Cuts:
    """Return the inter-layer partition with the least slowest stage; empty where none fits the memory.

    ``fitting`` [N, L, L + 1]: whether an accelerator has the memory for a stage of layers; None: it always has. The
    paper iterates "to load balancing" from the partition according to T, and tunes stages "finely" to the memory,
    without saying how: here the slowest stage is the least possible. The partition according to T is taken if it fits
    and no other has a faster slowest stage.
    """
    stages = runs(seconds) if fitting is None else np.where(fitting, runs(seconds), np.inf)
    ideal = partition_by_ideal(seconds)
    of_ideal = max(stages[n, first, end] for n, (first, end) in enumerate(itertools.pairwise(ideal)))
    least, cuts = least_slowest(stages)
    return ideal if np.isfinite(of_ideal) and not least < of_ideal else cuts


def slowest(seconds: Floats, cuts: Cuts) -> float:
    """Return the seconds of the slowest stage."""
    return float(_of_stages(seconds, cuts).max())


def feature_threshold(seconds: float, bandwidth: float, latency: float) -> float:
    """Return a_th (section 3.3.3): the bytes that are sent within ``seconds``; below 0 where latency takes longer."""
    return (seconds - latency) * bandwidth


def coarse_cuts(crossing_bytes: Floats, threshold: float) -> NDArray[np.int64]:
    """Return the cuts of the coarse-grained network: those that at most a_th bytes cross.

    ``crossing_bytes`` [L - 1]: a of the cut before layers 1, 2 ..., for a micro-batch.
    """
    return np.flatnonzero(crossing_bytes <= threshold) + 1


def intra_layer_seconds(seconds: Floats) -> float:
    """Return the seconds of each stage where layers are divided between neighbours (section 3.3.2).

    All accelerators then take equally long. This is the T of formula 1 for layers that are not uniform. The additional
    communication of a divided layer is left out.
    """
    low, high = 0.0, float(seconds[:, -1].min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _reach(seconds, middle) >= seconds.shape[1] - 1:
            high = middle
        else:
            low = middle
    return high


_HALVINGS = 60  # to the last digits of a double


def _reach(seconds: Floats, limit: float) -> float:
    """Return how many layers, with fractions, the accelerators finish if each of them takes ``limit`` seconds."""
    layers = np.arange(seconds.shape[1], dtype=np.float64)
    finished = 0.0  # layers
    for row in seconds:
        until = float(np.interp(finished, layers, row)) + limit
        last = int(np.searchsorted(row, until, side="right")) - 1  # also past layers that take no time
        if last >= len(row) - 1:
            return float(len(row) - 1)
        finished = last + (until - row[last]) / (row[last + 1] - row[last])
    return finished
