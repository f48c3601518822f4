"""Sums over ranks by the native library's ops: a ring of sends and receives, which waits for its own ranks only.

Horovod's AllReduce begins when all ranks of the job have agreed to it, and a rank that takes part in one agrees to no
other until it has ended. So rings of different stages would wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from dapple_tf.distributed.native.library import ExchangeLibrary
from dapple_tf.distributed.ring_chunks import Piece, cut_chunks, ring_neighbours, ring_rounds
from dapple_tf.distributed.wire_types import from_summable, group_by_dtype, to_summable
from dapple_tf.graph_passes.ir.graph import Node, TensorType


class RingAllReduce:
    """Builds sums for ``rank`` in the ``program`` of this number, which all ranks of a job give the same number.

    All tensors of a node travel together, one message a round: each of r ranks sends 2 (r - 1) messages, together
    2 (r - 1) / r of the tensors' bytes. The ops run on the host (see ``NativeExchange``).
    """

    def __init__(self, library: ExchangeLibrary, program: int, rank: int) -> None:
        self._ops = library.ops
        self._program = program
        self._rank = rank

    def build(self, node: Node, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return each input summed over the node's ranks, and a token (see ``Collectives``).

        The sums have the same bits on all ranks. ``node`` must be one that ``has_known_shapes``.
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
                    tokens.append(self._ops.dapple_send(values, peer=after, exchange=name))
                if pieces := chunks[turn.receives]:
                    types = [summable[piece.tensor].dtype for piece in pieces]
                    shapes = [[piece.end - piece.begin] for piece in pieces]
                    received, token = self._ops.dapple_receive(T=types, shapes=shapes, peer=before, exchange=name)
                    tokens.append(token)
                    for piece, value in zip(pieces, received, strict=True):
                        parts[piece] = parts[piece] + value if turn.adds else value
            sums = _join(summable, chunks, parts)
            results = [from_summable(total, value) for total, value in zip(sums, inputs, strict=True)]
            return results, tf.add_n(tokens)


def has_known_shapes(node: Node) -> bool:
    """Return whether all shapes that ``node`` of a rank's graph sums are known: a ring is cut by them."""
    return all(_is_known(kind) for kind in node.outputs[:-1])


def _is_known(kind: TensorType) -> bool:
    dims = kind.shape.dims
    return dims is not None and all(dim is not None and dim >= 0 for dim in dims)


def _elements(kind: TensorType) -> int:
    """Return how many elements Horovod or a ring sums of a tensor of this type: two for each complex number."""
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
