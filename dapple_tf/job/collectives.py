"""Exchanges and sums between ranks, as Horovod ops of a step's graph.

Horovod's ops are not registered as stateful, so TensorFlow folds those of constant inputs, merges those of equal
inputs and drops those whose results nobody takes. Every op here takes a read of a variable (``zero``), which is
stateful, and gives a token that the step returns. Ops are known between ranks by their names, which their nodes give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from graph_passes.ir import Node, TensorType

# Horovod does not send these: others of the same size travel in their place.
_CARRIERS = {
    "bfloat16": "uint16",
    "half": "float16",
    "uint32": "int32",
    "uint64": "int64",
    "complex64": "int64",
}


class Collectives:
    """What the handlers of ``operations`` need of other ranks. ``sets``: Horovod process sets by their ranks."""

    def __init__(self, rank: int, sets: Mapping[tuple[int, ...], Any]) -> None:
        self._rank = rank
        self._sets = sets
        with tf.init_scope(), tf.device("CPU:0"):
            self.zero = tf.Variable(0, dtype=tf.int32, trainable=False)

    def exchange(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Send ``inputs`` where ``node`` says, and receive its outputs, by one alltoall for each dtype; then a token.

        Between two ranks values travel flat, one after the other, in an order that both know.
        """
        ranks = node.integers("ranks")
        headers: list[list[Any]] | None = None
        counts = []
        if bool(node.attr("header")):
            headers, count = self._exchange_shapes(node, inputs)
            counts.append(count)
        outputs: list[Any] = [None] * (len(node.outputs) - 1)
        for dtype in node.strings("dtypes"):
            carrier = _CARRIERS.get(dtype, dtype)
            sends = [
                (to, _flat(value, carrier))
                for value, to in zip(inputs, node.integers("to"), strict=True)
                if value.dtype.name == tf.as_dtype(dtype).name
            ]
            received, sizes = self._alltoall(ranks, sends, carrier)
            counts.append(tf.size(received, out_type=tf.int64))
            parts = tf.split(received, sizes, num=len(ranks))
            for place, source in enumerate(ranks):
                mine = [
                    i
                    for i, (kind, rank) in enumerate(zip(node.outputs, node.integers("source"), strict=False))
                    if rank == source and kind.dtype.name == dtype
                ]
                shapes = [None if headers is None else headers[i] for i in mine]
                values = _unpack(parts[place], [node.outputs[i] for i in mine], shapes)
                for i, value in zip(mine, values, strict=True):
                    outputs[i] = value
        return [*outputs, tf.add_n(counts)]

    def sum(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Each of the ``inputs`` summed over the node's ranks."""
        from horovod.tensorflow import mpi_ops

        groups = _in_groups([(value, node.outputs[i].dtype.name) for i, value in enumerate(inputs)])
        results: list[Any] = [None] * len(inputs)
        for key, members in groups.items():
            tensors = [inputs[i] for i in members]
            summed = mpi_ops._grouped_allreduce(
                tensors, name=f"sum_{key}", op=mpi_ops.Sum, process_set=self._sets[node.integers("ranks")]
            )
            for i, tensor in zip(members, summed, strict=True):
                results[i] = tf.ensure_shape(tensor, inputs[i].shape)
        return results

    def average(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Floats averaged over the node's ranks; the others as the first rank has them."""
        from horovod.tensorflow import mpi_ops

        ranks = node.integers("ranks")
        results = []
        for i, value in enumerate(inputs):
            if value.dtype.is_floating:
                total = mpi_ops._allreduce(value, name=f"sum_{i}", op=mpi_ops.Sum, process_set=self._sets[ranks])
                results.append(total / tf.cast(len(ranks), value.dtype))
            else:
                own = value if self._rank == ranks[0] else tf.zeros_like(value)
                carried = tf.cast(own, tf.int32) if value.dtype == tf.bool else own
                total = mpi_ops._allreduce(carried, name=f"first_{i}", op=mpi_ops.Sum, process_set=self._sets[ranks])
                results.append(tf.cast(total, value.dtype))
        return results

    def meet(self, node: Node) -> Any:
        """A token that is there when all of the node's ranks have come so far."""
        from horovod.tensorflow import mpi_ops

        here = tf.cast(self._read_zero(), tf.int64)
        return mpi_ops._allreduce(here, name="meet", op=mpi_ops.Sum, process_set=self._sets[node.integers("ranks")])

    def _alltoall(self, ranks: Sequence[int], sends: Sequence[tuple[int, Any]], carrier: str) -> tuple[Any, Any]:
        """What came from all ranks, one after the other, and how many elements came from each."""
        import horovod.tensorflow as hvd

        splits = []
        for rank in ranks:
            sizes = [tf.size(value) for to, value in sends if to == rank]
            splits.append(tf.add_n(sizes) if sizes else tf.constant(0))
        data = tf.concat([value for _, value in sends], 0) if sends else tf.zeros([0], carrier)
        splits_now = tf.stack(splits) + self._read_zero()
        received, sizes = hvd.alltoall(data, splits_now, name=carrier, process_set=self._sets[tuple(ranks)])
        return tf.ensure_shape(received, [None]), tf.ensure_shape(sizes, [len(ranks)])

    def _exchange_shapes(self, node: Node, inputs: Sequence[Any]) -> tuple[list[list[Any]], Any]:
        """The dimensions of every output, from who sends it."""
        ranks = node.integers("ranks")
        sends = [(to, tf.shape(v, out_type=tf.int64)) for v, to in zip(inputs, node.integers("to"), strict=True)]
        received, _ = self._alltoall_named(ranks, sends)
        shapes, place = [], 0
        for kind in node.outputs[:-1]:
            length = len(kind.shape.dims or ())
            shapes.append([received[place + k] for k in range(length)])
            place += length
        return shapes, tf.size(received, out_type=tf.int64)

    def _alltoall_named(self, ranks: Sequence[int], sends: Sequence[tuple[int, Any]]) -> tuple[Any, Any]:
        with tf.name_scope("shapes"):
            return self._alltoall(ranks, sends, "int64")

    def _read_zero(self) -> Any:
        return tf.raw_ops.ReadVariableOp(resource=self.zero.handle, dtype=tf.int32)


def _flat(value: Any, carrier: str) -> Any:
    flat = tf.reshape(value, [-1])
    return flat if flat.dtype == tf.as_dtype(carrier) else tf.bitcast(flat, carrier)


def _unpack(flat: Any, kinds: Sequence[TensorType], shapes: Sequence[list[Any] | None]) -> list[Any]:
    """The tensors of these types that ``flat`` holds one after the other; at most one length is not known."""
    if not kinds:
        return []
    sizes = [_elements(kind, shape) for kind, shape in zip(kinds, shapes, strict=True)]
    known = [size for size in sizes if size is not None]
    rest = tf.size(flat, out_type=tf.int64) - (tf.add_n([tf.cast(s, tf.int64) for s in known]) if known else 0)
    lengths = [rest if size is None else tf.cast(size, tf.int64) for size in sizes]
    parts = tf.split(flat, tf.stack(lengths), num=len(kinds)) if len(kinds) > 1 else [flat]
    values = []
    for part, kind, shape in zip(parts, kinds, shapes, strict=True):
        if part.dtype != tf.as_dtype(kind.dtype.name):
            part = tf.bitcast(part, kind.dtype.name)
        dims = [-1 if dim is None or dim < 0 else dim for dim in kind.shape.dims or ()]
        value = tf.reshape(part, dims if shape is None else shape)
        values.append(tf.ensure_shape(value, [None if dim == -1 else dim for dim in dims]))
    return values


def _elements(kind: TensorType, shape: list[Any] | None) -> Any:
    """How many elements a tensor has; None where its type does not say."""
    if shape is not None:
        return tf.reduce_prod(tf.stack(shape)) if shape else 1
    dims = kind.shape.dims or ()
    if any(dim is None or dim < 0 for dim in dims):
        return None
    return kind.shape.elements()


def _in_groups(values: Sequence[tuple[Any, str]]) -> dict[str, list[int]]:
    """Places by dtype: Horovod reduces equal dtypes together."""
    groups: dict[str, list[int]] = {}
    for place, (_, dtype) in enumerate(values):
        groups.setdefault(dtype, []).append(place)
    return groups
