"""Contention for the servers' network interfaces: the rule, and the interface directions that each flow of a plan uses.

A *flow* is a transfer of one micro-batch over one boundary in one direction, or a ring: an AllReduce of one stage, of
one layer of it where AllReduce overlaps backward. A flow first waits for its latency, and uses nothing. Then it moves.
A server's interface has two directions, leaving and entering. The bytes v_d that a flow moves through direction d are

- of a transfer, those that leave or enter the server through its interface (``transfer.measure_loads``);
- of a ring, 2 (r - 1) / r of the parameters' bytes for each direction that some link of the ring uses.

With n_d flows that move through direction d, each of them has 1 / n_d of its bandwidth. The fraction of a flow that is
done grows, each second, by the least of bandwidth / n_d / v_d over the directions that it uses, and of 1 / U, where U
is what its bytes need on links that nothing else uses: those inside servers, and those given for a pair of servers.
Shares are equal, recomputed whenever a flow starts or stops transferring; what a flow cannot use, no other gets.

Alone, a flow takes latency + max(U, v_d / bandwidth), which is what ``transfer_cost`` and ``allreduce_cost`` say. With
T that maximum and the *demand* x_d = v_d / bandwidth / T, the part of the bandwidth that it uses alone, it moves
max(1, n_d x_d) times more slowly than alone: U needs no term, since max(U / T, x_d) = 1 <= n_d. Demands do not depend
on the number of bytes. A flow without bytes moves through nothing.

A boundary's transfers in one direction follow one another, first in, first out, so they are at most one flow at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.graph_passes.analysis.row_bounds import cut_points
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.transfer import LinkTables, link_tables, measure_allreduce, measure_loads


class Flows(NamedTuple):
    """The interface directions that the flows of S stages share.

    Flow s is the transfer from stage s to the next one, S + s that of gradients back to stage s, and 2 S + s the ring
    of stage s. The uses of flow f are the entries ``first[f]`` to ``first[f + 1]``: a ``direction``, counted from 0 to
    ``directions``, and the ``demand``. Directions in which no flow can slow another down are left out, so without
    ``directions`` nothing is shared. ``latency`` [3 S]: seconds of a flow. The other flows that use some of flow f's
    directions, those *near* it, are the entries ``near_first[f]`` to ``near_first[f + 1]`` of ``near``.
    """

    first: Integers
    direction: Integers
    demand: Floats
    latency: Floats
    directions: int
    near_first: Integers
    near: Integers


def plan_flows(stages: Sequence[StagePlan], cluster: Cluster) -> Flows:
    """Return the flows of a plan's stages on ``cluster``; between stages on the same devices nothing is sent."""
    homes = [[cluster.homes[device] for device in stage.devices] for stage in stages]
    moves = [a.devices != b.devices for a, b in itertools.pairwise(stages)]
    return find_flows(homes, moves, link_tables(cluster), [stage.row_shares for stage in stages])


def find_flows(
    homes: Sequence[Sequence[int]],
    moves: Sequence[bool],
    tables: LinkTables,
    shares: Sequence[Sequence[int]] | None = None,
) -> Flows:
    """Return the flows of stages on these servers.

    ``homes``: the server of each replica of each stage. ``moves``: of each boundary, whether its stages are on
    different devices; else nothing is sent. ``shares``: the rows that the replicas of each stage hold, as whole numbers
    in proportion; empty for equal shares.
    """
    offsets = np.cumsum([0, *map(len, homes)])
    servers = np.array([server for stage in homes for server in stage], np.int64)
    every = [cut_points(len(of), own) for of, own in zip(homes, shares or [()] * len(homes), strict=True)]
    cuts = np.array([point for points in every for point in points], np.int64)
    return measure_flows(servers, offsets, cuts, np.array(moves, np.bool_), tables)


