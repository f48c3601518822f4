"""Arguments that are no dense tensors of rows: given to the trace as such, and put together again inside.

A batch is cut into micro-batches by rows, so each row must be one entry of axis 0: a ragged row is padded to the length
of the batch's longest, and a sparse row is the ragged row of its values, beside that of their columns. The loss sees a
``tf.RaggedTensor`` or ``tf.SparseTensor`` of the micro-batch's rows. A number without axes is repeated for each row.
The loss sees the maximum of these equal numbers, which is computed from the whole batch, once a step. A Python
value (a model, an optimizer, a number, None) is part of the trace, as in a tf.function: for another value the function
is traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
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


class ScalarRows(NamedTuple):
    """A number without axes, in each of the N rows of ``values`` [N]."""

    values: Any


@dataclass(frozen=True, repr=False)
class PythonValue:
    """A Python value; ``tf.nest`` finds no tensors in it. The ``repr`` differs for values that are traced apart."""

    value: Any

    def __repr__(self) -> str:
        named = isinstance(self.value, bool | int | float | complex | str | bytes | None)
        return repr(self.value) if named else f"{type(self.value).__name__} {id(self.value)}"

    def __tf_flatten__(self) -> tuple[tuple[Any], tuple[()]]:
        return (self.value,), ()

    @classmethod
    def __tf_unflatten__(cls, metadata: tuple[Any], components: tuple[()]) -> PythonValue:
        return cls(*metadata)


def is_python_value(leaf: Any) -> bool:
    """Return whether an argument is handed to the function as it is: a variable, a class, or what is no array."""
    if isinstance(leaf, tf.Variable | keras.Variable | type):
        return True
    if tf.is_tensor(leaf) or isinstance(leaf, tf.experimental.ExtensionType | tf.TypeSpec):
        return False
    return not any(hasattr(leaf, name) for name in ("__array__", "__array_interface__", "__tf_tensor__"))


def as_rows(batch: Sequence[Any], *, partial: bool = False) -> tuple[Any, ...]:
    """Return the arguments with ``RaggedRows``, ``SparseRows``, ``ScalarRows`` or ``PythonValue`` for all but arrays.

    ``partial``: None stands for an array that is not given, and stays.

    Raises BatchError for what cannot be cut by rows: ragged tensors of several ragged axes, sparse ones that are no
    matrices, and numbers and strings in a list, which may be meant for rows.
    """
    paths = iter(argument_paths(batch))

    def convert(argument: Any) -> Any:
        return tf.nest.map_structure(lambda leaf: _as_rows(next(paths), leaf, argument, partial=partial), argument)

    found = tuple(map(convert, batch))
    shapes: list[Any] = [getattr(leaf, "shape", ()) for leaf in tf.nest.flatten(found)]
    samples = [shape[0] for shape in shapes if len(shape) and shape[0] is not None]  # a tf.TensorSpec may not know it
    return tuple(tf.nest.map_structure(lambda leaf: _spread(leaf, samples[0]), found)) if samples else found


def unknown_lengths(batch: Sequence[Any]) -> set[tuple[int, int]]:
    """Return where the flattened ``batch`` has a longest row's length: number of the tensor, and axis."""
    numbered = tf.nest.pack_sequence_as(tuple(batch), range(len(tf.nest.flatten(tuple(batch)))))
    found: set[tuple[int, int]] = set()

    def add(rows: Any) -> None:
        padded = {RaggedRows: 1, SparseRows: 2}.get(type(rows), 0)
        found.update((rows[part], 1) for part in range(padded))

    _map_rows(add, numbered)
    return found


def taking_rows(function: Callable[..., Any], batch: Sequence[Any]) -> Callable[..., Any]:
    """Return ``function`` as one that takes the arguments ``batch`` as ``as_rows`` returns them.

    It is the function itself where these are all dense tensors.
    """
    found: list[bool] = []
    _map_rows(lambda rows: found.append(True), tuple(batch))
    if not found:
        return function
    function = internals.python_function_of(function)

    def loss(*batch: Any) -> Any:
        with internals.use_ragged_partitions() as known:
            return function(*_put_together(batch, known))

    name = getattr(function, "__name__", "")
    loss.__name__ = name if name.isidentifier() else "loss"  # AutoGraph takes a "<lambda>" for one
    return loss


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow is not typed
def _put_together(batch: tuple[Any, ...], known: internals.Partitions) -> tuple[Any, ...]:
    return tuple(_map_rows(lambda rows: _from_rows(rows, known), batch))


def _as_rows(path: str, leaf: Any, argument: Any, *, partial: bool) -> Any:
    """Return what is put in place of a ``leaf`` of an ``argument``; the leaf itself where it is an array."""
    if leaf is None and partial:
        return None
    if is_python_value(leaf):
        if leaf is not argument and isinstance(leaf, bool | int | float | complex | str | bytes):
            what, kind = "strings" if isinstance(leaf, str | bytes) else "numbers", type(argument).__name__
            raise BatchError(
                f"argument {path.partition('[')[0]} is a {kind} of {what} ({path} is {leaf!r}): give an array or a "
                "tensor of the samples, batched on axis 0, or each value as an argument of its own"
            )
        return PythonValue(leaf)
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


def _spread(leaf: Any, samples: int) -> Any:
    """Return the rows of a number or bool without axes; any other ``leaf`` as it is."""
    if isinstance(leaf, tf.TypeSpec) or getattr(leaf, "shape", None) != ():
        return leaf
    value = tf.convert_to_tensor(leaf)
    is_number = value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool
    return ScalarRows(tf.fill([samples], value)) if is_number else leaf


def _map_rows(function: Callable[[Any], Any], argument: Any) -> Any:
    """Return the nested ``argument`` with the results of ``function`` in place of rows."""
    if isinstance(argument, RaggedRows | SparseRows | ScalarRows | PythonValue):
        return function(argument)
    if not tf.nest.is_nested(argument):
        return argument
    return internals.map_items(lambda item: _map_rows(function, item), argument)


def _from_rows(rows: Any, known: internals.Partitions) -> Any:
    if isinstance(rows, PythonValue):
        return rows.value
    if isinstance(rows, ScalarRows):
        is_bool = rows.values.dtype.is_bool
        return tf.reduce_any(rows.values) if is_bool else tf.reduce_max(rows.values)
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
