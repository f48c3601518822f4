"""Costs of communication: transfers over the boundary between two stages, and AllReduce within one.

Replica i of r holds the samples [i/r, (i+1)/r) of each micro-batch, in the order of the plan's device list, and two
replicas exchange the samples that both intervals contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.simulator.compiled import Floats, Integers, compiled
from profiler.cluster import Cluster


class LinkTables(NamedTuple):
    """A cluster's links as arrays: seconds per byte, and seconds of latency.

    ``inside``: within each server. ``interface``: of each server's network interface. ``own`` [servers, servers]: of
    the link of a pair of servers; 0 where the pair has none and uses the interfaces.
    """

    inside: Floats
    inside_latency: Floats
    interface: float
    interface_latency: float
    own: Floats
    own_latency: Floats


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
        np.array([1 / link.bandwidth for link in inside]),
        np.array([link.latency for link in inside]),
        1 / cluster.inter_server.bandwidth,
        cluster.inter_server.latency,
        own,
        own_latency,
    )


def transfer_cost(senders: Sequence[int], receivers: Sequence[int], tables: LinkTables) -> tuple[float, float]:
    """Return the latency (seconds) of one micro-batch's transfer over a boundary, and its seconds per byte.

    ``senders``, ``receivers``: the server of each replica of the two stages. The slowest of these decides: the bytes
    that leave or enter a server through its interface; those of a pair of servers with a link of its own; those that
    one device sends to, or receives from, other devices of its server. Links are symmetric, so both directions cost
    the same.
    """
    return measure_transfer(np.asarray(senders, np.int64), np.asarray(receivers, np.int64), tables)


@compiled
def measure_transfer(senders: Integers, receivers: Integers, t: LinkTables) -> tuple[float, float]:
    """Return ``transfer_cost`` for arrays, for compiled callers."""
    servers = t.inside.shape[0]
    leaving, entering = np.zeros(servers), np.zeros(servers)
    sent, received = np.zeros(len(senders)), np.zeros(len(receivers))
    pair = np.zeros((servers, servers)) if t.own.any() else np.zeros((0, 0))
    latency, slowest = 0.0, 0.0
    total = len(senders) * len(receivers)  # intervals in units of 1 / total, so that shares are exact
    i, j = 0, 0
    while i < len(senders) and j < len(receivers):
        left = max(i * len(receivers), j * len(senders))
        right = min((i + 1) * len(receivers), (j + 1) * len(senders))
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
            slowest = max(slowest, max(leaving[a], entering[b]) * t.interface)
        ends = right == (i + 1) * len(receivers)
        if right == (j + 1) * len(senders):
            j += 1
        if ends:
            i += 1
    return latency, slowest


def allreduce_cost(homes: Sequence[int], tables: LinkTables) -> float:
    """Return the seconds per byte of parameters of a ring AllReduce over replicas on these servers.

    It is 2 (r - 1) / r over the bandwidth of the slowest link of the ring of r replicas.
    """
    return measure_allreduce(np.asarray(homes, np.int64), tables)


@compiled
def measure_allreduce(homes: Integers, t: LinkTables) -> float:
    """Return ``allreduce_cost`` for arrays, for compiled callers."""
    r = len(homes)
    if r == 1:
        return 0.0
    slowest = 0.0
    for i in range(r):
        a, b = homes[i], homes[(i + 1) % r]
        if a == b:
            hop = t.inside[a]
        elif t.own[a, b] > 0:
            hop = t.own[a, b]
        else:
            hop = t.interface
        slowest = max(slowest, hop)
    return 2 * (r - 1) / r * slowest
