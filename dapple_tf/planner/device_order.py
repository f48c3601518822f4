"""The order of servers by the link graph: recursive device ordering (SPP, RDO) by global minimum cuts.

Where pairs of servers have links of their own, neighbours in the order should be those that exchange bytes fast. A
global minimum cut (Stoer and Wagner) parts the servers where least bandwidth joins them; each side is ordered in the
same way, and the sides are joined at the ends that the fastest link connects.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from profiler.cluster import Cluster


def order_servers(cluster: Cluster) -> tuple[int, ...]:
    """Return the servers' indices so that the slowest links are between distant ones; as given if all are equal.

    The weight of a pair is the bandwidth between the two servers (bytes per second).
    """
    count = len(cluster.servers)
    given = tuple(range(count))
    if not cluster.links or count < 3:
        return given
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(given)
    for a in given:
        for b in range(a + 1, count):
            graph.add_edge(a, b, weight=cluster.link(a, b).bandwidth)
    if len({data["weight"] for _, _, data in graph.edges(data=True)}) == 1:
        return given
    return tuple(_order(graph, given))


def order_devices(cluster: Cluster, servers: Sequence[int]) -> tuple[int, ...]:
    """Return all devices, server by server in this order."""
    of_server: list[list[int]] = [[] for _ in cluster.servers]
    for device, home in enumerate(cluster.homes):
        of_server[home].append(device)
    return tuple(device for server in servers for device in of_server[server])


def _order(graph: nx.Graph[int], servers: Sequence[int]) -> list[int]:
    """Return ``servers`` in order: the two sides of their minimum cut, each in order, joined at their best ends."""
    if len(servers) < 3:
        return list(servers)
    sides = nx.stoer_wagner(graph.subgraph(servers))[1]
    left, right = (_order(graph, sorted(side)) for side in sorted(sides, key=min))
    turns = [(a, b) for a in (left, left[::-1]) for b in (right, right[::-1])]
    first, second = max(turns, key=lambda pair: graph.edges[pair[0][-1], pair[1][0]]["weight"])
    return [*first, *second]
