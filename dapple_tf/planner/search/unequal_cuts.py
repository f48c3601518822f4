"""Stages of unequal devices by dynamic programming: cuts of the layers and of an order of the devices, both at once.

The busiest stage is to be as fast as possible, as in ``fit_cuts``. A stage's rows are shared by speed, so its seconds
of a micro-batch are 1 / sum over its devices of 1 / t, where t is a device's seconds for the whole micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.search.search_space import coarsen
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.device_costs import profile_on
from dapple_tf.profiler.linearise import Chain
from dapple_tf.profiler.profile import Profile
from dapple_tf.simulator.arrays import Floats, Integers, prefix_sums
from dapple_tf.simulator.compiled import call_from_compiled, compiled, compiled_part
from dapple_tf.simulator.memory import usable_bytes
from dapple_tf.simulator.transfer import allreduce_cost, link_tables, ring_seconds, transfer_cost

call_from_compiled(ring_seconds)

_MOST_BLOCKS = 32
_MOST_GROUPS = 16  # of consecutive devices, which belong to one stage


class UnequalStages(NamedTuple):
    """Stages without shares, and the seconds of their busiest stage: M (F + B) and AllReduce, or M transfers."""

    seconds: float
    stages: tuple[StagePlan, ...]


class _Costs(NamedTuple):
    """Costs of N blocks, K kinds and U groups of devices in one order: seconds of a step, bytes of a micro-batch."""

    compute: Floats  # [K, N + 1] seconds of forward and backward of all micro-batches, sums
    devices_before: Integers  # [K, U + 1] devices of each kind in the first groups
    memory: Floats  # [K] usable bytes
    ring: Floats  # [U, U + 1, 2] latency and seconds per byte of an AllReduce from one group on to another
    transfer: Floats  # [U, 2] latency (seconds) and seconds per byte into each group, of all micro-batches
    parameter_bytes: Floats  # [N + 1] sums
    boundary_bytes: Floats  # [N] that cross the cut before each block
    stash_bytes: Floats  # [N + 1] sums
    working_bytes: Floats  # [N]
    splittable: NDArray[np.bool_]  # [N] whether stages of unequal replica counts or shares can meet before each block
    fixed_bytes_per_parameter_byte: float
    recompute: bool


def unequal_stages(
    problem: PlanningProblem, order: Sequence[int], micro_batch_size: int, *, straight: bool, transfers: bool
) -> list[UnequalStages]:
    """Return the best stages found for every number of stages; ``order``: the devices, of which the last may be unused.

    ``straight``: one device a stage. Otherwise stages are not cut where tensors cannot be split. ``transfers``: count
    transfers, as over the link between the two devices that meet at a boundary.
    """
    chain = problem.chain
    if len(chain.parameter_bytes) > _MOST_BLOCKS:
        chain = coarsen(chain, _MOST_BLOCKS)
    step = 1 if straight else -(-len(order) // _MOST_GROUPS)
    bounds = [*range(0, len(order), step), len(order)]
    costs = _make_costs(problem, chain, order, bounds, micro_batch_size, transfers=transfers)
    most = min(len(bounds) - 1, len(chain.parameter_bytes))
    values, starts, groups = _fit(costs, most, straight)
    found = []
    for count, seconds in enumerate(values.tolist(), 1):
        if seconds < np.inf:
            layers = [chain.positions[start] for start in starts[count - 1, :count]] + [len(problem.profile.layers)]
            ends = [bounds[group] for group in groups[count - 1, : count + 1]]
            found.append(
                UnequalStages(
                    seconds,
                    tuple(
                        StagePlan(layers[s], layers[s + 1] - 1, tuple(order[ends[s] : ends[s + 1]]))
                        for s in range(count)
                    ),
                )
            )
    return found


def _make_costs(
    problem: PlanningProblem,
    chain: Chain,
    order: Sequence[int],
    bounds: Sequence[int],
    size: int,
    *,
    transfers: bool,
) -> _Costs:
    cluster, profile = problem.cluster, problem.profile
    kinds = list(dict.fromkeys(cluster.kind_of(device) for device in order))
    of_kind = [next(device for device in order if cluster.kind_of(device) == kind) for kind in kinds]
    micro_batches, scale, starts = problem.global_batch_size // size, size / profile.batch_size, chain.positions[:-1]
    compute = []
    for device in of_kind:
        own = profile_on(profile, cluster, device)
        seconds = own.forward_seconds(size) * (2 if problem.recompute else 1) + own.backward_seconds(size)
        compute.append(np.add.reduceat(seconds, starts) * micro_batches)
    count = [[cluster.kind_of(device) == kind for device in order] for kind in kinds]
    homes, tables, groups = [cluster.homes[device] for device in order], link_tables(cluster), len(bounds) - 1
    ring = np.zeros((groups, groups + 1, 2))
    for first in range(groups):
        for end in range(first + 1, groups + 1):
            ring[first, end] = allreduce_cost(homes[bounds[first] : bounds[end]], tables)
    border = np.zeros((groups, 2))
    for group in range(1, groups) if transfers else ():
        border[group] = transfer_cost([homes[bounds[group] - 1]], [homes[bounds[group]]], tables)
    return _Costs(
        compute=prefix_sums(np.array(compute)),
        devices_before=prefix_sums(np.array(count, np.float64))[:, bounds].astype(np.int64),
        memory=np.array([usable_bytes(cluster.memory_of(device)) for device in of_kind]),
        ring=ring,
        transfer=border * micro_batches,
        parameter_bytes=prefix_sums(chain.parameter_bytes),
        boundary_bytes=chain.boundary_bytes[:-1] * scale,
        stash_bytes=prefix_sums(chain.stash_bytes) * scale,
        working_bytes=chain.working_bytes * scale,
        splittable=np.concatenate([[True], chain.splittable]),
        fixed_bytes_per_parameter_byte=problem.values_per_weight,
        recompute=bool(problem.recompute),
    )


@compiled_part
def _stage_seconds(c: _Costs, first: int, end: int, group: int, until: int) -> float:
    """Return the seconds of blocks ``first`` to ``end`` on these groups; infinite if they do not fit the memory."""
    speed, kinds = 0.0, c.compute.shape[0]
    for kind in range(kinds):
        devices = c.devices_before[kind, until] - c.devices_before[kind, group]
        seconds = c.compute[kind, end] - c.compute[kind, first]
        if devices and seconds > 0:
            speed += devices / seconds
    parameters = c.parameter_bytes[end] - c.parameter_bytes[first]
    fixed = parameters * c.fixed_bytes_per_parameter_byte
    varies = c.stash_bytes[end] - c.stash_bytes[first] + c.working_bytes[first:end].max()
    if c.recompute:
        varies += c.boundary_bytes[first]
    for kind in range(kinds):
        if c.devices_before[kind, until] > c.devices_before[kind, group]:
            seconds = c.compute[kind, end] - c.compute[kind, first]
            share = 1 / seconds / speed if seconds > 0 else 1.0
            if fixed + varies * share > c.memory[kind]:
                return np.inf
    ring = ring_seconds(c.ring[group, until, 0], c.ring[group, until, 1], parameters)
    return float((1 / speed if speed > 0 else 0.0) + ring)


@compiled
def _fit(c: _Costs, most: int, straight: bool) -> tuple[Floats, Integers, Integers]:
    """Return for every number of stages up to ``most`` the seconds of the busiest one, first blocks and first groups.

    By dynamic programming over (stages, blocks, groups). Infinite where nothing fits.
    """
    n, groups = c.compute.shape[1] - 1, len(c.transfer)
    seconds = np.full((n, groups, groups + 1, n + 1), np.inf)  # of a stage, by first block and group, and their ends
    for start in range(n):
        for group in range(groups):
            for until in range(group + 1, group + 2 if straight else groups + 1):
                for end in range(start + 1, n + 1):
                    seconds[start, group, until, end] = _stage_seconds(c, start, end, group, until)
    best = np.full((n + 1, groups + 1), np.inf)  # the busiest stage with the first blocks and groups in stages so far
    best[0, 0] = 0.0
    from_block = np.zeros((most, n + 1, groups + 1), np.int64)
    from_group = np.zeros((most, n + 1, groups + 1), np.int64)
    values = np.full(most, np.inf)
    starts, bounds = np.zeros((most, most), np.int64), np.zeros((most, most + 1), np.int64)
    for s in range(most):
        following = np.full((n + 1, groups + 1), np.inf)
        for start in range(s, n):
            if not straight and not c.splittable[start]:
                continue
            for group in range(s, groups):
                before = best[start, group]
                if before == np.inf:
                    continue
                if s:
                    before = max(before, c.transfer[group, 0] + c.transfer[group, 1] * c.boundary_bytes[start])
                for until in range(group + 1, group + 2 if straight else groups + 1):
                    for end in range(start + 1, n + 1):
                        largest = max(before, seconds[start, group, until, end])
                        if largest < following[end, until]:
                            following[end, until] = largest
                            from_block[s, end, until], from_group[s, end, until] = start, group
        best = following
        until = int(np.argmin(best[n]))
        values[s] = best[n, until]
        if values[s] == np.inf:
            continue
        block, bounds[s, s + 1] = n, until
        for stage in range(s, -1, -1):
            block, until = from_block[stage, block, until], from_group[stage, block, until]
            starts[s, stage], bounds[s, stage] = block, until
    return values, starts, bounds


# --- Orders of unequal devices: a stage gets devices that follow each other in one of them


_MOST_KIND_ORDERS = 6  # those of three kinds
_MOST_FIRST_SERVERS = 4
_FEW_DEVICES = 16  # with more, rotated orders make the search 1.5 times as long and rarely change the plan


def device_orders(profile: Profile, cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return orders of the devices to try: as given, by speed, grouped by kind, interleaved by kind, and rotated.

    By speed of the whole model: falling and rising. By kind: for up to six orders of the kinds, all devices of one kind
    after another, and one device of each kind in turn. Rotated, on at most 16 devices: as given, but starting at the
    second, third or fourth server. (The last devices of an order may be unused, so what comes first matters.) Equally
    fast devices stay in their order. Raises ProfileError for a kind without costs.
    """
    given = tuple(range(cluster.devices))
    seconds = {
        kind: _seconds(profile_on(profile, cluster, cluster.device_kinds.index(kind)))
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


def _seconds(profile: Profile) -> float:
    size = profile.batch_size
    return float(profile.forward_seconds(size).sum() + profile.backward_seconds(size).sum())


# --- Plans on devices of different kinds whose stages are found by dynamic programs, for planners "best" and "dapple"


ORIGIN = "unequal devices"
_MOST = 4  # stages of each number, for one micro-batch size

SizedStages = tuple[int, UnequalStages]
"""A micro-batch size (samples), and stages for it."""


def find_unequal_stages(problem: PlanningProblem) -> list[SizedStages]:
    """Return stages for every micro-batch size, of every number: those whose busiest stage takes the fewest seconds.

    Each stage has devices that follow each other in one of ``device_orders``. Raises ProfileError for a kind without
    costs.
    """
    return [(size, entry) for size in problem.micro_batch_sizes for entry in _stages_of_size(problem, size)]


def _stages_of_size(problem: PlanningProblem, size: int) -> Iterator[UnequalStages]:
    """Yield the best few stages of every number, over all orders of the devices, each once."""
    found: dict[tuple[StagePlan, ...], UnequalStages] = {}
    for order in device_orders(problem.profile, problem.cluster):
        for straight in (False, True):
            for entry in unequal_stages(problem, order, size, straight=straight, transfers=True):
                found.setdefault(entry.stages, entry)
    counts: dict[int, int] = {}
    for entry in sorted(found.values(), key=lambda entry: (entry.seconds, len(entry.stages))):
        counts[len(entry.stages)] = counts.get(len(entry.stages), 0) + 1
        if counts[len(entry.stages)] <= _MOST:
            yield entry
