"""Exchanges, barriers and sums by the native library's ops, and which ranks send each other messages for them.

A tensor goes to the rank that needs it without being asked for. A sum waits for its own ranks only, while Horovod's
AllReduce begins when all ranks of the job have agreed to it: there, sums of different stages would wait for each other.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import tensorflow as tf

from dapple_tf.distributed.native.library import ExchangeLibrary
from dapple_tf.distributed.wire_types import from_summable, group_by_dtype, to_summable
from dapple_tf.graph_passes.ir.graph import Graph, Node, TensorType
from dapple_tf.graph_passes.ir.names import of_any_micro_batch
from dapple_tf.graph_passes.ir.ops import OpName


class NativeCollectives:
    """Builds the native ops of ``rank`` in the ``program`` of this number, which is the same on all ranks of a job.

    The name of a message holds the name of its node, the program, and how often the node has run: so each message that
    is sent is received once. In a loop over micro-batches the ops compute the name: a node runs there for many. Dtypes
    and shapes travel with it. The ops run on the host, to which TensorFlow copies what a GPU has computed. Token: see
    ``Collectives``.
    """

    def __init__(self, library: ExchangeLibrary, program: int, rank: int) -> None:
        self._ops = library.ops
        self._program = program
        self._rank = rank

    def exchange(self, node: Node, inputs: Sequence[Any], micro_batch: Any) -> tuple[list[Any], Any]:
        """Send each input to the rank that ``node`` names, and receive its outputs.

        ``micro_batch``: in a loop, the number of the present micro-batch, a tensor. Returns the outputs, and a token
        that is computed once the sends are queued and the outputs have arrived.
        """
        pattern, numbers = name_pattern(node, micro_batch)
        name = f"{pattern} (program {self._program})"
        outputs: list[Any] = [None] * (len(node.outputs) - 1)
        tokens = []
        with tf.device("CPU:0"):
            for peer in dict.fromkeys(node.integers("to")):
                values = [value for value, to in zip(inputs, node.integers("to"), strict=True) if to == peer]
                tokens.append(self._ops.dapple_send(values, numbers, peer=peer, exchange=name))
            for peer in dict.fromkeys(node.integers("source")):
                places = [i for i, source in enumerate(node.integers("source")) if source == peer]
                types = [tf.as_dtype(node.outputs[i].dtype.name) for i in places]
                shapes = [_known_dims(node.outputs[i]) for i in places]
                values, token = self._ops.dapple_receive(numbers, T=types, shapes=shapes, peer=peer, exchange=name)
                tokens.append(token)
                for i, value in zip(places, values, strict=True):
                    outputs[i] = value
            return outputs, tf.add_n(tokens)

    def barrier(self, node: Node, arrived: Any) -> Any:
        """Return a token (int64) that is computed once all of the node's ranks have computed ``arrived``.

        See ``barrier_rounds``.
        """
        token = arrived
        with tf.device("CPU:0"):
            for number, (after, before) in enumerate(barrier_rounds(node.integers("ranks"), self._rank)):
                name = f"{node.name}, round {number} (program {self._program})"
                sent = self._ops.dapple_send([token], [], peer=after, exchange=name)
                (value,), received = self._ops.dapple_receive([], T=[tf.int64], shapes=[[]], peer=before, exchange=name)
                token = tf.add_n([value, sent, received])
        return token

    def all_reduce(self, node: Node, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return each input summed over the node's ranks, and a token; ``node`` must be one that ``is_native``.

        All tensors of the node travel together round the ring, one message a round: each of r ranks sends 2 (r - 1)
        messages, which have 2 (r - 1) / r of the tensors' bytes together. The sums have the same bits on all ranks.
        """
        ranks = node.integers("ranks")
        after, before = ring_neighbours(ranks, self._rank)
        tokens = [tf.zeros([], tf.int64)]
        with tf.device("CPU:0"):
            summable = [to_summable(value) for value in inputs]
            sizes = [_elements(kind) for kind in node.outputs[:-1]]
            chunks = _cut(summable, sizes, len(ranks))
            parts = _split(summable, sizes, chunks)
            for number, turn in enumerate(ring_rounds(ranks.index(self._rank), len(ranks))):
                name = f"{node.name}, round {number} of the ring (program {self._program})"
                if chunks[turn.sends]:
                    values = [parts[piece] for piece in chunks[turn.sends]]
                    tokens.append(self._ops.dapple_send(values, [], peer=after, exchange=name))
                if pieces := chunks[turn.receives]:
                    types = [summable[piece.tensor].dtype for piece in pieces]
                    shapes = [[piece.end - piece.begin] for piece in pieces]
                    received, token = self._ops.dapple_receive([], T=types, shapes=shapes, peer=before, exchange=name)
                    tokens.append(token)
                    for piece, value in zip(pieces, received, strict=True):
                        parts[piece] = parts[piece] + value if turn.adds else value
            sums = _join(summable, chunks, parts)
            results = [from_summable(total, value) for total, value in zip(sums, inputs, strict=True)]
            return results, tf.add_n(tokens)


