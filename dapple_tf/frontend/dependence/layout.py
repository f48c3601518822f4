"""Rules of ops that move, repeat, join or reshape entries: the batch axis moves with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from dapple_tf.frontend.dependence.elementwise import PAIRS_SHARED
from dapple_tf.frontend.dependence.kinds import (
    CONSTANT,
    SIZE,
    Form,
    Kind,
    first_rows,
    only_rows,
    rows,
    same_order,
    shared,
)
from dapple_tf.frontend.dependence.operands import (
    ALL,
    CONSTANT_ROWS,
    data_operands,
    equal_rows,
    rule_of_each,
    whole_number,
)
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.graph_passes.ir.graph import Node, Value

_UNKNOWN = -1  # ``inner`` of rows whose number of entries for each sample is known only when the step runs


@data_operands(1)
def _transpose(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    order = scope.axes(node.inputs[1], scope.rank(node.inputs[0]))
    if order is None:
        return scope.couple(node, "transposes the batch by axes that cannot be inferred")
    if len(kinds[0].slope) > 1:
        return scope.couple(node, "transposes positions of samples")
    return kinds[0].at(order.index(kinds[0].axis))


@data_operands(None)
def _concat(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    data, found = kinds[:-1], only_rows(kinds)
    rank = scope.rank(Value(node.name))
    axes = scope.axes(node.inputs[-1], rank)
    if rank is None or axes is None:
        return scope.couple(node, "concatenates along an axis that cannot be inferred")
    if len({kind.axis for kind in found}) > 1:
        return scope.couple(node, "concatenates tensors that have the batch on different axes")
    axis, first = found[0].axis, first_rows(found)
    if len(found) < len(data):
        return scope.couple(node, "concatenates the batch with rows that are no samples of it")
    if axes[0] != axis:
        if not same_order(found):
            return scope.couple(node, "concatenates rows of the batch that are in different orders")
        return dataclasses.replace(first, slope=_concat_slopes(scope, node, data, axes[0] == rank - 1))
    inner = first.inner if first.outer else 1
    if any(
        kind.origin or kind.slope or (kind.inner % inner if not kind.outer else kind.inner != inner) for kind in found
    ):
        return scope.couple(node, "concatenates along the batch axis")
    blocks = sum(kind.outer or kind.inner // inner for kind in found)  # equal rows fit any order
    return dataclasses.replace(first, outer=blocks, inner=inner)


def _concat_slopes(scope: Scope, node: Node, data: Sequence[Kind], last_axis: bool) -> tuple[int, ...]:
    """Return the slopes of the entries of the last axis after a concatenation along it."""
    if not any(kind.slope for kind in data):
        return ()
    if not last_axis:
        return data[0].slope
    slopes: list[int] = []
    for value, kind in zip(node.inputs, data, strict=False):
        dims = scope.dims(value) or (1,)
        width = int(dims[-1] or 1)
        slopes += kind.slope * width if len(kind.slope) == 1 else (kind.slope or (0,) * width)
    return tuple(slopes)


@data_operands(ALL)
def _pack(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    found = only_rows(kinds)
    rank = scope.rank(Value(node.name))
    if rank is None:
        return scope.couple(node, "stacks tensors of unknown rank")
    if len(found) < len(kinds):
        return scope.couple(node, PAIRS_SHARED)
    if len({kind.axis for kind in found}) > 1 or not same_order(found):
        return scope.couple(node, "stacks rows of the batch that are in different orders")
    new = node.get("axis", 0) % rank
    first = first_rows(found)
    slope: tuple[int, ...] = ()
    if any(kind.slope for kind in kinds):
        if new != rank - 1 or any(len(kind.slope) > 1 for kind in kinds):
            return scope.couple(node, "stacks positions of samples")
        slope = tuple((kind.slope or (0,))[0] for kind in kinds)
    return dataclasses.replace(first, axis=first.axis + (new <= first.axis), slope=slope)


@data_operands(1)
def _tile(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    multiples = scope.number(node.inputs[1])
    if multiples is None or kinds[0].slope:
        return scope.couple(node, "repeats the batch a number of times that cannot be inferred")
    times = int(multiples[kinds[0].axis])
    if times == 1:
        return kinds[0]
    if kinds[0].origin or times % scope.batch == 0:
        return scope.couple(node, "repeats the batch along its own axis")
    return dataclasses.replace(kinds[0], outer=kinds[0].outer * times)


@data_operands(1)
def _broadcast_to(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    before, after = scope.rank(node.inputs[0]), scope.rank(Value(node.name))
    if before is None or after is None:
        return scope.couple(node, "broadcasts to a shape that cannot be inferred")
    axis = kinds[0].axis + after - before
    others = [a for a, _ in scope.batch_axes(Value(node.name)) if a != axis]
    unknown = kinds[1].form is Form.SIZE and scope.lengths(node.inputs[1]) is None
    if others or unknown:
        return scope.couple(node, "pairs each sample with others (it broadcasts to the batch's size)")
    return kinds[0].at(axis)


@data_operands(1)
def _pad(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    paddings = scope.number(node.inputs[1])
    if paddings is None or paddings[kinds[0].axis].any() or kinds[0].slope:
        return scope.couple(node, "pads the batch axis, or an axis that cannot be inferred")
    return kinds[0]


@data_operands(1)
def _reverse(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    axes = scope.axes(node.inputs[-1], scope.rank(node.inputs[0]))
    if any(kind.form is Form.SIZE for kind in kinds[1:]):
        return scope.couple(node, "moves entries by the size of the micro-batch")
    if axes is None or kinds[0].axis in axes:
        return scope.couple(node, f"moves samples along the batch axis ({node.op})")
    return kinds[0] if len(kinds[0].slope) < 2 else scope.couple(node, "moves positions of samples")


def _reverse_sequence(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    found = only_rows(kinds)
    if not found:
        return next((kind for kind in kinds if kind.coupled or kind.total), shared())
    inside = kinds[0].rows and node.get("seq_dim", 0) != kinds[0].axis and not kinds[0].slope
    own = node.get("batch_dim", 0) == kinds[0].axis  # each sample has a length of its own
    if inside and (kinds[1].rows and kinds[1].layout == kinds[0].layout if own else kinds[1].shared):
        return kinds[0]
    return scope.couple(node, "moves samples along the batch axis (ReverseSequence)")


def _shape(scope: Scope, node: Node, kinds: Sequence[Kind]) -> list[Kind] | Kind:
    """Return the kinds of shapes: sizes of the micro-batch, where they depend on the batch."""
    found = []
    for i, value in enumerate(node.values()):
        kind = kinds[i] if i < len(kinds) else kinds[0]
        if kind.form in (Form.ROWS, Form.COUPLED):
            known = node.op == "Rank" or scope.number(value) is not None
            # A shape that could be inferred depends on no variable, even if the tensor does.
            trained = kind.trained and value not in scope.numbers
            found.append(CONSTANT if known else dataclasses.replace(SIZE, trained=trained))
        else:
            found.append(CONSTANT)
    return found


def _broadcast_args(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of the shape that two shapes broadcast to, or of the axes along which gradients are summed."""
    if any(kind.rows or kind.total for kind in kinds):
        return scope.couple(node, "broadcasts shapes that depend on samples")
    return SIZE if any(kind.form is Form.SIZE for kind in kinds) else shared()


