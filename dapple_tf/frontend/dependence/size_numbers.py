"""Evaluate the small integers of a loss, such as sizes of shapes, for several batch sizes, and find their layouts.

``Scope.numbers`` has the values, one for each of ``MULTIPLES`` of the batch size; ``Scope.layouts`` says which entries
of a shape are sizes of axes of samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dapple_tf.frontend.dependence.kinds import CONSTANT
from dapple_tf.frontend.dependence.numbers import Numbers, affine, constant_value, evaluate, strided_index, varies
from dapple_tf.frontend.dependence.scope import MULTIPLES, Scope
from dapple_tf.graph_passes.analysis.layers import SHAPE_OPS
from dapple_tf.graph_passes.ir.graph import DType, Node, Value

_SAME_LAYOUT = frozenset({"Identity", "Cast", "StopGradient", "EnsureShape"})

_SIGNS: Mapping[str, Callable[..., Any]] = {
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Less": np.less,
    "LessEqual": np.less_equal,
    **dict.fromkeys(("Maximum", "Minimum"), np.greater_equal),
}
_PIECEWISE = frozenset(
    {*_SIGNS, "Equal", "NotEqual", "FloorDiv", "FloorMod", "Abs", "Max", "Min", "All", "Any"}
    | {"LogicalAnd", "LogicalOr", "LogicalNot", "Range", "InvertPermutation"}
)

# Ops that move numbers: the operands that are moved. The others are positions, axes and shapes.
_MOVED: Mapping[str, slice] = {
    **dict.fromkeys(("StridedSlice", "Slice", "GatherV2", "Reshape", "ExpandDims", "SplitV", "Prod", "Sum"), slice(1)),
    **dict.fromkeys(("Split", "Fill", "Select", "SelectV2"), slice(1, None)),
    "ConcatV2": slice(-1),
}


def evaluate_sizes(scope: Scope, node: Node) -> None:
    """Evaluate the small integers that a node computes, and find the layouts of sizes (see ``Scope``)."""
    if node.op == "Const":
        value = constant_value(node)
        if value is not None and value.dtype.kind in "iub":
            scope.numbers[Value(node.name)] = (value,) * len(MULTIPLES)
        return
    if node.op in SHAPE_OPS:
        _evaluate_shape(scope, node)
        return
    _track_layout(scope, node)
    inputs = [scope.numbers[value] for value in node.inputs if value in scope.numbers]
    if not inputs or len(inputs) < len(node.inputs) or not holds_for_all_sizes(node, inputs, scope.batch):
        return
    found = [evaluate(node, [numbers[i] for numbers in inputs]) for i in range(len(MULTIPLES))]
    if all(outputs is not None for outputs in found):
        for i, value in enumerate(node.values()):
            scope.numbers[value] = tuple(outputs[i] for outputs in found if outputs is not None)


def holds_for_all_sizes(node: Node, inputs: Sequence[Numbers], batch: int) -> bool:
    """Return whether the results of an integer op at three batch sizes tell its results at all others.

    An op that compares, rounds, or picks by a position may give the same at these three sizes and another result for
    small batches.
    """
    changing = {i for i, numbers in enumerate(inputs) if varies(numbers)}
    if not changing:
        return True
    if node.op in _MOVED:
        return changing <= set(range(len(inputs))[_MOVED[node.op]])
    if node.op == "DynamicStitch":
        return min(changing) >= len(inputs) // 2
    if node.op == "Cast" and dict(node.attrs)["DstT"] == DType("bool"):
        zero = (np.asarray(0),) * len(inputs[0])
        return holds_for_all_sizes(dataclasses.replace(node, op="NotEqual"), [inputs[0], zero], batch)
    if node.op not in _PIECEWISE:
        return True
    if len(inputs) != 2:
        return False
    if node.op in ("FloorDiv", "FloorMod"):
        found, divisor = affine(inputs[0], batch), np.asarray(inputs[1][0])
        return bool(
            found is not None and not varies(inputs[1]) and bool(divisor.all()) and not (found[0] % divisor).any()
        )
    both = affine(inputs[0], batch), affine(inputs[1], batch)
    if node.op not in _SIGNS and node.op not in ("Equal", "NotEqual"):
        return False
    if both[0] is None or both[1] is None:
        return False
    slope, offset = both[0][0] - both[1][0], both[0][1] - both[1][1]
    first, last = slope + offset, np.where(slope > 0, np.inf, np.where(slope < 0, -np.inf, offset))  # from 1 sample on
    if node.op in ("Equal", "NotEqual"):
        return bool(np.all((slope == 0) | (first * np.sign(slope) > 0)))
    return bool(np.all(_SIGNS[node.op](first, 0) == _SIGNS[node.op](last, 0)))


def _evaluate_shape(scope: Scope, node: Node) -> None:
    for i, value in enumerate(node.values()):
        source = node.inputs[i]
        kind, rank = scope.kinds.get(source, CONSTANT), scope.rank(source)
        if node.op == "Rank":
            if rank is not None:
                scope.numbers[value] = (np.asarray(rank),) * len(MULTIPLES)
            continue
        lengths = scope.shape_numbers(source)
        if lengths is None or rank is None:
            continue
        if node.op == "Size":
            lengths = tuple(np.prod(dims, dtype=np.int64) for dims in lengths)
        scope.numbers[value] = lengths
        if kind.rows and not kind.origin and kind.outer and node.op in ("Shape", "ShapeN"):
            scope.layouts[value] = tuple(
                (kind.outer, kind.inner) if axis == kind.axis else None for axis in range(rank)
            )


def _track_layout(scope: Scope, node: Node) -> None:
    """Find the layouts of sizes that are sliced, stacked or concatenated out of shapes."""
    known = [scope.layouts.get(value) for value in node.inputs]
    if not any(known):
        return
    result: Numbers | tuple[Any, ...] | None = None
    if node.op in _SAME_LAYOUT:
        result = known[0]
    elif node.op == "StridedSlice" and known[0] is not None:
        parts = [scope.number(value) for value in node.inputs[1:]]
        if all(part is not None for part in parts):
            index = strided_index(dict(node.attrs), *parts)
            if len(index) == 1 and isinstance(index[0], int | slice):
                picked = known[0][index[0]]
                result = picked if isinstance(index[0], slice) else (picked,)
    elif node.op == "Pack":
        result = tuple(entry[0] if entry else None for entry in known)
    elif node.op == "ConcatV2":
        entries: list[Any] = []
        for value, entry in zip(node.inputs[:-1], known, strict=False):
            number = scope.number(value)
            entries += entry or (None,) * (0 if number is None else number.size)
        result = tuple(entries)
    elif node.op == "BroadcastArgs":
        width = max((scope.dims(value) or (0,))[0] or 0 for value in node.inputs)
        padded = [(None,) * (width - len(entries or ())) + (entries or ()) for entries in known]
        found = [{entry for entry in column if entry} for column in zip(*padded, strict=True)]
        result = tuple(entries.pop() if len(entries) == 1 else None for entries in found)
    if result:
        scope.layouts[Value(node.name)] = tuple(result)
