"""Costs of communication between groups of a cluster's servers, each computed once: ``LinkCosts``."""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf.profiler.cluster import Cluster
from dapple_tf.simulator.transfer import LinkTables, allreduce_cost, link_tables, transfer_cost

Servers = tuple[int, ...]
"""The server of each replica of a stage."""


class LinkCosts:
    """A cache of the costs of transfers and AllReduces over the links of one cluster.

    It has one entry for each group of servers. Planners ask for a few groups, each of them thousands of times.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.tables: LinkTables = link_tables(cluster)
        self._transfers: dict[tuple[Servers, Servers, tuple[Sequence[int], Sequence[int]]], tuple[float, float]] = {}
        self._rings: dict[Servers, tuple[float, float]] = {}

    def transfer(
        self,
        senders: Servers,
        receivers: Servers,
        shares: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> tuple[float, float]:
        """Return the latency (seconds) and the seconds per byte of a transfer; see ``transfer_cost``."""
        key = senders, receivers, shares
        if key not in self._transfers:
            self._transfers[key] = transfer_cost(senders, receivers, self.tables, shares)
        return self._transfers[key]

    def allreduce(self, servers: Servers) -> tuple[float, float]:
        """Return the latency (seconds) and the seconds per byte of an AllReduce; see ``allreduce_cost``."""
        if servers not in self._rings:
            self._rings[servers] = allreduce_cost(servers, self.tables)
        return self._rings[servers]