def _range(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    if any(kind.rows or kind.total for kind in kinds):
        return scope.couple(node, "makes a range whose limits depend on samples")
    if all(kind.shared for kind in kinds):
        return shared()
    start, end, step = scope.number(node.inputs[0]), scope.lengths(node.inputs[1]), scope.number(node.inputs[2])
    if (
        start is None
        or int(start)
        or step is None
        or int(step) < 1
        or end is None
        or int(end[0]) % (scope.batch * step)
    ):
        return scope.couple(node, "makes a range over the batch that does not start at 0, or cannot be inferred")
    return dataclasses.replace(rows(0, 1, int(end[0]) // (scope.batch * step)), slope=(int(end[0]) // scope.batch,))


def _fill(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
    dims, value = kinds
    if dims.coupled or value.coupled:
        return dims if dims.coupled else value
    if not dims.shared and dims.form is not Form.SIZE:
        return scope.couple(node, "makes a tensor whose shape depends on samples")
    if dims.form is Form.SIZE:
        value = whole_number(scope, node, 1, value)
        if value.coupled:
            return value
        return (
            equal_rows(scope, node) if value.shared else scope.couple(node, "fills a tensor with a sum over the batch")
        )
    return value


def _empty(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a tensor that is filled later."""
    if kinds[0].form is Form.SIZE:
        found = scope.lengths(node.inputs[0])
        axes = [] if found is None else [axis for axis, varies in enumerate(found[1]) if varies]
        if len(axes) == 1 and found is not None:
            return rows(axes[0], CONSTANT_ROWS, int(found[0][axes[0]]) // scope.batch)
    return shared() if kinds[0].shared else scope.couple(node, "makes a tensor whose batch axis cannot be inferred")


def _space_to_batch(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    if not kinds[0].rows:
        return scope.couple(node, "moves blocks of a sum or mean") if kinds[0].total else shared()
    blocks = scope.number(node.inputs[1])
    if blocks is None or kinds[0].axis or kinds[0].slope or kinds[0].origin:
        return scope.couple(node, "moves blocks into the batch axis")
    count = int(blocks.prod())
    if node.op == "SpaceToBatchND":
        return dataclasses.replace(kinds[0], outer=kinds[0].outer * count)
    if kinds[0].outer % count:
        return scope.couple(node, "moves samples out of the batch axis")
    return dataclasses.replace(kinds[0], outer=kinds[0].outer // count)


# --- Ops that give entries another shape in the same order, and ops that add or remove axes


def _reshaped(scope: Scope, node: Node, source: Value, kind: Kind, target: Value) -> Kind:
    """Return the kind of rows whose entries stay in row-major order in another shape."""
    before, after = scope.dims(source), _target_dims(scope, node, target)
    if kind.origin:
        return _reshaped_chosen(scope, node, kind, before, after)
    if before is not None and after is not None and None in before and kind.axis == 0 and kind.outer == 1:
        return _reshaped_unknown(scope, node, kind, before, after)
    if before is None or after is None or None in before or after.count(None) > 1 or 0 in before:
        return scope.couple(node, "reshapes the batch to a shape that cannot be inferred")
    first = [int(dim or 0) for dim in before]
    rest = math.prod(dim for dim in after if dim is not None)
    last = [math.prod(first) // max(rest, 1) if dim is None else dim for dim in after]
    stride = max(kind.inner, 1) * math.prod(first[kind.axis + 1 :])
    for axis, length in enumerate(last):
        inside = math.prod(last[axis + 1 :])
        if stride % inside or inside * length < stride * scope.batch:
            continue
        inner = stride // inside
        if length % (inner * scope.batch) == 0:
            outer = length // (inner * scope.batch)
            if not kind.outer and outer == 1 and inner == kind.inner:  # still equal
                outer = CONSTANT_ROWS
            slope = kind.slope if len(kind.slope) < 2 or last[-1:] == first[-1:] else ()
            if slope != kind.slope:
                return scope.couple(node, "reshapes positions of samples")
            return dataclasses.replace(kind, axis=axis, outer=outer, inner=inner)
    return scope.couple(node, "reshapes the batch so that no axis of the result separates the samples")


def _target_dims(scope: Scope, node: Node, target: Value) -> tuple[int | None, ...] | None:
    found = scope.lengths(node.inputs[1]) if len(node.inputs) > 1 else None
    if found is None:
        return scope.dims(target)
    return tuple(int(length) if length >= 0 else None for length in found[0])


def _reshaped_unknown(
    scope: Scope, node: Node, kind: Kind, before: Sequence[int | None], after: Sequence[int | None]
) -> Kind:
    """Return the kind of rows with axes of unknown length, which are merged into the batch axis or split from it."""
    kept = len(after) - 1
    if not kind.slope and kept < len(before) and list(after[1:]) == list(before[len(before) - kept :]):
        whole = kept == len(before) - 1
        return kind if whole else dataclasses.replace(kind, inner=_UNKNOWN)
    if not kind.slope and after[0] == scope.batch:
        return dataclasses.replace(kind, inner=1)
    return scope.couple(node, "reshapes the batch to a shape that cannot be inferred")


def _reshaped_chosen(
    scope: Scope, node: Node, kind: Kind, before: Sequence[int | None] | None, after: Sequence[int | None] | None
) -> Kind:
    """Return the kind of rows that data chose: only axes of length 1 may be added or removed."""
    if before is None or after is None:
        return scope.couple(node, "reshapes chosen rows to a shape that cannot be inferred")
    kept_before = [axis for axis, dim in enumerate(before) if dim != 1]
    kept_after = [axis for axis, dim in enumerate(after) if dim != 1]
    same = [before[a] for a in kept_before] == [after[b] for b in kept_after]
    if not same or kind.axis not in kept_before:
        known = kind.axis == 0 and after[:1] == (None,) and None not in after[1:] and None not in before[1:]
        if known and math.prod(int(d or 1) for d in before[1:]) == math.prod(int(d or 1) for d in after[1:]):
            return kind if not kind.slope else scope.couple(node, "reshapes positions of samples")
        return scope.couple(node, "reshapes rows that were chosen by their values (tf.boolean_mask, tf.where)")
    return dataclasses.replace(kind, axis=kept_after[kept_before.index(kind.axis)])


@data_operands(1)
def _reshape(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    return _reshaped(scope, node, node.inputs[0], kinds[0], Value(node.name))


@data_operands(1)
def _squeeze(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    rank, after = scope.rank(node.inputs[0]), scope.rank(Value(node.name))
    named = node.get("squeeze_dims", ())
    if rank is None:
        return scope.couple(node, "squeezes a tensor of unknown rank")
    removed = {axis % rank for axis in named}
    if not named:
        removed = {axis for axis, dim in enumerate(scope.dims(node.inputs[0]) or ()) if dim == 1}
        if scope.nested:
            return scope.couple(
                node,
                "squeezes a single sample's batch axis too, in a nested function without axes: name the axes",
            )
        scope.squeezed[node.name] = tuple(sorted(removed))
    if kinds[0].axis in removed or (after is not None and after != rank - len(removed)):
        return scope.couple(node, "squeezes the batch axis")
    slope = kinds[0].slope
    if len(slope) > 1 and rank - 1 in removed:
        return scope.couple(node, "squeezes positions of samples")
    return kinds[0].at(kinds[0].axis - sum(axis < kinds[0].axis for axis in removed))


@data_operands(1)
def _expand_dims(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    rank = scope.rank(node.inputs[0])
    axes = None if rank is None else scope.axes(node.inputs[1], rank + 1)
    if axes is None or rank is None or (len(kinds[0].slope) > 1 and axes[0] == rank):
        return scope.couple(node, "adds an axis that cannot be inferred")
    return kinds[0].at(kinds[0].axis + (axes[0] <= kinds[0].axis))


RULES = rule_of_each(
    {
        _transpose: "Transpose ConjugateTranspose",
        _concat: "ConcatV2",
        _pack: "Pack",
        _tile: "Tile",
        _broadcast_to: "BroadcastTo",
        _fill: "Fill",
        _empty: "Empty",
        _pad: "Pad PadV2 MirrorPad",
        _reverse: "ReverseV2 Roll",
        _reverse_sequence: "ReverseSequence",
        _shape: "Shape ShapeN Size Rank",
        _range: "Range",
        _broadcast_args: "BroadcastArgs BroadcastGradientArgs",
        _space_to_batch: "SpaceToBatchND BatchToSpaceND",
        _reshape: "Reshape",
        _squeeze: "Squeeze",
        _expand_dims: "ExpandDims",
    }
)
