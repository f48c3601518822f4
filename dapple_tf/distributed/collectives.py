"""Exchanges, barriers and sums between ranks, as ops of a step's graph: native ones, and Horovod's.

Horovod's ops are not registered as stateful. So TensorFlow replaces an op of constant inputs by a constant, merges ops
of equal inputs, and removes an op whose result is not used. To prevent this, every op here depends on a read of a
variable (``zero``), which is stateful, and contributes to a token that the step returns. Ranks match their ops by name,
which is the name of the node in the pipelined graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.distributed.native_collectives import NativeCollectives, is_native, name_pattern
from dapple_tf.distributed.progress import Progress
from dapple_tf.distributed.wire_types import (
    carrier_of,
    element_shape,
    flatten,
    from_summable,
    group_by_dtype,
    to_summable,
    unflatten,
)
from dapple_tf.graph_passes.ir.graph import Node


class Collectives:
    """Builds the ops of ``rank`` that involve other ranks. ``sets``: the Horovod process set of each group of ranks.

    ``native`` builds exchanges, barriers, and sums of known shapes; without it Horovod does these. ``scope``: the start
    of the names by which the progress notes what was completed, such as ``phase2/``. Token: an int64 that is computed
    once an op has completed; the step returns the sum of all tokens.
    """

    def __init__(
        self,
        rank: int,
        sets: Mapping[tuple[int, ...], Any],
        progress: Progress,
        native: NativeCollectives | None = None,
        scope: str = "",
    ) -> None:
        self._rank = rank
        self._sets = sets
        self._progress = progress
        with tf.init_scope(), tf.device("CPU:0"):
            self.zero = tf.Variable(0, dtype=tf.int32, trainable=False)
            self.running = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._last_exchange = progress.exchange_variable  # made now: TensorFlow traces again what makes a variable
        self.fits_loops = native is not None  # Horovod matches its ops by their names in the graph
        self._native = native
        self._scope = scope
        self._exchanges = native or AlltoallExchange(sets, self.zero)

    def exchange(self, node: Node, inputs: Sequence[Any], micro_batch: Any = None) -> list[Any]:
        """Send each input to the rank that ``node`` names, and receive its outputs; return these and a token."""
        outputs, token = self._exchanges.exchange(node, inputs, micro_batch)
        return [*outputs, self._note_completion(node, token, micro_batch)]

    def all_reduce(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Return each input summed over the node's ranks, and a token."""
        if self._native is not None and is_native(node):
            sums, token = self._native.all_reduce(node, inputs)
            return [*sums, self._note_completion(node, token)]
        from horovod.tensorflow import mpi_ops

        tensors = [to_summable(value) for value in inputs]
        results: list[Any] = [None] * len(inputs)
        tokens = []
        for dtype, members in group_by_dtype(tensors).items():  # all tensors of a Horovod group have one dtype
            # If TensorFlow inlines backward, all gradients may be constants: it would replace their sum by a constant.
            nothing = tf.cast(self._read_zero(), dtype)
            *summed, _ = mpi_ops._grouped_allreduce(
                [*(tensors[i] for i in members), nothing],
                name=f"sum_{dtype}",
                op=mpi_ops.Sum,
                process_set=self._sets[node.integers("ranks")],
            )
            for i, tensor in zip(members, summed, strict=True):
                results[i] = from_summable(tensor, inputs[i])
            # The token is computed from received data, so that TensorFlow cannot compute it before the sum.
            tokens.append(tf.math.count_nonzero(tf.reshape(summed[0], [-1])[:1], dtype=tf.int64))
        return [*results, self._note_completion(node, tf.add_n(tokens))]

    def merge_state(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Return written values merged over ranks: sum, mean, or the first rank's value; see ``OpName.COMMIT``."""
        from horovod.tensorflow import mpi_ops

        ranks = node.integers("ranks")
        summed = node.strings("summed") if node.has("summed") else ()
        results = []
        for i, (variable, value) in enumerate(zip(node.strings("variables"), inputs, strict=True)):
            is_sum = variable in summed
            is_mean = value.dtype.is_floating and not is_sum
            part = value if is_sum or is_mean or self._rank == ranks[0] else self._zeros_like(value)
            name = f"sum_{i}" if is_sum or is_mean else f"first_{i}"
            total = from_summable(
                mpi_ops._allreduce(to_summable(part), name=name, op=mpi_ops.Sum, process_set=self._sets[ranks]), value
            )
            results.append(total / tf.cast(len(ranks), value.dtype) if is_mean else total)
        return [*results[:-1], self._note_completion(node, results[-1])]

    def barrier(self, node: Node) -> Any:
        """Return a token that is computed once all of the node's ranks have reached this node."""
        arrived = tf.cast(self._read_zero(), tf.int64)
        if self._native is not None:
            return self._note_completion(node, self._native.barrier(node, arrived))
        from horovod.tensorflow import mpi_ops

        process_set = self._sets[node.integers("ranks")]
        return self._note_completion(
            node, mpi_ops._allreduce(arrived, name="meet", op=mpi_ops.Sum, process_set=process_set)
        )

    def guard_step(self, token: Any) -> Any:
        """Let the hang detector observe the step; return ``token``, which is computed after all its exchanges."""
        return self._progress.hang_detector.guard(token)

    def _note_completion(self, node: Node, result: Any, micro_batch: Any = None) -> Any:
        """Return ``result``; before any op can use it, the progress notes that ``node`` is completed."""
        variable = self._last_exchange
        pattern, numbers = name_pattern(node, micro_batch)
        with tf.device(variable.device):
            handle = internals.capture_of(tf.compat.v1.get_default_graph(), variable.handle)
            name = tf.strings.format(self._scope + pattern, numbers, placeholder="*")
            with tf.control_dependencies([result]):
                write = tf.raw_ops.AssignVariableOp(resource=handle, value=name)
        with tf.control_dependencies([write]):
            return tf.identity(result)

    def _zeros_like(self, value: Any) -> Any:
        """Return zeros once ``value`` is computed; constants would be summed while TensorFlow optimizes the graph."""
        with tf.control_dependencies([value]):
            return tf.broadcast_to(tf.cast(self._read_zero(), value.dtype), tf.shape(value))

    def _read_zero(self) -> Any:
        return tf.raw_ops.ReadVariableOp(resource=self.zero.handle, dtype=tf.int32)


# --- Exchange by Horovod's alltoall, where the native ops are not built or not wanted


class AlltoallExchange:
    """Builds exchanges. ``sets``, ``zero``: see ``Collectives``."""

    def __init__(self, sets: Mapping[tuple[int, ...], Any], zero: tf.Variable) -> None:
        self._sets = sets
        self._zero = zero

    def exchange(self, node: Node, inputs: Sequence[Any], micro_batch: Any) -> tuple[list[Any], Any]:
        """Send each input to the rank that ``node`` names, and receive its outputs: one alltoall for each dtype.

        Returns the outputs and a token (see ``Collectives``). Between two ranks the elements of all values travel in
        one flat tensor, in an order that both ranks know. ``micro_batch`` has no use: an op's name holds the number.
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
        """Return the elements that all ranks sent, in the order of the ranks, and the number from each rank."""
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
        """Return the dimensions of every output, received from its sender, and the number of received dimensions."""
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
