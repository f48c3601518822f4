"""What the planner searches: everything, or on large clusters the parts of it that matter."""

from __future__ import annotations

import math
from dataclasses import replace

from dapple_tf.planner.balanced_cuts import even_starts
from dapple_tf.planner.cost_tables import SearchSpace
from dapple_tf.planner.placement import append_first, find_placements
from profiler.cluster import Cluster, Server
from profiler.linearise import Chain, cut_chain

# The work of one search that takes some ten milliseconds, in transitions.
_MOST_TRANSITIONS = 30_000_000
_MOST_PLACEMENTS = 2500
_LEAST_BLOCKS = 32
_MOST_OF_A_PART = 128


def find_search_spaces(chain: Chain, cluster: Cluster) -> tuple[SearchSpace, ...]:
    """One space of all cuts, replica counts and placements; where that is too large, two that cover less.

    These are: all plans of two stages; and plans of any number of stages placed on one device after the other (Append
    First), of round replica counts, cut between at least 32 blocks of about equal compute. The policies take servers as
    they are numbered, and where these differ in size the largest first as well.
    """
    given = tuple(range(len(cluster.servers)))
    largest_first = tuple(sorted(given, key=lambda server: -cluster.servers[server].devices))
    spaces = [space for order in dict.fromkeys((given, largest_first)) for space in _spaces_of(chain, cluster, order)]
    return tuple(spaces)


def _spaces_of(chain: Chain, cluster: Cluster, order: tuple[int, ...]) -> tuple[SearchSpace, ...]:
    sizes = [cluster.servers[server].devices for server in order]
    total = cluster.devices
    every = find_placements(sizes, range(1, total + 1), most=_MOST_PLACEMENTS)
    whole = SearchSpace(chain, cluster, every, order, whole=True)
    if every.complete and whole.transitions <= 2 * _MOST_TRANSITIONS:
        return (whole,)
    unit = max(sizes) if total > 256 else 1
    splits = sorted({*range(unit, total, unit), *(2**k for k in range(unit.bit_length()))})
    two = SearchSpace(chain, cluster, find_placements(sizes, splits, stages=2), order)
    in_line = find_placements(sizes, _round_counts(total, unit), policies=(append_first,), most=_MOST_PLACEMENTS)
    return (_coarser(two), _coarser(SearchSpace(chain, cluster, in_line, order)))


def halve_cluster(cluster: Cluster) -> Cluster | None:
    """The first servers that hold about half of the devices, 128 at most; None for one device."""
    left = min(cluster.devices // 2, _MOST_OF_A_PART)
    servers: list[Server] = []
    for server in cluster.servers:
        if left > 0:
            servers.append(replace(server, devices=min(server.devices, left)))
            left -= server.devices
    names = {server.name for server in servers}
    links = {pair: link for pair, link in cluster.links.items() if names.issuperset(pair)}
    return replace(cluster, servers=tuple(servers), links=links) if servers else None


def _round_counts(total: int, unit: int) -> list[int]:
    """Powers of two, even shares of the cluster, and halves more than powers, in multiples of ``unit``."""
    powers = [2**k for k in range(total.bit_length())]
    wanted = {*powers, *(3 * p for p in powers), *(total // k for k in (2, 3, 4, 5, 6, 8))}
    return sorted(c for c in {count // unit * unit for count in wanted} if 0 < c <= total)


def _coarser(space: SearchSpace) -> SearchSpace:
    """The space with its blocks joined to fewer, where searching all would be too much work."""
    blocks = len(space.chain.parameter_bytes)
    pairs = max(1, space.transitions // blocks**2)
    fewer = max(_LEAST_BLOCKS, math.isqrt(_MOST_TRANSITIONS // pairs))
    return space if fewer >= blocks else replace(space, chain=coarsen(space.chain, fewer))


def coarsen(chain: Chain, blocks: int) -> Chain:
    """The chain with so many blocks, cut where their compute is most even."""
    forward, backward = chain.block_seconds(chain.batch_size)
    starts = even_starts(forward + backward, blocks)
    return cut_chain(chain.profile, [chain.positions[start] for start in starts[1:]])
