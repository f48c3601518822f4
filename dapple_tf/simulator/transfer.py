"""Costs of communication: transfers over the boundary between two stages, and AllReduce within one.

Replica i of r holds the samples [i/r, (i+1)/r) of each micro-batch, or its share of them, in the order of the plan's
device list, and two replicas exchange the samples that both intervals contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from dapple_tf.graph_passes.analysis.row_bounds import cut_points
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.simulator.arrays import Floats, Integers


class LinkTables(NamedTuple):
    """A cluster's links as arrays: seconds per byte, and seconds of latency.

    ``inside``: within each server. ``interface``: of each server's network interface. ``own`` [servers, servers]: of
    the link of a pair of servers; 0 where the pair has none and uses the interfaces. ``has_own``: whether some pair
    has one.
    """

    inside: Floats
    inside_latency: Floats
    interface: float
    interface_latency: float
    own: Floats
    own_latency: Floats
    has_own: bool


def link_tables(cluster: Cluster) -> LinkTables:
    """Return the links of ``cluster`` as arrays."""
    count = len(cluster.servers)
    own, own_latency = np.zeros((count, count)), np.zeros((count, count))
    index = {server.name: i for i, server in enumerate(cluster.servers)}
    for (a, b), link in cluster.links.items():
        for i, j in ((index[a], index[b]), (index[b], index[a])):
            own[i, j], own_latency[i, j] = 1 / link.bandwidth, link.latency
    inside = [cluster.link(i, i) for i in range(count)]
    return LinkTables(
        np.array([1 / link.bandwidth for link in inside], np.float64),
        np.array([link.latency for link in inside], np.float64),
        float(1 / cluster.inter_server.bandwidth),
        float(cluster.inter_server.latency),
        own,
        own_latency,
        bool(cluster.links),
    )


def transfer_cost(
    senders: Sequence[int],
    receivers: Sequence[int],
    tables: LinkTables,
    shares: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> tuple[float, float]:
    """Return the latency (seconds) of one micro-batch's transfer over a boundary, and its seconds per byte.

    ``senders``, ``receivers``: the server of each replica of the two stages. ``shares``: the rows that the senders and
    the receivers hold, as whole numbers in proportion; empty for equal shares. The seconds are the longest of three
    times: of the bytes that leave or enter a server through its interface, of those between two servers that have a
    link of their own, and of those that one device sends to, or receives from, other devices of its server. Links are
    symmetric, so both directions cost the same.
    """
    latency, unshared, leaving, entering = measure_loads(senders, receivers, tables, shares)
    return latency, float(max(unshared, max(leaving.max(), entering.max()) * tables.interface))


def measure_loads(
    senders: Sequence[int] | Integers,
    receivers: Sequence[int] | Integers,
    t: LinkTables,
    shares: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> tuple[float, float, Floats, Floats]:
    """Return the latency of a transfer, the seconds per byte of its slowest link other than interfaces, and two arrays.

    The arrays [servers] have the fractions of its bytes that leave, and that enter, each server through its interface.
    The arguments are as in ``transfer_cost``. Replicas hold the samples between two cut points (``row_bounds``).
    """
    cut, cut_next = (cut_points(len(of), own) for of, own in zip((senders, receivers), shares, strict=True))
    servers = t.inside.shape[0]
    leaving, entering = np.zeros(servers), np.zeros(servers)
    sent, received = np.zeros(len(senders)), np.zeros(len(receivers))
    pair = np.zeros((servers, servers)) if t.has_own else np.zeros((0, 0))
    latency, slowest = 0.0, 0.0
    whole, whole_next = cut[-1], cut_next[-1]
    total = whole * whole_next  # intervals in units of 1 / total, so that shares are exact
    i, j = 0, 0
    while i < len(senders) and j < len(receivers):
        left = max(cut[i] * whole_next, cut_next[j] * whole)
        right = min(cut[i + 1] * whole_next, cut_next[j + 1] * whole)
        share = (right - left) / total
        a, b = senders[i], receivers[j]
        if a == b:
            sent[i] += share
            received[j] += share
            latency = max(latency, t.inside_latency[a])
            slowest = max(slowest, max(sent[i], received[j]) * t.inside[a])
        elif t.own[a, b] > 0:
            pair[a, b] += share
            latency = max(latency, t.own_latency[a, b])
            slowest = max(slowest, pair[a, b] * t.own[a, b])
        else:
            leaving[a] += share
            entering[b] += share
            latency = max(latency, t.interface_latency)
        ends = right == cut[i + 1] * whole_next
        if right == cut_next[j + 1] * whole:
            j += 1
        if ends:
            i += 1
    return latency, slowest, leaving, entering


def allreduce_cost(homes: Sequence[int] | Integers, t: LinkTables) -> tuple[float, float]:
    """Return the latency (seconds) of a ring AllReduce over replicas on these servers, and its seconds per byte.

    A ring of r replicas takes 2 (r - 1) turns, each with the largest latency of its links and 1 / r of the bytes over
    its slowest link. See ``ring_seconds``.
    """
    r = len(homes)
    if r == 1:
        return 0.0, 0.0
    latency, slowest = 0.0, 0.0
    for i in range(r):
        a, b = homes[i], homes[(i + 1) % r]
        if a == b:
            wait, hop = t.inside_latency[a], t.inside[a]
        elif t.own[a, b] > 0:
            wait, hop = t.own_latency[a, b], t.own[a, b]
        else:
            wait, hop = t.interface_latency, t.interface
        latency, slowest = max(latency, wait), max(slowest, hop)
    return float(2 * (r - 1) * latency), float(2 * (r - 1) / r * slowest)


def ring_seconds(latency: float, seconds_per_byte: float, parameter_bytes: float) -> float:
    """Return the seconds of one AllReduce of these bytes, with the costs of ``allreduce_cost``; 0 without any byte."""
    return latency + seconds_per_byte * parameter_bytes if parameter_bytes > 0 else 0.0


class LinkCosts:
    """A cache of the costs of transfers and AllReduces over the links of one cluster.

    It has one entry for each sequence of servers. Planners ask for a few of these, for each thousands of times.
    """

    def __init__(self, cluster: Cluster) -> None:
        tables = link_tables(cluster)
        self.transfer = cache(partial(transfer_cost, tables=tables))  # with ``shares`` by name
        self.allreduce = cache(partial(allreduce_cost, t=tables))
