"""A planning problem as arrays: blocks of layers, placements of stages, and what each combination costs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.placement import Placements
from dapple_tf.simulator.compiled import Floats, Integers, compiled
from dapple_tf.simulator.memory import usable_bytes
from dapple_tf.simulator.transfer import LinkTables, link_tables, measure_allreduce, measure_transfer
from profiler.cluster import Cluster
from profiler.linearise import Chain


class CostTables(NamedTuple):
    """What the compiled search reads. N blocks, P placements, R replica counts, E pairs of placements.

    Seconds are those of one micro-batch, bytes those of one micro-batch over all replicas. Rows of ``forward``,
    ``backward``, ``weights`` and ``parameters`` are running sums over blocks, so a stage costs a difference of two
    entries.
    """

    forward: Floats  # [R, N + 1]
    backward: Floats  # [R, N + 1], recompute included
    weights: Floats  # [R, N + 1] the part of it that the schedule has run by itself, or 0
    rest: Floats  # [N + 1] the least device-seconds of the blocks from here on, without weights
    parameters: Floats  # [N + 1]
    stash: Floats  # [N + 1]
    working: Floats  # [N]
    crossing: Floats  # [N + 1]
    splittable: NDArray[np.bool_]  # [N + 1]
    replicas: Integers  # [P]
    row: Integers  # [P] its row in forward and backward
    ring: Floats  # [P] seconds of AllReduce a byte
    exposed: Floats  # [classes, N, N + 1] seconds of AllReduce after the last gradients, or of size 0
    exposed_class: Integers  # [P]
    left: Integers  # [P] devices unused after it
    first: Integers  # [P + 2] where each placement's pairs begin; the last row is the start's
    following: Integers  # [E]
    latency: Floats  # [E] seconds
    rate: Floats  # [E] seconds a byte
    micro_batches: int
    micro_batch_size: int
    memory: float
    bytes_per_parameter_byte: float
    recompute: bool


@dataclass(frozen=True)
class SearchSpace:
    """A chain, and where its stages can be: what does not depend on the micro-batch size.

    ``order``: the server that each entry of the placements stands for. ``whole``: every cut, replica count and
    placement (in that order of servers) is here.
    """

    chain: Chain
    cluster: Cluster
    placements: Placements
    order: tuple[int, ...]
    whole: bool = False

    @cached_property
    def links(self) -> LinkTables:
        """The cluster's links as arrays."""
        return link_tables(self.cluster)

    @cached_property
    def pairs(self) -> tuple[Integers, Integers, Floats, Floats]:
        """``first``, ``following``, ``latency`` and ``rate`` of the tables."""
        follow = self.placements.follow
        first = np.concatenate([[0], np.cumsum([len(f) for f in follow])]).astype(np.int64)
        following = np.array([q for f in follow for q in f], np.int64)
        offsets, servers = self._servers
        latency, rate = _pair_costs(first, following, offsets, servers, self.links)
        return first, following, latency, rate

    @cached_property
    def replicas(self) -> Integers:
        """Of each placement."""
        return np.array([item.replicas for item in self.placements.items], np.int64)

    @cached_property
    def left(self) -> Integers:
        """Devices unused after each placement."""
        return np.array([item.left for item in self.placements.items], np.int64)

    @cached_property
    def transitions(self) -> int:
        """About how much one search has to do: pairs of blocks x pairs of placements."""
        return len(self.chain.parameter_bytes) ** 2 * sum(len(follow) for follow in self.placements.follow)

    @cached_property
    def rings(self) -> Floats:
        """Seconds of AllReduce a byte on each placement."""
        offsets, servers = self._servers
        return np.array([measure_allreduce(servers[a:b], self.links) for a, b in itertools.pairwise(offsets)])

    @cached_property
    def _servers(self) -> tuple[Integers, Integers]:
        lists = [sorted(self.order[place] for place in item.servers()) for item in self.placements.items]
        offsets = np.concatenate([[0], np.cumsum([len(s) for s in lists])]).astype(np.int64)
        return offsets, np.array([server for s in lists for server in s], np.int64)


