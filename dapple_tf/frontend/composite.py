"""Arguments that are ragged or sparse: given to the trace as dense rows, and put together again inside.

A batch is cut into micro-batches by rows, so each row must be one entry of axis 0: a ragged row is padded to the length
of the batch's longest, and a sparse row is the ragged row of its values, beside that of their columns. The loss sees a
``tf.RaggedTensor`` or ``tf.SparseTensor`` of the micro-batch's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import BatchError
from dapple_tf.frontend.batch import argument_paths


class RaggedRows(NamedTuple):
    """A ragged tensor of N rows: ``padded`` [N, longest, ...], and the ``lengths`` [N] of the rows."""

    padded: Any
    lengths: Any


class SparseRows(NamedTuple):
    """A sparse matrix of N rows.

    ``values`` and ``columns`` [N, longest], padded; the ``lengths`` [N] of the rows; ``width``, [N, 0, width of the
    matrix], which holds nothing: its shape says how wide the matrix is.
    """

    values: Any
    columns: Any
    lengths: Any
    width: Any


def as_rows(batch: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with ``RaggedRows`` and ``SparseRows`` in place of ragged and sparse tensors.

    Raises BatchError for what cannot be cut by rows: ragged tensors of several ragged axes, sparse ones that are no
    matrices.
    """
    paths = iter(argument_paths(batch))
    return tuple(tf.nest.map_structure(lambda leaf: _as_rows(next(paths), leaf), argument) for argument in batch)


def takes_rows(batch: Sequence[Any]) -> bool:
    """Return whether ``batch`` has ``RaggedRows`` or ``SparseRows``."""
    found: list[bool] = []
    _map_rows(lambda rows: found.append(True), tuple(batch))
    return bool(found)


def unknown_lengths(batch: Sequence[Any]) -> set[tuple[int, int]]:
    """Return where the flattened ``batch`` has a longest row's length: number of the tensor, and axis."""
    numbered = tf.nest.pack_sequence_as(tuple(batch), range(len(tf.nest.flatten(tuple(batch)))))
    found: set[tuple[int, int]] = set()

    def add(rows: Any) -> None:
        padded = rows[:1] if isinstance(rows, RaggedRows) else rows[:2]
        found.update((number, 1) for number in padded)

    _map_rows(add, numbered)
    return found


def taking_rows(loss_fn: Any) -> Callable[..., Any]:
    """Return ``loss_fn`` as a function that takes the rows in place of ragged and sparse tensors."""
    function = loss_fn.python_function if internals.is_tf_function(loss_fn) else loss_fn

    def loss(*batch: Any) -> Any:
        with internals.use_ragged_partitions() as known:
            return function(*_put_together(batch, known))

    name = getattr(function, "__name__", "")
    loss.__name__ = name if name.isidentifier() else "loss"  # AutoGraph takes a "<lambda>" for one
    return loss


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow is not typed
def _put_together(batch: tuple[Any, ...], known: internals.Partitions) -> tuple[Any, ...]:
    return tuple(_map_rows(lambda rows: _from_rows(rows, known), batch))


def _as_rows(path: str, leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        if leaf.ragged_rank != 1:
            raise BatchError(
                f"argument {path} has {leaf.ragged_rank} ragged axes, and only one can be cut by rows: give "
                "the inner ones padded (to_tensor of its values), with their lengths as another argument"
            )
        return RaggedRows(leaf.to_tensor(), leaf.row_lengths())
    if isinstance(leaf, tf.SparseTensor):
        if leaf.shape.rank != 2:
            raise BatchError(
                f"argument {path} is sparse and has {leaf.shape.rank} axes, but only matrices are cut by rows"
            )
        ordered = tf.sparse.reorder(leaf)
        rows, columns = tf.unstack(ordered.indices, 2, axis=1)
        samples, width = (int(size) for size in leaf.dense_shape)
        parts = [tf.RaggedTensor.from_value_rowids(each, rows, samples) for each in (ordered.values, columns)]
        values, places = (part.to_tensor() for part in parts)
        return SparseRows(values, places, parts[0].row_lengths(), tf.zeros([samples, 0, width]))
    return leaf


def _map_rows(function: Callable[[Any], Any], argument: Any) -> Any:
    """Return the nested ``argument`` with the results of ``function`` in place of rows."""
    if isinstance(argument, RaggedRows | SparseRows):
        return function(argument)
    if isinstance(argument, dict):
        return type(argument)({key: _map_rows(function, item) for key, item in argument.items()})
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*(_map_rows(function, item) for item in argument))
    if isinstance(argument, list | tuple):
        return type(argument)(_map_rows(function, item) for item in argument)
    return argument


def _from_rows(rows: Any, known: internals.Partitions) -> Any:
    padded = rows[0]
    samples, longest = tf.unstack(tf.shape(padded, tf.int64)[:2])
    chosen = tf.where(tf.sequence_mask(rows.lengths, longest))
    row_ids = chosen[:, 0]
    if isinstance(rows, RaggedRows):
        facts = internals.RaggedPartition(row_ids, rows.lengths, samples, longest)
        return internals.ragged_tensor(tf.gather_nd(padded, chosen), facts, known)
    places = tf.stack([row_ids, tf.gather_nd(rows.columns, chosen)], 1)
    width = tf.constant(rows.width.shape[2], tf.int64)
    return tf.SparseTensor(places, tf.gather_nd(rows.values, chosen), tf.stack([samples, width]))