def name_pattern(node: Node, micro_batch: Any) -> tuple[str, list[Any]]:
    """Return the name of a node, and no numbers; in a loop, its name with ``*`` for the number ``micro_batch``."""
    return (node.name, []) if micro_batch is None else (of_any_micro_batch(node), [micro_batch])


# --- Which nodes the native ops carry out, and between which ranks

Pair = tuple[int, int]
"""Two ranks, the lower one first."""


def is_native(node: Node) -> bool:
    """Return whether the native ops can do what ``node`` of a rank's graph says; else it needs a process set.

    A ring cuts the tensors that it sums by their shapes, so these must be known.
    """
    if node.op == OpName.ALLREDUCE:
        return all(kind.shape.dims is not None and None not in _known_dims(kind) for kind in node.outputs[:-1])
    return node.op in (OpName.EXCHANGE, OpName.BARRIER)


def exchanging_pairs(graphs: Iterable[Graph]) -> set[Pair]:
    """Return the pairs of ranks that send each other messages; ``graphs``: of ranks 0, 1, ..."""
    sends = ((rank, to) for rank, graph in enumerate(graphs) for node in graph.nodes for to in _receivers(node, rank))
    return {(min(rank, to), max(rank, to)) for rank, to in sends}


def _receivers(node: Node, rank: int) -> Sequence[int]:
    """Return the ranks to which ``rank`` sends messages for a node of its graph."""
    if not is_native(node):
        return ()
    if node.op == OpName.EXCHANGE:
        return node.integers("to")
    if not node.has("ranks"):  # of one rank alone
        return ()
    ranks = node.integers("ranks")
    if node.op == OpName.ALLREDUCE:
        return ring_neighbours(ranks, rank)[:1]
    return [after for after, _ in barrier_rounds(ranks, rank)]


