"""Cut the model so that the busiest stage is as fast as possible, by dynamic programming.

The devices of each stage are given, or only an order of the devices. With M micro-batches, a stage takes the seconds of
M forwards and backwards and of its AllReduce, and a boundary those of M transfers. Rows are shared by speed, so the
seconds of a micro-batch are 1 / sum over the stage's devices of 1 / t, where t is a device's seconds for the whole
micro-batch. A stage fits if each of its devices has the memory for one micro-batch in flight.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.planner.costs import ChainCosts, make_stages
from dapple_tf.planner.partition import Partition, Way, Ways, partition
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.profile import Profile, profile_on
from dapple_tf.simulator.arrays import Floats, prefix_sums, runs
from dapple_tf.simulator.transfer import LinkCosts
from dapple_tf.timeline.stage_costs import usable_bytes

_MOST_BLOCKS = 32
_MOST_GROUPS = 16  # groups of consecutive devices; all devices of a group belong to the same stage


class _Table:
    """The seconds of stages on sets of devices. Sets with equally many devices of each kind have one row."""

    def __init__(self, costs: ChainCosts) -> None:
        self.costs = costs
        kinds = costs.problem.cluster.device_kinds
        self._like = [kinds.index(kind) for kind in kinds]  # of each device the first one of its kind
        self._links = LinkCosts(costs.problem.cluster)
        self._rows = dict[frozenset[tuple[int, int]], int]()
        self.seconds = list[Floats]()

    def row(self, devices: Sequence[int]) -> int:
        """Return the row of a stage on these devices: seconds of all micro-batches, infinite where it does not fit."""
        counts = Counter(self._like[device] for device in devices)
        key = frozenset(counts.items())
        if key not in self._rows:
            self._rows[key] = len(self.seconds)
            self.seconds.append(self._of_kinds(counts))
        return self._rows[key]

    def _of_kinds(self, counts: Counter[int]) -> Floats:
        """Return the seconds of every possible stage on these devices, given as the number of devices of each kind."""
        costs, number = self.costs, sum(counts.values())
        alone = dict[int, Floats]()  # seconds of all micro-batches, if one device computed all rows
        for device in counts:
            both = np.add(*costs.block_seconds(costs.size / number, device))
            alone[device] = runs(prefix_sums(both)) * (costs.micro_batches * number)
        with np.errstate(divide="ignore", invalid="ignore"):
            taken: Floats = 1 / np.sum([count / alone[device] for device, count in counts.items()], axis=0)
            shares = {device: np.where(own > 0, taken / own, 1 / number) for device, own in alone.items()}
        for device, share in shares.items():
            taken[costs.needed_bytes(1, share) > usable_bytes(costs.problem.cluster.memory_of(device))] = np.inf
        return _rounded(np.where(np.isnan(taken), 0.0, taken))

    def ring(self, devices: Sequence[int]) -> tuple[float, float]:
        """Return the latency (seconds) and the seconds per byte of an AllReduce."""
        return self._links.allreduce(self._homes(devices))

    def link(self, senders: Sequence[int], receivers: Sequence[int]) -> tuple[float, float]:
        """Return the latency (seconds) and the seconds per byte of all micro-batches' transfers."""
        latency, per_byte = self._links.transfer(self._homes(senders), self._homes(receivers))
        return latency * self.costs.micro_batches, per_byte * self.costs.micro_batches

    def partition(self, states: int, ways: Sequence[Way]) -> Partition:
        """Return the partitions whose busiest stage or boundary takes least."""
        return partition(
            np.array(self.seconds),
            Ways.of(states, ways),
            boundary_bytes=self.costs.boundary_bytes,
            parameter_bytes=self.costs.parameter_bytes,
            splittable=self.costs.splittable,
            latest=False,
        )

    def _homes(self, devices: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.costs.problem.cluster.homes[device] for device in devices)


def _rounded(seconds: Floats) -> Floats:
    """Return the seconds rounded to 40 bits, so that equal stages have equal seconds, and the first cut is taken."""
    mantissa, exponent = np.frexp(seconds)
    rounded: Floats = np.ldexp(np.round(np.ldexp(mantissa, 40)), exponent - 40)
    return rounded


def fit_cuts(
    problem: PlanningProblem, devices: Sequence[Sequence[int]], micro_batch_size: int
) -> tuple[StagePlan, ...] | None:
    """Return stages on these ``devices``, cut so that the busiest stage is as fast as possible; None if none fit.

    ``devices``: those of each stage. Return None also if there are more stages than blocks of layers.
    """
    costs = ChainCosts(problem, problem.chain, micro_batch_size)
    table, ways = _Table(costs), list[Way]()
    for stage, own in enumerate(devices):
        before = devices[stage - 1] if stage else own
        link = table.link(before, own) if stage else (0.0, 0.0)
        ways.append(Way(stage + 1, stage, table.row(own), link, table.ring(own), len(before) == len(own)))
    found = table.partition(len(devices) + 1, ways)
    if not np.isfinite(found.values[len(devices), -1]):
        return None
    return make_stages(costs.chain, found.bounds(len(devices)), devices)


# --- Cut the blocks and an order of the devices at the same time: for devices of different kinds


class UnequalStages(NamedTuple):
    """Stages without shares, and the seconds of the busiest stage or boundary."""

    seconds: float
    stages: tuple[StagePlan, ...]