def measure_flows(servers: Integers, offsets: Integers, cuts: Integers, moves: Integers, t: LinkTables) -> Flows:
    """Return ``find_flows`` for arrays.

    ``offsets``: where each stage's ``servers`` begin. ``cuts``: the cut points of each stage's rows, of which there is
    one more than replicas.
    """
    stages = len(offsets) - 1
    demands = np.zeros((3 * stages, 2 * len(t.inside)))  # column 2 i: leaving server i; 2 i + 1: entering it
    latency = np.zeros(3 * stages)
    for s in range(stages):
        own = servers[offsets[s] : offsets[s + 1]]
        latency[2 * stages + s] = fill_ring(demands[2 * stages + s], own, t)
        if s + 1 < stages and moves[s]:
            others = servers[offsets[s + 1] : offsets[s + 2]]
            cut = cuts[offsets[s] + s : offsets[s + 1] + s + 1]
            cut_next = cuts[offsets[s + 1] + s + 1 : offsets[s + 2] + s + 2]
            latency[s] = fill_transfer(demands[s], own, others, cut, cut_next, t)
            latency[stages + s] = fill_transfer(demands[stages + s], others, own, cut_next, cut, t)
    return _keep_shared(demands, latency)


def fill_transfer(
    demands: Floats, senders: Integers, receivers: Integers, cut: Integers, cut_next: Integers, t: LinkTables
) -> float:
    """Fill in the demands of a transfer by direction; return its latency (seconds)."""
    latency, alone, leaving, entering = measure_loads(senders, receivers, cut, cut_next, t)
    alone = max(alone, max(leaving.max(), entering.max()) * t.interface)
    for server in range(len(leaving)):
        demands[2 * server] = leaving[server] * t.interface / alone
        demands[2 * server + 1] = entering[server] * t.interface / alone
    return float(latency)


def fill_ring(demands: Floats, servers: Integers, t: LinkTables) -> float:
    """Fill in the demands of a ring by direction; return its latency (seconds)."""
    latency, per_byte = measure_allreduce(servers, t)
    r = len(servers)
    for i in range(r):
        a, b = servers[i], servers[(i + 1) % r]
        if a != b and not t.own[a, b] > 0:
            demands[2 * a] = demands[2 * b + 1] = 2 * (r - 1) / r * t.interface / per_byte
    return float(latency)


def _keep_shared(demands: Floats, latency: Floats) -> Flows:
    """Return flows with these demands [flows, directions]."""
    flows, every = demands.shape
    number, directions = np.full(every, -1, np.int64), 0
    for d in range(every):
        count, largest = 0, 0.0
        for f in range(flows):
            if demands[f, d] > 0:
                count, largest = count + 1, max(largest, demands[f, d])
        if count > 1 and count * largest > 1:  # else all flows there can move at once as fast as alone
            number[d], directions = directions, directions + 1
    first = np.zeros(flows + 1, np.int64)
    direction, demand = np.zeros(flows * directions, np.int64), np.zeros(flows * directions)
    entry = 0
    for f in range(flows):
        for d in range(every):
            if number[d] >= 0 and demands[f, d] > 0:
                direction[entry], demand[entry] = number[d], demands[f, d]
                entry += 1
        first[f + 1] = entry
    near_first, near = _find_near(first, direction, directions)
    return Flows(first, direction[:entry].copy(), demand[:entry].copy(), latency, directions, near_first, near)


def _find_near(first: Integers, direction: Integers, directions: int) -> tuple[Integers, Integers]:
    """Return ``near_first`` and ``near``."""
    flows = len(first) - 1
    users, count = np.zeros((directions, flows), np.int64), np.zeros(directions, np.int64)
    for f in range(flows):
        for use in range(first[f], first[f + 1]):
            d = direction[use]
            users[d, count[d]] = f
            count[d] += 1
    near_first, seen = np.zeros(flows + 1, np.int64), np.full(flows, -1, np.int64)
    near, entry = np.zeros(flows * flows, np.int64), 0
    for f in range(flows):
        seen[f] = f
        for use in range(first[f], first[f + 1]):
            d = direction[use]
            for other in users[d, : count[d]]:
                if seen[other] != f:
                    seen[other] = f
                    near[entry] = other
                    entry += 1
        near_first[f + 1] = entry
    return near_first, near[:entry].copy()