def barrier_rounds(ranks: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Return to whom ``rank`` sends, and from whom it receives, in each round of a barrier of ``ranks``.

    In round k each rank sends to the one 2^k places after it in ``ranks``, cyclically, once it has received the message
    of round k - 1. After the last of ceil(log2 n) rounds each knows that all have arrived (dissemination barrier;
    Hensgen, Finkel and Manber, 1988).
    """
    place, count = ranks.index(rank), len(ranks)
    distances = [2**k for k in range((count - 1).bit_length())]
    return [(ranks[(place + distance) % count], ranks[(place - distance) % count]) for distance in distances]


def _known_dims(kind: TensorType) -> list[int | None]:
    """Return the dimensions of a tensor, None for each that only its sender knows."""
    return [None if dim is None or dim < 0 else dim for dim in kind.shape.dims or ()]


# --- The chunks of a ring all-reduce, and which of them a rank sends and receives in each round

_ALIGNED = 64  # elements: tensors are cut at multiples of it, since TensorFlow copies a slice of unaligned memory


@dataclass(frozen=True)
class Piece:
    """The elements from ``begin`` to ``end`` (exclusive) of the flat tensor at position ``tensor``."""

    tensor: int
    begin: int
    end: int


@dataclass(frozen=True)
class Round:
    """The chunks that a rank sends and receives in one round.

    ``adds``: the rank adds what it receives to its own values. Otherwise what it receives is a sum over all ranks, and
    replaces its own values.
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
    """Return the last position up to ``bound`` at which the tensor that holds ``bound`` may be cut."""
    tensor = bisect.bisect_right(ends, bound)
    if tensor == len(ends):
        return bound
    return bound - (bound - (ends[tensor] - sizes[tensor])) % _ALIGNED


def ring_rounds(index: int, count: int) -> list[Round]:
    """Return the 2 (count - 1) rounds of the rank at ``index`` of a ring of ``count`` ranks.

    In each round every rank sends one of ``count`` chunks to the rank after it. First the chunks are summed: the chunk
    of number i starts at the rank at index i. Then the sums travel round the ring (Patarasuk and Yuan, 2009). So each
    element is added up in one order, and its sum is complete on one rank first: all ranks end with equal bits.
    """
    reduce = [Round((index - k) % count, (index - k - 1) % count, adds=True) for k in range(count - 1)]
    gather = [Round((index - k + 1) % count, (index - k) % count, adds=False) for k in range(count - 1)]
    return [*reduce, *gather]


def ring_neighbours(ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the ranks after and before ``rank`` in the ring of these ``ranks``."""
    index = ranks.index(rank)
    return ranks[(index + 1) % len(ranks)], ranks[index - 1]


# --- Cut tensors into chunks and join them again


def _elements(kind: TensorType) -> int:
    """Return how many elements are summed for a tensor of this type: two for each complex number."""
    return kind.shape.elements() * (2 if tf.as_dtype(kind.dtype.name).is_complex else 1)


def _cut(values: Sequence[Any], sizes: Sequence[int], count: int) -> list[list[Piece]]:
    """Return ``count`` chunks of the values; each has an equal share of the elements of every dtype."""
    chunks: list[list[Piece]] = [[] for _ in range(count)]
    for members in group_by_dtype(values).values():
        for chunk, pieces in zip(chunks, cut_chunks([sizes[i] for i in members], count), strict=True):
            chunk += [replace(piece, tensor=members[piece.tensor]) for piece in pieces]
    return chunks


def _split(values: Sequence[Any], sizes: Sequence[int], chunks: Sequence[Sequence[Piece]]) -> dict[Piece, Any]:
    """Return the flat parts of the values that the pieces of the chunks stand for."""
    found: dict[Piece, Any] = {}
    for i, pieces in _pieces_by_tensor(chunks).items():
        flat = tf.reshape(values[i], [sizes[i]])
        lengths = [piece.end - piece.begin for piece in pieces]
        found |= zip(pieces, tf.split(flat, lengths) if len(pieces) > 1 else [flat], strict=True)
    return found


def _join(values: Sequence[Any], chunks: Sequence[Sequence[Piece]], parts: Mapping[Piece, Any]) -> list[Any]:
    """Return tensors of the shapes of the values, made of the parts; an empty value itself."""
    joined = list(values)
    for i, pieces in _pieces_by_tensor(chunks).items():
        own = [parts[piece] for piece in pieces]
        joined[i] = tf.reshape(tf.concat(own, 0) if len(own) > 1 else own[0], tf.shape(values[i]))
    return joined


def _pieces_by_tensor(chunks: Sequence[Sequence[Piece]]) -> dict[int, list[Piece]]:
    """Return the pieces of each tensor that has any, in order: chunks are in the order of the elements."""
    found: dict[int, list[Piece]] = {}
    for chunk in chunks:
        for piece in chunk:
            found.setdefault(piece.tensor, []).append(piece)
    return found