def unequal_stages(table: _Table, order: Sequence[int], *, straight: bool) -> list[UnequalStages]:
    """Return the best stages found for every number of stages; ``order``: the devices, of which the last may be unused.

    ``straight``: each stage has one device. Otherwise there are no cuts where tensors cannot be split. A boundary has
    the link between the two devices that meet there.
    """
    costs = table.costs
    step = 1 if straight else -(-len(order) // _MOST_GROUPS)
    bounds = [*range(0, len(order), step), len(order)]
    groups = len(bounds) - 1
    most = min(groups, costs.blocks)
    ways = list[Way]()  # with U groups, state s U + u is s + 1 stages on the first u groups
    for group, until in itertools.combinations(range(groups + 1), 2):
        if straight and until > group + 1:
            continue
        devices = order[bounds[group] : bounds[until]]
        row, ring = table.row(devices), table.ring(devices)
        if group == 0:
            ways.append(Way(until, 0, row, ring=ring, alike=straight))
            continue
        link = table.link(order[bounds[group] - 1 : bounds[group]], devices[:1])
        for stage in range(1, min(group, most - 1) + 1):
            ways.append(Way(stage * groups + until, (stage - 1) * groups + group, row, link, ring, straight))
    found = table.partition(most * groups + 1, ways)
    fitting = list[UnequalStages]()
    for stage in range(most):
        values = found.values[stage * groups + 1 : (stage + 1) * groups + 1, -1]
        until = int(np.argmin(values)) + 1
        if np.isfinite(values[until - 1]):
            stages = found.stages(stage * groups + until)
            ends = [0, *((int(found.state[s.way]) - 1) % groups + 1 for s in stages)]
            own = [order[bounds[a] : bounds[b]] for a, b in itertools.pairwise(ends)]
            starts = [*(s.first for s in stages), costs.blocks]
            fitting.append(UnequalStages(float(values[until - 1]), make_stages(costs.chain, starts, own)))
    return fitting


# --- Orders of unequal devices: a stage gets devices that follow each other in one of them


_MOST_KIND_ORDERS = 6  # as many as three kinds have
_MOST_FIRST_SERVERS = 4
_FEW_DEVICES = 16  # with more, rotated orders make the search 1.5 times as long and rarely change the plan


def device_orders(profile: Profile, cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return orders of the devices to try: as given, by speed, kind by kind, kinds in turn, and rotated.

    By speed means falling and rising speed for the whole model. There are up to six orders of the kinds, each with all
    devices of one kind after the other, and with one device of each kind in turn. Rotated orders, on at most 16
    devices, are as given but start at the second, third or fourth server. (The last devices of an order may be unused,
    so it matters which ones come first.) Equally fast devices stay in their order. Raises ProfileError for a kind
    without costs.
    """
    given = tuple(range(cluster.devices))
    seconds = {
        kind: profile_on(profile, cluster, cluster.device_kinds.index(kind)).model_seconds(profile.batch_size)
        for kind in dict.fromkeys(cluster.device_kinds)
    }
    orders = [given, *(tuple(sorted(given, key=lambda d: sign * seconds[cluster.kind_of(d)])) for sign in (1, -1))]
    of_kind = {kind: [device for device in given if cluster.kind_of(device) == kind] for kind in seconds}
    for kinds in itertools.islice(itertools.permutations(seconds), _MOST_KIND_ORDERS):
        turns = itertools.zip_longest(*(of_kind[kind] for kind in kinds))
        orders.append(tuple(device for turn in turns for device in turn if device is not None))
        orders.append(tuple(device for kind in kinds for device in of_kind[kind]))
    servers = len(cluster.servers)
    for first in range(1, min(servers, _MOST_FIRST_SERVERS)) if cluster.devices <= _FEW_DEVICES else ():
        orders.append(tuple(sorted(given, key=lambda d: (cluster.homes[d] - first) % servers)))
    return tuple(dict.fromkeys(orders))


# --- The best few results for each number of stages, over all orders: for planner "dapple"


ORIGIN = "unequal devices"
_MOST = 4  # results for each number of stages and one micro-batch size


def find_unequal_stages(problem: PlanningProblem) -> list[tuple[int, tuple[StagePlan, ...]]]:
    """Return stages for each micro-batch size and number of stages: those whose busiest stage takes the least time.

    They are pairs of the size (samples) and the stages. Each stage has devices that follow each other in one of
    ``device_orders``. Raises ProfileError for a kind without costs.
    """
    return [(size, stages) for size in problem.micro_batch_sizes for stages in _stages_of_size(problem, size)]


def _stages_of_size(problem: PlanningProblem, size: int) -> Iterator[tuple[StagePlan, ...]]:
    """Yield the best few results for each number of stages, over all orders of the devices, without repetition."""
    found = dict[tuple[StagePlan, ...], UnequalStages]()
    table = _Table(ChainCosts(problem, coarsen(problem.chain, _MOST_BLOCKS), size))
    for order in device_orders(problem.profile, problem.cluster):
        for straight in (False, True):
            for entry in unequal_stages(table, order, straight=straight):
                found.setdefault(entry.stages, entry)
    counts: dict[int, int] = {}
    for entry in sorted(found.values(), key=lambda entry: (entry.seconds, len(entry.stages))):
        counts[len(entry.stages)] = counts.get(len(entry.stages), 0) + 1
        if counts[len(entry.stages)] <= _MOST:
            yield entry.stages
