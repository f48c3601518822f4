"""Contention for the servers' network interfaces: the rule, and the interface directions that each flow of a plan uses.

A *flow* is a transfer of one micro-batch over one boundary in one direction, or a ring: an AllReduce of one stage, of
one layer of it where AllReduce overlaps backward. A flow first waits for its latency, and uses nothing. Then it moves.
A server's interface has two directions, leaving and entering. The bytes v_d that a flow moves through direction d are

- of a transfer, those that leave or enter the server through its interface (``transfer.measure_loads``);
- of a ring, 2 (r - 1) / r of the parameters' bytes for each direction that some link of the ring uses.

With n_d flows that move through direction d, each of them has 1 / n_d of its bandwidth. The fraction of a flow that is
done grows, each second, by the least of bandwidth / n_d / v_d over the directions that it uses, and of 1 / U, where U
is what its bytes need on links that nothing else uses: those inside servers, and those given for a pair of servers.
Shares are equal, and recomputed whenever a flow starts or stops transferring. If a flow cannot use its whole share, the
rest is not given to other flows.

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

from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.transfer import LinkTables, allreduce_cost, link_tables, measure_loads


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
    stages = len(homes)
    demands = np.zeros((3 * stages, 2 * len(tables.inside)))  # column 2 i: leaving server i; 2 i + 1: entering it
    latency, rows = np.zeros(3 * stages), shares or [()] * stages
    for s, own in enumerate(homes):
        latency[2 * stages + s] = fill_ring(demands[2 * stages + s], own, tables)
        if s + 1 < stages and moves[s]:
            latency[s] = fill_transfer(demands[s], own, homes[s + 1], tables, (rows[s], rows[s + 1]))
            back = rows[s + 1], rows[s]
            latency[stages + s] = fill_transfer(demands[stages + s], homes[s + 1], own, tables, back)
    return _keep_shared(demands, latency)


def fill_transfer(
    demands: Floats,
    senders: Sequence[int],
    receivers: Sequence[int],
    t: LinkTables,
    shares: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> float:
    """Fill in the demands of a transfer by direction; return its latency (seconds). See ``transfer_cost``."""
    latency, alone, leaving, entering = measure_loads(senders, receivers, t, shares)
    alone = max(alone, max(leaving.max(), entering.max()) * t.interface)
    demands[::2], demands[1::2] = leaving * t.interface / alone, entering * t.interface / alone
    return latency


def fill_ring(demands: Floats, servers: Sequence[int], t: LinkTables) -> float:
    """Fill in the demands of a ring by direction; return its latency (seconds)."""
    latency, per_byte = allreduce_cost(servers, t)
    r = len(servers)
    for i in range(r):
        a, b = servers[i], servers[(i + 1) % r]
        if a != b and not t.own[a, b] > 0:
            demands[2 * a] = demands[2 * b + 1] = 2 * (r - 1) / r * t.interface / per_byte
    return latency


def _keep_shared(demands: Floats, latency: Floats) -> Flows:
    """Return flows with these demands [flows, directions]."""
    count = (demands > 0).sum(axis=0)
    # In the other directions all flows can move at once as fast as alone.
    kept = demands[:, (count > 1) & (count * demands.max(axis=0) > 1)]
    flow, direction = np.nonzero(kept)
    first = np.searchsorted(flow, np.arange(len(kept) + 1))
    users = [np.flatnonzero(column).tolist() for column in kept.T]
    near = list[int]()
    near_first = [0]
    for f in range(len(kept)):
        found = dict.fromkeys(other for d in direction[first[f] : first[f + 1]] for other in users[d])
        near += [other for other in found if other != f]
        near_first.append(len(near))
    return Flows(
        first, direction, kept[flow, direction], latency, len(users), np.array(near_first), np.array(near, np.int64)
    )
