"""The order of devices, or of servers, by the link graph: recursive device ordering, RDO (SPP, IV.B.1, Algorithm 2).

Planner "spp" orders devices by it. The bandwidths of the graph are here for other planners too.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
import numpy as np

from dapple_tf.errors import PlanError
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.simulator.arrays import Floats


def server_bandwidths(cluster: Cluster) -> Floats:
    """Return the bandwidth of each pair of servers, and on the diagonal that inside a server (bytes per second)."""
    index_of = {server.name: index for index, server in enumerate(cluster.servers)}
    found = np.full((len(index_of), len(index_of)), cluster.inter_server.bandwidth, np.float64)
    np.fill_diagonal(found, cluster.intra_server.bandwidth)
    for (a, b), link in cluster.links.items():
        found[index_of[a], index_of[b]] = found[index_of[b], index_of[a]] = link.bandwidth
    return found


def list_devices(cluster: Cluster, servers: Sequence[int]) -> tuple[int, ...]:
    """Return all devices, server by server in this order."""
    of_server = devices_of_servers(cluster)
    return tuple(device for server in servers for device in of_server[server])


def devices_of_servers(cluster: Cluster) -> list[list[int]]:
    """Return the devices of each server."""
    found: list[list[int]] = [[] for _ in cluster.servers]
    for device, home in enumerate(cluster.homes):
        found[home].append(device)
    return found


def device_bandwidths(cluster: Cluster) -> Floats:
    """Return b_{v,v'} of the graph G of a cluster's devices, [V, V] in bytes per second; its diagonal is 0.

    Two devices have the bandwidth of the link inside their server, or between their two servers: the paper's graph has
    a bandwidth for each pair of devices, and does not know that devices of a server share its network interface.
    """
    homes = np.array(cluster.homes)
    found: Floats = server_bandwidths(cluster)[np.ix_(homes, homes)]
    np.fill_diagonal(found, 0.0)
    return found


def order_by_cuts(bandwidths: Floats, devices: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return v_1, v_2 ... v_V: the vertices of a link graph, or some of them (``devices``), by rank.

    ``bandwidths``: symmetric, [V, V]; 0 where two have no link. A global minimum cut (Stoer and Wagner) divides them
    into the first and the last of the order, and each part is divided again. The paper does not say which part comes
    first, nor in which direction each part is read. Both are chosen so that the two devices that meet have the highest
    bandwidth, since the order is to have "maximal bandwidth between consecutive GPUs". Of equal choices the one with
    the smaller part first is taken. Raises PlanError for a graph that is not connected.
    """
    devices = range(len(bandwidths)) if devices is None else devices
    if len(devices) == 1:
        return tuple(devices)
    inside = bandwidths[np.ix_(devices, devices)]
    others = inside[~np.eye(len(devices), dtype=bool)]
    if others.min() == others.max() > 0:
        return tuple(devices)  # any single device is a minimum cut
    parts = (order_by_cuts(bandwidths, part) for part in _min_cut(inside, devices))
    first, last = sorted(parts, key=lambda part: (len(part), part))
    pairs = [(a, b) for a in (first, first[::-1]) for b in (last, last[::-1])]
    joined = [*pairs, *((b, a) for a, b in pairs)]
    best = max(joined, key=lambda pair: float(bandwidths[pair[0][-1], pair[1][0]]))
    return (*best[0], *best[1])


def _min_cut(inside: Floats, devices: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the two sides of a global minimum cut; ``inside``: the bandwidths between ``devices``."""
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(len(devices)))
    graph.add_weighted_edges_from(
        (a, b, float(inside[a, b])) for a in range(len(devices)) for b in range(a) if inside[a, b] > 0
    )
    parts = sorted(map(sorted, nx.connected_components(graph)))
    if len(parts) > 1:
        near, far = devices[parts[0][0]], devices[parts[1][0]]
        raise PlanError(
            f"no links join devices {near} and {far}, not even through others: planner 'spp' is for devices that are "
            "connected; add the missing links to the cluster"
        )
    _, sides = nx.stoer_wagner(graph)
    one, other = ([devices[i] for i in sorted(side)] for side in sides)
    return one, other
