"""Cut tensors into the chunks of a ring all-reduce, and say which chunk a rank sends and receives in each round."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_ALIGNED = 64  # elements, at multiples of which a tensor is cut: TensorFlow copies a slice whose memory is not aligned


@dataclass(frozen=True)
class Piece:
    """The elements from ``begin`` to ``end`` (exclusive) of the flat tensor at position ``tensor``."""

    tensor: int
    begin: int
    end: int


@dataclass(frozen=True)
class Round:
    """The chunks that a rank sends and receives in one round; ``adds``: it adds what it receives to its own values.

    Otherwise what it receives is a sum over all ranks, and takes the place of its own values.
    """

    sends: int
    receives: int
    adds: bool


def cut_chunks(sizes: Sequence[int], count: int) -> list[list[Piece]]:
    """Return ``count`` chunks, in order, of flat tensors of these ``sizes`` (elements); each is a list of its pieces.

    A chunk is within ``_ALIGNED`` elements of an equal share. So a chunk may be empty, and a small tensor is not cut.
    An empty tensor is in no chunk.
    """
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    bounds = [_align(total * chunk // count, sizes, ends) for chunk in range(count)] + [total]
    chunks = []
    for low, high in pairwise(bounds):
        spans = [
            (i, max(low, end - size), min(high, end)) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        chunks.append([Piece(i, a - ends[i] + sizes[i], b - ends[i] + sizes[i]) for i, a, b in spans if a < b])
    return chunks


def _align(bound: int, sizes: Sequence[int], ends: Sequence[int]) -> int:
    """Return the last position up to ``bound`` at which the tensor that it lies in may be cut."""
    tensor = bisect.bisect_right(ends, bound)
    if tensor == len(ends):
        return bound
    return bound - (bound - (ends[tensor] - sizes[tensor])) % _ALIGNED


def ring_rounds(index: int, count: int) -> list[Round]:
    """Return the 2 (count - 1) rounds of the rank at ``index`` of a ring of ``count`` ranks.

    In each round every rank sends one of ``count`` chunks to the rank after it. First the chunks are summed, each along
    the ring from the rank of its number; then the sums travel round the ring (Patarasuk and Yuan, 2009). So each
    element is added up in one order, and its sum is complete on one rank first: all ranks end with equal bits.
    """
    reduce = [Round((index - k) % count, (index - k - 1) % count, adds=True) for k in range(count - 1)]
    gather = [Round((index - k + 1) % count, (index - k) % count, adds=False) for k in range(count - 1)]
    return [*reduce, *gather]


def ring_neighbours(ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the ranks after and before ``rank`` in the ring of these ``ranks``."""
    index = ranks.index(rank)
    return ranks[(index + 1) % len(ranks)], ranks[index - 1]
