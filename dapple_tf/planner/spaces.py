"""What the planner searches: everything, or on large clusters the parts of it that matter."""

from __future__ import annotations

import math
from dataclasses import replace

from dapple_tf.planner.even import even_starts
from dapple_tf.planner.placement import append_first, find_placements
from dapple_tf.planner.problem import Space
from profiler.cluster import Cluster
from profiler.linearise import Chain, cut_chain

# The work of one search that takes some ten milliseconds, in transitions.
_MOST_TRANSITIONS = 30_000_000
_MOST_PLACEMENTS = 2500
_LEAST_BLOCKS = 32


def find_spaces(chain: Chain, cluster: Cluster) -> tuple[Space, ...]:
    """One space of all cuts, replica counts and placements; where that is too large, two that cover less.

    These are: all plans of two stages; and plans of any number of stages placed on one device after the other (Append
    First), of round replica counts, cut between at least 32 blocks of about equal compute.
    """
    sizes = [server.devices for server in cluster.servers]
    total = cluster.devices
    every = find_placements(sizes, range(1, total + 1), most=_MOST_PLACEMENTS)
    whole = Space(chain, cluster, every)
    if every.complete and whole.transitions <= 2 * _MOST_TRANSITIONS:
        return (whole,)
    unit = max(sizes) if total > 256 else 1
    splits = sorted({*range(unit, total, unit), *(2**k for k in range(unit.bit_length()))})
    two = Space(chain, cluster, find_placements(sizes, splits, stages=2))
    in_line = find_placements(sizes, _round_counts(total, unit), policies=(append_first,), most=_MOST_PLACEMENTS)
    deep = Space(chain, cluster, in_line)
    return (_coarser(two), _coarser(deep))


def _round_counts(total: int, unit: int) -> list[int]:
    """Powers of two, even shares of the cluster, and halves more than powers, in multiples of ``unit``."""
    powers = [2**k for k in range(total.bit_length())]
    wanted = {*powers, *(3 * p for p in powers), *(total // k for k in (2, 3, 4, 5, 6, 8))}
    return sorted(c for c in {count // unit * unit for count in wanted} if 0 < c <= total)


def _coarser(space: Space) -> Space:
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
