"""Choose the cuts, replica counts and placements that planner "dapple" searches: all, or parts where they are many."""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.search.balanced_cuts import even_starts
from dapple_tf.planner.search.placement import Placements, append_first, find_all_placements, find_placements
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.linearise import Chain, cut_chain
from dapple_tf.simulator.arrays import Floats, Integers
from dapple_tf.simulator.native.library import address, load_library
from dapple_tf.simulator.transfer import LinkTables, allreduce_cost, link_tables

# The number of transitions times the square of the number of blocks, up to which a search takes tens of milliseconds.
_MOST_SEARCH_STEPS = 30_000_000
_MOST_PLACEMENTS = 2500
_LEAST_BLOCKS = 32
_MOST_DEVICES_OF_POLICIES = 128


@dataclass(frozen=True)
class SearchSpace:
    """Blocks of layers and placements of stages on a cluster, independent of the micro-batch size.

    ``order``: the server that each entry of a placement stands for.
    """

    chain: Chain
    cluster: Cluster
    placements: Placements
    order: tuple[int, ...]

    @cached_property
    def replicas(self) -> Integers:
        """Replicas of each placement."""
        return np.array([item.replicas for item in self.placements.items], np.int64)

    @cached_property
    def devices_left(self) -> Integers:
        """Devices unused after each placement."""
        return np.array([item.devices_left for item in self.placements.items], np.int64)

    @cached_property
    def transitions(self) -> dict[str, NDArray[Any]]:
        """The pairs of placements that consecutive stages can have, with transfers: the fields of ``CostTables``."""
        successors = self.placements.successors
        first = np.concatenate([[0], np.cumsum([len(found) for found in successors])]).astype(np.int64)
        following = np.array([q for found in successors for q in found], np.int64)
        source = np.repeat(np.arange(len(successors)), np.diff(first))
        same = self.replicas[following] == np.append(self.replicas, 0)[source]
        to_rest = np.full(len(self.replicas), -1, np.int64)
        completing = np.flatnonzero((self.devices_left[following] == 0) & (source < len(self.replicas)))
        to_rest[source[completing]] = completing
        library, links = load_library(), self.links
        assert library is not None, "the registry refuses planners that need it"
        latency, per_byte = np.zeros(len(following)), np.zeros(len(following))  # 0 for those of the start
        library.dapple_transfers(
            len(first) - 2,
            *map(address, (first, following, *self.home_servers)),
            len(links.inside),
            *map(address, (links.inside, links.inside_latency)),
            *(ctypes.c_double(links.interface), ctypes.c_double(links.interface_latency)),
            *map(address, (links.own, links.own_latency)),
            *(int(links.has_own), address(latency), address(per_byte)),
        )
        return {
            "first_transition": first,
            "next_placement": following,
            "same_replicas": same,
            "rest_transition": to_rest,
            "transfer_latency": latency,
            "transfer_seconds_per_byte": per_byte,
        }

    @cached_property
    def search_steps(self) -> int:
        """The work of one search, roughly: pairs of blocks times transitions."""
        return len(self.chain.parameter_bytes) ** 2 * sum(len(found) for found in self.placements.successors)

    @cached_property
    def allreduce(self) -> Floats:
        """Latency (seconds) of an AllReduce and its seconds per byte of parameters, for each placement: [P, 2]."""
        offsets, servers = self.home_servers
        return np.array([allreduce_cost(servers[a:b], self.links) for a, b in itertools.pairwise(offsets)])

    @cached_property
    def links(self) -> LinkTables:
        """The cluster's links."""
        return link_tables(self.cluster)

    @cached_property
    def home_servers(self) -> tuple[Integers, Integers]:
        """Where the servers of each placement begin in a second array: the servers of all devices of all placements."""
        lists = [sorted(self.order[entry] for entry in item.servers()) for item in self.placements.items]
        offsets = np.concatenate([[0], np.cumsum([len(servers) for servers in lists])]).astype(np.int64)
        return offsets, np.array([server for servers in lists for server in servers], np.int64)