@compiled
def _pair_costs(
    first: Integers, following: Integers, offsets: Integers, servers: Integers, links: LinkTables
) -> tuple[Floats, Floats]:
    latency, rate = np.zeros(len(following)), np.zeros(len(following))
    for p in range(len(first) - 2):  # the start sends nothing
        senders = servers[offsets[p] : offsets[p + 1]]
        for e in range(first[p], first[p + 1]):
            q = following[e]
            receivers = servers[offsets[q] : offsets[q + 1]]
            latency[e], rate[e] = measure_transfer(senders, receivers, links)
    return latency, rate


def make_cost_tables(
    space: SearchSpace,
    global_batch_size: int,
    micro_batch_size: int,
    *,
    optimizer_slots: int,
    recompute: bool,
    overlap: bool,
    splits: bool = False,
) -> CostTables:
    """The tables of ``space`` for micro-batches of this size; ``splits``: the schedule puts off weights' gradients."""
    chain, replicas = space.chain, space.replicas
    counts = np.unique(replicas)
    seconds = [chain.block_seconds(micro_batch_size / r) for r in counts]
    forward = np.array([f for f, _ in seconds])
    backward = np.array([b for _, b in seconds]) + (forward if recompute else 0)
    weights = np.array([chain.weights_seconds(micro_batch_size / r) for r in counts]) * splits
    scale = micro_batch_size / chain.batch_size
    row = np.searchsorted(counts, replicas)
    first, following, latency, rate = space.pairs
    least = (counts[:, None] * (forward + backward - weights)).min(axis=0)
    classes = sorted(set(zip(row.tolist(), space.rings.tolist(), strict=True)))
    index = {pair: k for k, pair in enumerate(classes)}
    exposed_class = np.array([index[pair] for pair in zip(row.tolist(), space.rings.tolist(), strict=True)], np.int64)
    parameters = chain.profile.parameter_bytes
    shape = (len(classes), len(chain.parameter_bytes), len(chain.parameter_bytes) + 1)
    exposed = np.zeros(shape if overlap else (0, 0, 0))
    if overlap:
        for (k, ring), c in index.items():
            samples = micro_batch_size / counts[k]
            last = chain.profile.weights_seconds(samples) if splits else chain.profile.backward_seconds(samples)
            _fill_exposed(exposed[c], last, ring * parameters, np.array(chain.positions))
    return CostTables(
        forward=_sums(forward),
        backward=_sums(backward),
        weights=_sums(weights),
        rest=np.append(np.cumsum(least[::-1])[::-1], 0.0),
        parameters=_sums(chain.parameter_bytes),
        stash=_sums(chain.stash_bytes) * scale,
        working=chain.working_bytes * scale,
        crossing=np.concatenate([[0.0], chain.crossing_bytes, [0.0]]) * scale,
        splittable=np.concatenate([[True], chain.splittable, [True]]),
        replicas=replicas,
        row=row,
        ring=space.rings,
        exposed=exposed,
        exposed_class=exposed_class,
        left=space.left,
        first=first,
        following=following,
        latency=latency,
        rate=rate,
        micro_batches=global_batch_size // micro_batch_size,
        micro_batch_size=micro_batch_size,
        memory=usable_bytes(space.cluster.device_memory),
        bytes_per_parameter_byte=2.0 + optimizer_slots,
        recompute=recompute,
    )


@compiled
def _fill_exposed(exposed: Floats, backward: Floats, ring: Floats, positions: Integers) -> None:
    """``exposed_seconds`` of all runs of blocks: of those that end alike, each grows the one before by a block."""
    for end in range(1, len(positions)):
        ready, done, layer = 0.0, 0.0, positions[end]
        for first in range(end - 1, -1, -1):
            while layer > positions[first]:
                layer -= 1
                ready += backward[layer]
                done = max(done, ready) + ring[layer]
            exposed[first, end] = max(0.0, done - ready)


def _sums(rows: Floats) -> Floats:
    zero = np.zeros((*rows.shape[:-1], 1))
    return np.concatenate([zero, np.cumsum(rows, axis=-1)], axis=-1)
