"""Evaluate the small integers of a graph, such as shapes and axes, for three batch sizes at once.

A number that is equal for all three does not depend on the batch size; equal differences mean that it is affine in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from dapple_tf.graph_passes.ir.graph import DType, Node, Opaque

LARGEST = 256
"""The number of elements above which a tensor is not evaluated."""

Numbers = tuple[Any, ...]
"""A tensor's NumPy values for the three batch sizes."""


def constant_value(node: Node, largest: int = LARGEST) -> Any | None:
    """Return the NumPy value of a ``Const`` of at most ``largest`` elements, else None."""
    value = node.get("value")
    if node.op != "Const" or not isinstance(value, Opaque):
        return None
    if node.outputs[0].shape.dims is None or node.outputs[0].shape.elements() > largest:
        return None
    proto = attr_value_pb2.AttrValue.FromString(value.data).tensor
    return tf.make_ndarray(proto)


def varies(numbers: Numbers) -> bool:
    """Return whether the numbers depend on the batch size."""
    return any(not np.array_equal(first, second) for first, second in itertools.pairwise(numbers))


def affine(numbers: Numbers, batch: int) -> tuple[Any, Any] | None:
    """Return (c, d), whole numbers, such that the numbers are c x batch size + d; None if they are not.

    ``batch``: the first of the three batch sizes; the others are its multiples.
    """
    first, second, third = (np.asarray(value, np.int64) for value in numbers)
    if not np.array_equal(third - second, second - first) or ((second - first) % batch).any():
        return None
    return (second - first) // batch, 2 * first - second


def evaluate(node: Node, inputs: Sequence[Any]) -> list[Any] | None:
    """Return the outputs of an integer op for NumPy ``inputs``, or None where the op is not known or not possible."""
    rule = _RULES.get(node.op)
    if rule is None or any(np.size(value) > LARGEST for value in inputs):
        return None
    try:
        found = rule(dict(node.attrs), *inputs)
    except (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError):
        return None
    outputs = found if isinstance(found, list) else [found]
    if any(np.size(value) > LARGEST for value in outputs):
        return None
    return [np.asarray(value) for value in outputs]


def strided_index(attrs: Mapping[str, Any], begin: Any, end: Any, strides: Any) -> list[Any]:
    """Return the Python indices (ints, slices, None, Ellipsis) of a StridedSlice."""
    index: list[Any] = []
    for i in range(len(begin)):
        bit = 1 << i
        if int(attrs["ellipsis_mask"]) & bit:
            index.append(Ellipsis)
        elif int(attrs["new_axis_mask"]) & bit:
            index.append(None)
        elif int(attrs["shrink_axis_mask"]) & bit:
            index.append(int(begin[i]))
        else:
            first = None if int(attrs["begin_mask"]) & bit else int(begin[i])
            last = None if int(attrs["end_mask"]) & bit else int(end[i])
            index.append(slice(first, last, int(strides[i])))
    return index


def _cast(attrs: Mapping[str, Any], x: Any) -> Any:
    kind = attrs["DstT"]
    assert isinstance(kind, DType)
    if kind.name not in _CASTS:
        raise TypeError(f"numbers of type {kind.name} are not evaluated")
    return np.asarray(x).astype(_CASTS[kind.name])


# Sizes that are cast to floats stay whole numbers.
_CASTS: Mapping[str, Any] = {
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    **dict.fromkeys(("float16", "half", "bfloat16", "float32", "float64"), np.dtype("float64")),
    "bool": np.dtype("bool"),
}


def _reduce(function: Callable[..., Any]) -> Callable[..., Any]:
    def rule(attrs: Mapping[str, Any], x: Any, axes: Any) -> Any:
        return function(x, axis=tuple(np.reshape(axes, -1).tolist()), keepdims=bool(attrs.get("keep_dims", False)))

    return rule


def _broadcast_gradient_axes(attrs: Mapping[str, Any], first: Any, second: Any) -> list[Any]:
    rank = max(len(first), len(second))
    a, b = ([1] * (rank - len(dims)) + [int(dim) for dim in dims] for dims in (first, second))
    missing = rank - len(first), rank - len(second)
    found: tuple[list[int], list[int]] = [], []
    for axis in range(rank):
        if a[axis] != b[axis] or a[axis] == 1:
            for dims, axes in ((a, found[0]), (b, found[1])):
                if dims[axis] == 1:
                    axes.append(axis)
        else:
            for absent, axes in zip(missing, found, strict=True):
                if axis < absent:
                    axes.append(axis)
    return [np.asarray(axes, np.asarray(first).dtype) for axes in found]


def _dynamic_stitch(attrs: Mapping[str, Any], *values: Any) -> Any:
    half = len(values) // 2
    indices, data = values[:half], values[half:]
    result = np.zeros(1 + max(int(np.max(index)) for index in indices), data[0].dtype)
    for index, value in zip(indices, data, strict=True):
        result[index] = value
    return result


_BINARY: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "LogicalAnd": np.logical_and,
    "LogicalOr": np.logical_or,
}

_RULES: dict[str, Callable[..., Any]] = {
    **{op: (lambda attrs, x, y, f=f: f(x, y)) for op, f in _BINARY.items()},
    **dict.fromkeys(("Identity", "StopGradient", "EnsureShape"), lambda attrs, x: x),
    "Neg": lambda attrs, x: -x,
    "Abs": lambda attrs, x: np.abs(x),
    "LogicalNot": lambda attrs, x: np.logical_not(x),
    "Cast": _cast,
    "Pack": lambda attrs, *xs: np.stack(xs, int(attrs.get("axis", 0))),
    "Unpack": lambda attrs, x: [*np.moveaxis(x, int(attrs.get("axis", 0)), 0)],
    "ConcatV2": lambda attrs, *xs: np.concatenate(xs[:-1], int(xs[-1])),
    "Split": lambda attrs, axis, x: np.split(x, int(attrs["num_split"]), int(axis)),
    "SplitV": lambda attrs, x, sizes, axis: np.split(x, np.cumsum(sizes)[:-1], int(axis)),
    "StridedSlice": lambda attrs, x, b, e, s: x[tuple(strided_index(attrs, b, e, s))],
    "Slice": lambda attrs, x, b, n: x[tuple(slice(i, None if k < 0 else i + k) for i, k in zip(b, n, strict=True))],
    "GatherV2": lambda attrs, x, index, axis: np.take(x, index, int(axis)),
    "Reshape": lambda attrs, x, shape: np.reshape(x, shape),
    "Squeeze": lambda attrs, x: np.squeeze(x, tuple(attrs.get("squeeze_dims", ())) or None),
    "ExpandDims": lambda attrs, x, axis: np.expand_dims(x, int(axis)),
    "Fill": lambda attrs, shape, x: np.full(shape, x),
    "Range": lambda attrs, first, last, step: np.arange(int(first), int(last), int(step)).astype(
        np.asarray(first).dtype
    ),
    "Prod": _reduce(np.prod),
    "Sum": _reduce(np.sum),
    "Max": _reduce(np.max),
    "Min": _reduce(np.min),
    "All": _reduce(np.all),
    "Any": _reduce(np.any),
    **dict.fromkeys(("Select", "SelectV2"), lambda attrs, c, x, y: np.where(c, x, y)),
    "InvertPermutation": lambda attrs, x: np.argsort(x).astype(x.dtype),
    "BroadcastArgs": lambda attrs, x, y: np.asarray(np.broadcast_shapes(tuple(x), tuple(y)), x.dtype),
    "BroadcastGradientArgs": _broadcast_gradient_axes,
    "DynamicStitch": _dynamic_stitch,
}
