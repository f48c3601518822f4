"""Evaluate the small integers of a loss, such as sizes of shapes, for several batch sizes, and find their layouts.

``Scope.numbers`` has the values, one for each of ``MULTIPLES`` of the batch size; ``Scope.layouts`` says which entries
of a shape are sizes of axes of samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dapple_tf.frontend.dependence.kinds import CONSTANT
from dapple_tf.frontend.dependence.numbers import (
    Numbers,
    constant_value,
    evaluate,
    holds_for_all_sizes,
    strided_index,
)
from dapple_tf.frontend.dependence.scope import MULTIPLES, Scope
from dapple_tf.graph_passes.analysis.layers import SHAPE_OPS
from dapple_tf.graph_passes.ir.graph import Node, Value

_SAME_LAYOUT = frozenset({"Identity", "Cast", "StopGradient", "EnsureShape"})


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
    inputs = [scope.numbers.get(value) for value in node.inputs]
    if not inputs or None in inputs:
        return
    if not holds_for_all_sizes(node, [numbers for numbers in inputs if numbers is not None], scope.batch):
        return
    found = [evaluate(node, [numbers[i] for numbers in inputs if numbers is not None]) for i in range(len(MULTIPLES))]
    if all(outputs is not None for outputs in found):
        for i, value in enumerate(node.values()):
            scope.numbers[value] = tuple(outputs[i] for outputs in found if outputs is not None)


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
