"""Exchanges and sums between ranks, as Horovod ops of a step's graph.

Horovod's ops are not registered as stateful, so TensorFlow folds those of constant inputs, merges those of equal
inputs and drops those whose results nobody takes. Every op here takes a read of a variable (``zero``), which is
stateful, and gives a token that the step returns. Ops are known between ranks by their names, which their nodes give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.distributed.progress import Progress
from graph_passes.ir.graph import Node, TensorType

# Horovod does not send these: others of the same size travel in their place, two for each complex128.
_CARRIERS = {
    "bfloat16": "uint16",
    "half": "float16",
    "uint32": "int32",
    "uint64": "int64",
    "complex64": "int64",
    "complex128": "float64",
}
_TAILS = {"complex128": [2]}  # the shape of an element in its carrier, where it is not a scalar


class Collectives:
    """What the handlers of ``operations`` need of other ranks. ``sets``: Horovod process sets by their ranks."""

    def __init__(self, rank: int, sets: Mapping[tuple[int, ...], Any], progress: Progress) -> None:
        self._rank = rank
        self._sets = sets
        self._progress = progress
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
            received, sizes = self._alltoall(ranks, sends, carrier, _TAILS.get(dtype, []))
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
        return [*outputs, self._completed(node, tf.add_n(counts))]

    def sum(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Each of the ``inputs`` summed over the node's ranks; then a token."""
        from horovod.tensorflow import mpi_ops

        tensors = [_summable(value) for value in inputs]
        results: list[Any] = [None] * len(inputs)
        tokens = []
        for key, members in _in_groups(tensors).items():
            # Where backward is inlined a gradient may be a constant; a group of constants alone would be folded.
            nothing = tf.cast(self._read_zero(), key)
            *summed, _ = mpi_ops._grouped_allreduce(
                [*(tensors[i] for i in members), nothing],
                name=f"sum_{key}",
                op=mpi_ops.Sum,
                process_set=self._sets[node.integers("ranks")],
            )
            for i, tensor in zip(members, summed, strict=True):
                results[i] = _summed(tensor, inputs[i])
            # Of what was received, so that nothing but the sum itself can tell it.
            tokens.append(tf.math.count_nonzero(tf.reshape(summed[0], [-1])[:1], dtype=tf.int64))
        return [*results, self._completed(node, tf.add_n(tokens))]

    def average(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Floats averaged over the node's ranks; the others as the first rank has them."""
        from horovod.tensorflow import mpi_ops

        ranks = node.integers("ranks")
        results = []
        for i, value in enumerate(inputs):
            mean = value.dtype.is_floating
            part = value if mean or self._rank == ranks[0] else self._nothing_like(value)
            name = f"sum_{i}" if mean else f"first_{i}"
            total = _summed(
                mpi_ops._allreduce(_summable(part), name=name, op=mpi_ops.Sum, process_set=self._sets[ranks]), value
            )
            results.append(total / tf.cast(len(ranks), value.dtype) if mean else total)
        return [*results[:-1], self._completed(node, results[-1])]

    def meet(self, node: Node) -> Any:
        """A token that is there when all of the node's ranks have come so far."""
        from horovod.tensorflow import mpi_ops

        here = tf.cast(self._read_zero(), tf.int64)
        sets = self._sets[node.integers("ranks")]
        return self._completed(node, mpi_ops._allreduce(here, name="meet", op=mpi_ops.Sum, process_set=sets))

    def sent(self, total: Any) -> Any:
        """The sum of all tokens, which says that everything has been exchanged, for the step to return."""
        return self._progress.canary.watch_over(total)

    def _completed(self, node: Node, result: Any) -> Any:
        """``result``, and when it is there ``progress`` says that ``node`` is done; the two are one to TensorFlow."""
        done = self._progress.done
        with tf.device(done.device):
            handle = internals.capture_of(tf.compat.v1.get_default_graph(), done.handle)
            number = tf.constant(self._progress.number_of(node.name))
            with tf.control_dependencies([result]):
                write = tf.raw_ops.AssignVariableOp(resource=handle, value=number)
        with tf.control_dependencies([write]):
            return tf.identity(result)

    def _alltoall(
        self, ranks: Sequence[int], sends: Sequence[tuple[int, Any]], carrier: str, tail: Sequence[int] = ()
    ) -> tuple[Any, Any]:
        """What came from all ranks, one after the other, and how many elements came from each."""
        import horovod.tensorflow as hvd

        splits = []
        for rank in ranks:
            sizes = [tf.shape(value)[0] for to, value in sends if to == rank]
            splits.append(tf.add_n(sizes) if sizes else tf.constant(0))
        data = tf.concat([value for _, value in sends], 0) if sends else tf.zeros([0, *tail], carrier)
        splits_now = tf.stack(splits) + self._read_zero()
        received, sizes = hvd.alltoall(data, splits_now, name=carrier, process_set=self._sets[tuple(ranks)])
        return tf.ensure_shape(received, [None, *tail]), tf.ensure_shape(sizes, [len(ranks)])

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

    def _nothing_like(self, value: Any) -> Any:
        """Zeros of the value's type when it is there; a constant would be summed while the graph is optimised."""
        with tf.control_dependencies([value]):
            return tf.broadcast_to(tf.cast(self._read_zero(), value.dtype), tf.shape(value))

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
    rest = tf.shape(flat, out_type=tf.int64)[0] - (tf.add_n([tf.cast(s, tf.int64) for s in known]) if known else 0)
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


def _summable(value: Any) -> Any:
    """The value in a dtype that Horovod sums."""
    if value.dtype.is_complex:
        return tf.bitcast(value, value.dtype.real_dtype)
    if value.dtype == tf.bfloat16:
        return tf.cast(value, tf.float32)
    return value if value.dtype.is_floating else tf.cast(value, tf.int64)


def _summed(total: Any, like: Any) -> Any:
    """What ``_summable`` made of a value ``like`` this, in its dtype again."""
    back = tf.bitcast(total, like.dtype) if like.dtype.is_complex else tf.cast(total, like.dtype)
    return tf.ensure_shape(back, like.shape)


def _in_groups(values: Sequence[Any]) -> dict[str, list[int]]:
    """Places by dtype: Horovod reduces equal dtypes together."""
    groups: dict[str, list[int]] = {}
    for place, value in enumerate(values):
        groups.setdefault(value.dtype.name, []).append(place)
    return groups