def find_search_spaces(chain: Chain, cluster: Cluster) -> tuple[SearchSpace, ...]:
    """Return one complete space, or smaller ones if searching the complete one takes too long.

    There are up to three smaller ones. The first has all plans of two stages. The second has plans of any number of
    stages whose devices are taken in order (Append First), with the replica counts of ``_typical_counts``, and with
    cuts between at least 32 blocks of nearly equal compute. The third, on up to 128 devices, has the plans of all three
    policies, with fewer replica counts. The placement policies take servers in their order in the cluster, and if sizes
    differ also in order of falling size.
    """
    return tuple(space for order in server_orders(cluster) for space in _spaces_of_order(chain, cluster, order))


def server_orders(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return the orders in which policies take servers: as given, and if sizes differ also by falling size."""
    given = tuple(range(len(cluster.servers)))
    largest_first = tuple(sorted(given, key=lambda server: -cluster.servers[server].devices))
    return tuple(dict.fromkeys((given, largest_first)))


def _spaces_of_order(chain: Chain, cluster: Cluster, order: tuple[int, ...]) -> tuple[SearchSpace, ...]:
    """Return the spaces for one order of the servers."""
    sizes = [cluster.servers[server].devices for server in order]
    total = cluster.devices
    if every := find_all_placements(sizes, _MOST_PLACEMENTS):
        space = SearchSpace(chain, cluster, every, order)
        if space.search_steps <= 2 * _MOST_SEARCH_STEPS:
            return (space,)
    unit = max(sizes) if total > 256 else 1
    splits = sorted({*range(unit, total, unit), *(2**k for k in range(unit.bit_length()))})
    two_stages = SearchSpace(chain, cluster, find_placements(sizes, splits, stages=2), order)
    in_order = find_placements(sizes, _typical_counts(total, unit), policies=(append_first,), most=_MOST_PLACEMENTS)
    spaces = [two_stages, SearchSpace(chain, cluster, in_order, order)]
    if 1 < len(sizes) < total <= _MOST_DEVICES_OF_POLICIES:
        spaces.append(SearchSpace(chain, cluster, _policy_placements(sizes), order))
    return tuple(_limit_steps(space) for space in spaces)


def _policy_placements(sizes: list[int]) -> Placements:
    """Return placements of all three policies, with as many of ``_typical_counts`` as give few enough placements."""
    total = sum(sizes)
    counts = _typical_counts(total, 1)
    while True:
        found = find_placements(sizes, counts, most=_MOST_PLACEMENTS)
        if found.complete or len(counts) < 3:
            return found
        counts = counts[1:]  # small replica counts make most of the placements


def _typical_counts(total: int, unit: int) -> list[int]:
    """Return powers of two, three times these, and even parts of the cluster, rounded down to multiples of ``unit``."""
    powers = [2**k for k in range(total.bit_length())]
    wanted = {*powers, *(3 * p for p in powers), *(total // k for k in (2, 3, 4, 5, 6, 8))}
    return sorted(c for c in {count // unit * unit for count in wanted} if 0 < c <= total)


def _limit_steps(space: SearchSpace) -> SearchSpace:
    """Return the space with blocks merged until searching it takes few enough steps."""
    blocks = len(space.chain.parameter_bytes)
    transitions = max(1, space.search_steps // blocks**2)
    fewer = max(_LEAST_BLOCKS, math.isqrt(_MOST_SEARCH_STEPS // transitions))
    return replace(space, chain=coarsen(space.chain, fewer))


def coarsen(chain: Chain, blocks: int) -> Chain:
    """Return the chain with its blocks merged to ``blocks`` of nearly equal compute, if it has more."""
    if len(chain.parameter_bytes) <= blocks:
        return chain
    forward, backward = chain.block_seconds(chain.batch_size)
    starts = even_starts(forward + backward, blocks)
    return cut_chain(chain.profile, [chain.positions[start] for start in starts[1:]])
