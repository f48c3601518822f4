"""Links between servers that a file does not give pair by pair: through a switch, or over several links in turn."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import networkx as nx

from profiler.errors import ClusterError
from profiler.link import Link
from profiler.quote import quote

Links = dict[tuple[str, str], Link]


def join_by_switch(links: Mapping[tuple[str, str], Link], servers: Sequence[str], link: Link) -> Links:
    """Return ``links`` with ``link`` between every two of ``servers``, except where a pair has a link already."""
    joined = dict(links)
    for pair in itertools.combinations(servers, 2):
        if pair not in links and pair[::-1] not in links:
            joined[pair] = link
    return joined


def route(servers: Sequence[str], links: Mapping[tuple[str, str], Link]) -> Links:
    """Return ``links`` and, for every pair of ``servers`` without one, the best way over several links as one link.

    Its bandwidth is that of the slowest link on the way, its latency the sum. Of all ways the one with the largest
    bandwidth is taken, and of those with equal bandwidth that with the least latency. Raises ClusterError if the links
    do not connect all servers.
    """
    graph: nx.Graph[str] = nx.Graph()
    graph.add_nodes_from(servers)
    found = dict(links)
    by_bandwidth = sorted(links.items(), key=lambda item: -item[1].bandwidth)
    for bandwidth, group in itertools.groupby(by_bandwidth, key=lambda item: item[1].bandwidth):
        graph.add_weighted_edges_from((a, b, link.latency) for (a, b), link in group if a != b)
        for a, reached in nx.all_pairs_dijkstra_path_length(graph):
            for b, latency in reached.items():
                if a != b and (a, b) not in found and (b, a) not in found:
                    found[a, b] = Link(bandwidth, latency)
    parts = [sorted(part) for part in nx.connected_components(graph)]
    if len(parts) > 1:
        part = min(parts, key=lambda part: (len(part), part))
        raise ClusterError(
            f"links do not connect {quote(part)} to the other servers, and inter_server is missing: add a link, or "
            "give inter_server, the link of pairs that have none of their own"
        )
    return found
