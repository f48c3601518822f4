"""Exchanges by Horovod's alltoall: used where the native ops are not built, or not wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from dapple_tf.distributed.wire_types import carrier_of, element_shape, flatten, unflatten
from graph_passes.ir.graph import Node


class AlltoallExchange:
    """Builds exchanges. ``sets``: Horovod process sets by their ranks; ``zero``: see ``collectives``."""

    def __init__(self, sets: Mapping[tuple[int, ...], Any], zero: tf.Variable) -> None:
        self._sets = sets
        self._zero = zero

    def build(self, node: Node, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Send each input to the rank that ``node`` names, and receive its outputs: one alltoall for each dtype.

        Returns the outputs and a token (see ``Collectives``). Between two ranks the elements of all values travel one
        after the other, in an order that both know.
        """
        ranks = node.integers("ranks")
        shapes: list[list[Any]] | None = None
        counts = []
        if bool(node.attr("header")):
            shapes, count = self._exchange_shapes(node, inputs)
            counts.append(count)
        outputs: list[Any] = [None] * (len(node.outputs) - 1)
        for dtype in node.strings("dtypes"):
            carrier = carrier_of(dtype)
            sends = [
                (to, flatten(value, carrier))
                for value, to in zip(inputs, node.integers("to"), strict=True)
                if value.dtype.name == tf.as_dtype(dtype).name
            ]
            received, sizes = self._alltoall(ranks, sends, carrier, element_shape(dtype))
            counts.append(tf.size(received, out_type=tf.int64))
            parts = tf.split(received, sizes, num=len(ranks))
            for place, source in enumerate(ranks):
                from_source = [
                    i
                    for i, (kind, rank) in enumerate(zip(node.outputs, node.integers("source"), strict=False))
                    if rank == source and kind.dtype.name == dtype
                ]
                known = [None if shapes is None else shapes[i] for i in from_source]
                values = unflatten(parts[place], [node.outputs[i] for i in from_source], known)
                for i, value in zip(from_source, values, strict=True):
                    outputs[i] = value
        return outputs, tf.add_n(counts)

    def _alltoall(
        self, ranks: Sequence[int], sends: Sequence[tuple[int, Any]], carrier: str, element: Sequence[int] = ()
    ) -> tuple[Any, Any]:
        """Return what all ranks sent, one after the other, and the number of elements from each."""
        import horovod.tensorflow as hvd

        splits = []
        for rank in ranks:
            sizes = [tf.shape(value)[0] for to, value in sends if to == rank]
            splits.append(tf.add_n(sizes) if sizes else tf.constant(0))
        data = tf.concat([value for _, value in sends], 0) if sends else tf.zeros([0, *element], carrier)
        splits_now = tf.stack(splits) + tf.raw_ops.ReadVariableOp(resource=self._zero.handle, dtype=tf.int32)
        received, sizes = hvd.alltoall(data, splits_now, name=carrier, process_set=self._sets[tuple(ranks)])
        return tf.ensure_shape(received, [None, *element]), tf.ensure_shape(sizes, [len(ranks)])

    def _exchange_shapes(self, node: Node, inputs: Sequence[Any]) -> tuple[list[list[Any]], Any]:
        """Return the dimensions of every output, as its sender tells them, and how many dimensions were received."""
        ranks = node.integers("ranks")
        sends = [(to, tf.shape(v, out_type=tf.int64)) for v, to in zip(inputs, node.integers("to"), strict=True)]
        with tf.name_scope("shapes"):
            received, _ = self._alltoall(ranks, sends, "int64")
        shapes, place = [], 0
        for kind in node.outputs[:-1]:
            length = len(kind.shape.dims or ())
            shapes.append([received[place + k] for k in range(length)])
            place += length
        return shapes, tf.size(received, out_type=tf.int64)
