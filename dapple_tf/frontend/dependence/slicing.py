"""Rules of ops that slice, split or unstack a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dapple_tf.frontend.dependence.kinds import SIZE, Form, Kind, shared
from dapple_tf.frontend.dependence.numbers import strided_index
from dapple_tf.frontend.dependence.operands import CONSTANT_ROWS, data_operands, rule_of_each
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.graph_passes.ir.graph import Node


@data_operands(1)
def _unpack(scope: Scope, node: Node, kinds: Sequence[Kind]) -> list[Kind] | Kind:
    rank = scope.rank(node.inputs[0])
    if rank is None or node.get("axis", 0) % rank == kinds[0].axis:
        return scope.couple(node, "unstacks the batch into single samples")
    axis = node.get("axis", 0) % rank
    kind = kinds[0].at(kinds[0].axis - (axis < kinds[0].axis))
    last = axis == rank - 1
    return [
        dataclasses.replace(kind, slope=(kind.slope[i],)) if last and len(kind.slope) > 1 else kind
        for i in range(len(node.outputs))
    ]


def _split(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    data, axis_operand = (1, 0) if node.op == "Split" else (0, 2)
    kind = kinds[data]
    if not kind.rows:
        if kind.form is Form.SIZE:
            return SIZE
        return kind if kind.coupled or kind.total else shared()
    axes = scope.axes(node.inputs[axis_operand], scope.rank(node.inputs[data]))
    if axes is None or len(kind.slope) > 1:
        return scope.couple(node, "splits the batch along an axis that cannot be inferred")
    if axes[0] != kind.axis:
        return kind
    if node.op == "Split" and kind.outer and kind.outer % len(node.outputs) == 0 and not kind.origin:
        return dataclasses.replace(kind, outer=kind.outer // len(node.outputs))
    return scope.couple(node, "splits the batch, so that some samples are treated differently from others")


@data_operands(1)
def _strided_slice(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    rank = scope.rank(node.inputs[0])
    parts = [scope.lengths(value) for value in node.inputs[1:3]]
    strides = scope.number(node.inputs[3])
    if rank is None or strides is None or None in parts:
        return _slice_of_unknown(scope, node, kinds, strides)
    lengths = [part[0] for part in parts if part is not None]
    varying = parts[0][1] | parts[1][1]  # type: ignore[index]  # neither is None
    index = list(zip(strided_index(dict(node.attrs), lengths[0], lengths[1], strides), map(bool, varying), strict=True))
    at = next((i for i, (item, _) in enumerate(index) if item is Ellipsis), len(index))
    used = sum(1 for item, _ in index if item is not None and item is not Ellipsis)
    index[at : at + 1] = [(slice(None), False)] * (rank - used)
    source, target = 0, 0
    result: Kind | None = None
    for item, varies in index:
        if item is None:
            target += 1
            continue
        if source == kinds[0].axis:
            result = _slice_batch_axis(scope, node, kinds[0], item, target, varies=varies)
        elif varies:
            return scope.couple(node, "slices another axis by the micro-batch's size")
        elif source == rank - 1 and len(kinds[0].slope) > 1:
            picked = kinds[0].slope[item]
            return kinds[0].sloped(picked if isinstance(item, slice) else (picked,))
        source += 1
        target += not isinstance(item, int)
    return result if result is not None else scope.couple(node, "slices the batch")


def _slice_of_unknown(scope: Scope, node: Node, kinds: Sequence[Kind], strides: Any | None) -> Kind:
    """Return the kind of a slice whose bounds are not known: its masks must say that it takes the whole batch axis."""
    kind = kinds[0]
    if any(operand.form is Form.SIZE for operand in kinds[1:]):
        return scope.couple(node, "slices by bounds that depend on the micro-batch's size and cannot be inferred")
    bit = 1 << kind.axis
    steps = strides is not None and (kind.axis >= len(strides) or strides[kind.axis] == 1)
    plain = steps and not any(node.get(mask, 0) for mask in ("ellipsis_mask", "new_axis_mask"))
    taken = node.get("begin_mask", 0) & bit and node.get("end_mask", 0) & bit
    shrunk = node.get("shrink_axis_mask", 0)
    if plain and taken and len(kind.slope) < 2:
        return kind.at(kind.axis - bin(shrunk & (bit - 1)).count("1"))
    return scope.couple(node, "slices the batch by bounds that cannot be inferred")


def _slice_batch_axis(scope: Scope, node: Node, kind: Kind, item: Any, target: int, *, varies: bool) -> Kind:
    """Return the kind of a slice of the batch axis; ``varies``: its bounds, but for 0, are multiples of its length."""
    if isinstance(item, slice) and item.step in (None, 1):
        if item.start in (None, 0) and item.stop is None:
            return kind.at(target)
        dims = scope.dims(node.inputs[0])
        length = None if dims is None else dims[kind.axis]
        if length is not None and varies and not kind.origin and not kind.slope:
            first, end, _ = item.indices(length)
            block = scope.batch * max(kind.inner, 1)
            if first % block == 0 and end % block == 0 and end > first:
                outer = (end - first) // block
                return dataclasses.replace(kind, axis=target, outer=outer if kind.outer else CONSTANT_ROWS)
    return scope.couple(node, "slices the batch, so that some samples are treated differently from others")


@data_operands(1)
def _slice(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    begin, size, dims = scope.lengths(node.inputs[1]), scope.lengths(node.inputs[2]), scope.dims(node.inputs[0])
    axis = kinds[0].axis
    if begin is None or size is None or dims is None or len(kinds[0].slope) > 1:
        return scope.couple(node, "slices the batch by bounds that cannot be inferred")
    varying = begin[1] | size[1]
    if any(varying[other] for other in range(len(dims)) if other != axis):
        return scope.couple(node, "slices another axis by the micro-batch's size")
    first, count = int(begin[0][axis]), int(size[0][axis])
    if first == 0 and (count == -1 or (varying[axis] and count == dims[axis])):
        return kinds[0]
    end = None if count == -1 else first + count
    return _slice_batch_axis(scope, node, kinds[0], slice(first, end, 1), axis, varies=bool(varying[axis]))


RULES = rule_of_each(
    {
        _unpack: "Unpack",
        _split: "Split SplitV",
        _strided_slice: "StridedSlice",
        _slice: "Slice",
    }
)
