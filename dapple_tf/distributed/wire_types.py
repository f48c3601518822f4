"""Convert tensors to the form in which they are sent between ranks: flat, in a dtype that Horovod sends and sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dapple_tf.graph_passes.ir.graph import TensorType

# Horovod does not send these dtypes. A dtype of the same size carries the bits; complex128 becomes two elements.
_CARRIERS = {
    "bfloat16": "uint16",
    "half": "float16",
    "uint32": "int32",
    "uint64": "int64",
    "complex64": "int64",
    "complex128": "float64",
}
_ELEMENT_SHAPES = {"complex128": (2,)}  # the shape of one element in its carrier, if that is not a scalar


def carrier_of(dtype: str) -> str:
    """Return the dtype that carries the bits of ``dtype``."""
    return _CARRIERS.get(dtype, dtype)


def element_shape(dtype: str) -> tuple[int, ...]:
    """Return the shape of an element of ``dtype`` in its carrier."""
    return _ELEMENT_SHAPES.get(dtype, ())


def flatten(value: Any, carrier: str) -> Any:
    """Return the elements of ``value`` as a flat tensor of the carrier's dtype."""
    flat = tf.reshape(value, [-1])
    return flat if flat.dtype == tf.as_dtype(carrier) else tf.bitcast(flat, carrier)


def unflatten(flat: Any, types: Sequence[TensorType], shapes: Sequence[list[Any] | None]) -> list[Any]:
    """Return the tensors of these ``types`` that were joined to ``flat`` in this order.

    ``shapes``: the dimensions of each tensor if they were received too, else None. Then only one of the types may have
    an unknown number of elements.
    """
    if not types:
        return []
    sizes = [_element_count(kind, shape) for kind, shape in zip(types, shapes, strict=True)]
    known = [size for size in sizes if size is not None]
    rest = tf.shape(flat, out_type=tf.int64)[0] - (tf.add_n([tf.cast(s, tf.int64) for s in known]) if known else 0)
    lengths = [rest if size is None else tf.cast(size, tf.int64) for size in sizes]
    parts = tf.split(flat, tf.stack(lengths), num=len(types)) if len(types) > 1 else [flat]
    values = []
    for part, kind, shape in zip(parts, types, shapes, strict=True):
        if part.dtype != tf.as_dtype(kind.dtype.name):
            part = tf.bitcast(part, kind.dtype.name)
        dims = [-1 if dim is None or dim < 0 else dim for dim in kind.shape.dims or ()]
        value = tf.reshape(part, dims if shape is None else shape)
        values.append(tf.ensure_shape(value, [None if dim == -1 else dim for dim in dims]))
    return values


def _element_count(kind: TensorType, shape: list[Any] | None) -> Any:
    """Return the number of elements of a tensor; None if its type does not determine it."""
    if shape is not None:
        return tf.reduce_prod(tf.stack(shape)) if shape else 1
    dims = kind.shape.dims or ()
    if any(dim is None or dim < 0 for dim in dims):
        return None
    return kind.shape.elements()


def to_summable(value: Any) -> Any:
    """Return the value in a dtype that Horovod sums."""
    if value.dtype.is_complex:
        return tf.bitcast(value, value.dtype.real_dtype)
    if value.dtype == tf.bfloat16:
        return tf.cast(value, tf.float32)
    return value if value.dtype.is_floating else tf.cast(value, tf.int64)


def group_by_dtype(values: Sequence[Any]) -> dict[str, list[int]]:
    """Return the positions of the values by dtype."""
    groups: dict[str, list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault(value.dtype.name, []).append(i)
    return groups


def from_summable(total: Any, like: Any) -> Any:
    """Return a sum of results of ``to_summable``, converted to the dtype and shape of ``like``."""
    result = tf.bitcast(total, like.dtype) if like.dtype.is_complex else tf.cast(total, like.dtype)
    return tf.ensure_shape(result, like.shape)
