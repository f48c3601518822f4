"""Rules of ops that move, repeat or join entries: the batch axis moves with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

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
from dapple_tf.frontend.dependence.operands import ALL, CONSTANT_ROWS, Rule, data_operands, equal_rows, whole_number
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.graph_passes.ir.graph import Node, Value


@data_operands(1)
def _transpose(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    rank = scope.rank(node.inputs[0])
    order = None if rank is None else scope.axes(node.inputs[1], rank)
    if order is None:
        return scope.couple(node, "transposes the batch by axes that cannot be inferred")
    if len(kinds[0].slope) > 1:
        return scope.couple(node, "transposes positions of samples")
    return kinds[0].at(order.index(kinds[0].axis))


@data_operands(None)
def _concat(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    data, found = kinds[:-1], only_rows(kinds)
    rank = scope.rank(Value(node.name))
    axes = scope.axes(node.inputs[-1], rank or 0)
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
    rank = scope.rank(node.inputs[0])
    axes = None if rank is None else scope.axes(node.inputs[-1], rank)
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
        numbers = scope.numbers.get(value)
        if kind.form in (Form.ROWS, Form.COUPLED):
            known = numbers is not None and all((number == numbers[0]).all() for number in numbers)
            known = known or node.op == "Rank"
            # A shape that could be inferred depends on no variable, even if the tensor does.
            trained = kind.trained and numbers is None
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


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "Transpose": _transpose,
        "ConjugateTranspose": _transpose,
        "ConcatV2": _concat,
        "Pack": _pack,
        "Tile": _tile,
        "BroadcastTo": _broadcast_to,
        "Fill": _fill,
        "Empty": _empty,
        "Pad": _pad,
        "PadV2": _pad,
        "MirrorPad": _pad,
        "ReverseV2": _reverse,
        "Roll": _reverse,
        "ReverseSequence": _reverse_sequence,
        "Shape": _shape,
        "ShapeN": _shape,
        "Size": _shape,
        "Rank": _shape,
        "Range": _range,
        "BroadcastArgs": _broadcast_args,
        "BroadcastGradientArgs": _broadcast_args,
        "SpaceToBatchND": _space_to_batch,
        "BatchToSpaceND": _space_to_batch,
    }
)
