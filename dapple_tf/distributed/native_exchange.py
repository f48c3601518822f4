"""Exchanges and barriers by the native library's ops: tensors go to the ranks that need them without a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dapple_tf.distributed.exchange_network import barrier_rounds
from dapple_tf.distributed.native.library import ExchangeLibrary
from dapple_tf.graph_passes.ir.graph import Node


class NativeExchange:
    """Builds exchanges and barriers of the ``program`` of this number, which all ranks of a job give the same number.

    A message has the name of the exchange, and how often this has run: so every send has one receive. Dtypes and
    shapes travel with it. The ops run on the host, to which TensorFlow copies what a GPU has computed.
    """

    def __init__(self, library: ExchangeLibrary, program: int) -> None:
        self._ops = library.ops
        self._program = program

    def build(self, node: Node, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Send each input to the rank that ``node`` names, and receive its outputs.

        Returns the outputs and a token (see ``Collectives``): once the sends are queued and the outputs are there.
        """
        name = f"{node.name} (program {self._program})"
        outputs: list[Any] = [None] * (len(node.outputs) - 1)
        tokens = []
        with tf.device("CPU:0"):
            for peer in dict.fromkeys(node.integers("to")):
                values = [value for value, to in zip(inputs, node.integers("to"), strict=True) if to == peer]
                tokens.append(self._ops.dapple_send(values, peer=peer, exchange=name))
            for peer in dict.fromkeys(node.integers("source")):
                places = [i for i, source in enumerate(node.integers("source")) if source == peer]
                types = [tf.as_dtype(node.outputs[i].dtype.name) for i in places]
                shapes = [_shape_of(node, i) for i in places]
                values, token = self._ops.dapple_receive(T=types, shapes=shapes, peer=peer, exchange=name)
                tokens.append(token)
                for i, value in zip(places, values, strict=True):
                    outputs[i] = value
            return outputs, tf.add_n(tokens)

    def barrier(self, node: Node, rank: int, arrived: Any) -> Any:
        """Return a token (int64) that is computed once all of the node's ranks have computed ``arrived``.

        ``rank``: this process's. See ``barrier_rounds``.
        """
        token = arrived
        with tf.device("CPU:0"):
            for number, (after, before) in enumerate(barrier_rounds(node.integers("ranks"), rank)):
                name = f"{node.name}, round {number} (program {self._program})"
                sent = self._ops.dapple_send([token], peer=after, exchange=name)
                (value,), received = self._ops.dapple_receive(T=[tf.int64], shapes=[[]], peer=before, exchange=name)
                token = tf.add_n([value, sent, received])
        return token


def _shape_of(node: Node, output: int) -> list[int | None]:
    """Return the dimensions of an output, None for those that only the sender knows."""
    return [None if dim is None or dim < 0 else dim for dim in node.outputs[output].shape.dims or ()]
