"""Rules of ops that move, repeat or join entries: the batch axis moves with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dapple_tf.frontend.dependence.elementwise import add_totals
from dapple_tf.frontend.dependence.kinds import CONSTANT, SIZE, Form, Kind, rows, shared
from dapple_tf.frontend.dependence.numbers import strided_index
from dapple_tf.frontend.dependence.scope import Scope, attr
from graph_passes.ir.graph import Node, Value

Rule = Callable[[Scope, Node, Sequence[Kind]], Kind | list[Kind]]

UNKNOWN = -1
"""``inner`` of rows that have a number of entries for each sample which is known only when the step runs."""

CONSTANT_ROWS = 0
"""``outer`` of rows that are all equal: they belong to any samples."""


def data_operands(count: int | None = 1) -> Callable[[Rule], Rule]:
    """Make a rule for rows into one for all kinds: the first ``count`` operands are data, the others sizes or axes.

    None: all operands but the last are data. Shared operands give a shared result; sums and means stay what they are,
    since the op is linear.
    """

    def wrap(rule: Rule) -> Rule:
        def full(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
            data = list(kinds[:count] if count is not None else kinds[:-1])
            if stopped := next((kind for kind in kinds if kind.coupled), None):
                return stopped
            if any(kind.rows for kind in kinds[len(data) :]):
                return scope.couple(node, f"chooses entries by data of the batch ({node.op})")
            if any(kind.rows for kind in data):
                if any(kind.total for kind in kinds):
                    return scope.couple(node, f"combines samples with a sum or mean over the batch ({node.op})")
                return rule(scope, node, kinds)
            if any(kind.total or kind.form is Form.SHARE for kind in data):
                return add_totals(scope, node, data) if len(data) > 1 else data[0]
            if any(kind.form is Form.SIZE for kind in kinds):
                return _filled(scope, node) if all(kind.shared for kind in data) else SIZE
            return shared()

        return full

    return wrap


def _filled(scope: Scope, node: Node) -> Kind:
    """Return the kind of equal rows, made of shared values and a size."""
    lengths = scope.number(node.inputs[0 if node.op == "Fill" else 1])
    if node.op in ("Fill", "BroadcastTo", "Reshape") and lengths is not None:
        axes = [(i, int(n) // scope.batch) for i, n in enumerate(lengths) if n > 0 and n % scope.batch == 0]
    else:
        axes = scope.batch_axes(Value(node.name))
    if len(axes) != 1:
        return scope.couple(node, f"makes a tensor of the batch's size in an unknown way ({node.op})")
    return rows(axes[0][0], CONSTANT_ROWS, axes[0][1])


def only_rows(kinds: Sequence[Kind]) -> list[Kind]:
    """Return the kinds that are rows."""
    return [kind for kind in kinds if kind.rows]


def reshaped(scope: Scope, node: Node, source: Value, kind: Kind, target: Value) -> Kind:
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
            outer = length // (inner * scope.batch) if kind.outer else CONSTANT_ROWS
            slope = kind.slope if len(kind.slope) < 2 or last[-1:] == first[-1:] else ()
            if slope != kind.slope:
                return scope.couple(node, "reshapes positions of samples")
            return dataclasses.replace(kind, axis=axis, outer=outer, inner=inner)
    if not kind.outer:  # all rows are equal
        axes = [(axis, length // scope.batch) for axis, length in enumerate(last) if length % scope.batch == 0]
        if len(axes) == 1:
            return rows(axes[0][0], CONSTANT_ROWS, axes[0][1], trained=kind.trained)
    return scope.couple(node, "reshapes the batch so that samples share an entry of an axis with others")


def _target_dims(scope: Scope, node: Node, target: Value) -> tuple[int | None, ...] | None:
    lengths = scope.number(node.inputs[1]) if len(node.inputs) > 1 else None
    if lengths is None:
        return scope.dims(target)
    return tuple(int(length) if length >= 0 else None for length in lengths)


def _reshaped_unknown(
    scope: Scope, node: Node, kind: Kind, before: Sequence[int | None], after: Sequence[int | None]
) -> Kind:
    """Return the kind of rows with axes of unknown length, which the batch axis takes in or gives away."""
    kept = len(after) - 1
    if not kind.slope and kept < len(before) and list(after[1:]) == list(before[len(before) - kept :]):
        whole = kept == len(before) - 1
        return kind if whole else dataclasses.replace(kind, inner=UNKNOWN)
    if not kind.slope and after[0] == scope.batch:
        return dataclasses.replace(kind, inner=1)
    return scope.couple(node, "reshapes the batch to a shape that cannot be inferred")


def _reshaped_chosen(
    scope: Scope, node: Node, kind: Kind, before: Sequence[int | None] | None, after: Sequence[int | None] | None
) -> Kind:
    """Return the kind of rows that data chose: only axes of length 1 may come and go."""
    if before is None or after is None:
        return scope.couple(node, "reshapes chosen rows to a shape that cannot be inferred")
    kept_before = [axis for axis, dim in enumerate(before) if dim != 1]
    kept_after = [axis for axis, dim in enumerate(after) if dim != 1]
    same = [before[a] for a in kept_before] == [after[b] for b in kept_after]
    if not same or kind.axis not in kept_before:
        known = kind.axis == 0 and after[:1] == (None,) and None not in after[1:] and None not in before[1:]
        if known and math.prod(int(d or 1) for d in before[1:]) == math.prod(int(d or 1) for d in after[1:]):
            return kind if not kind.slope else scope.couple(node, "reshapes positions of samples")
        return scope.couple(node, "reshapes rows that data chose")
    return dataclasses.replace(kind, axis=kept_after[kept_before.index(kind.axis)])


@data_operands(1)
def _reshape(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    return reshaped(scope, node, node.inputs[0], kinds[0], Value(node.name))


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
    axis, first = found[0].axis, next((kind for kind in found if kind.outer), found[0])
    if axes[0] != axis:
        if len({kind.layout for kind in found if kind.outer}) > 1:
            return scope.couple(node, "concatenates rows of the batch that are in different orders")
        return dataclasses.replace(first, slope=_concat_slopes(scope, node, data, axes[0] == rank - 1))
    if len(found) < len(data):
        return scope.couple(node, "concatenates the batch with rows that are no samples of it")
    if any(kind.origin or kind.inner != first.inner or kind.slope or not kind.outer for kind in found):
        return scope.couple(node, "concatenates along the batch axis")
    return dataclasses.replace(first, outer=sum(kind.outer for kind in found))


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


@data_operands(100_000)
def _pack(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    found = only_rows(kinds)
    rank = scope.rank(Value(node.name))
    if rank is None:
        return scope.couple(node, "stacks tensors of unknown rank")
    if len({kind.axis for kind in found}) > 1 or len({kind.layout for kind in found if kind.outer}) > 1:
        return scope.couple(node, "stacks rows of the batch that are in different orders")
    new = attr(node, "axis", 0) % rank
    first = next((kind for kind in found if kind.outer), found[0])
    slope: tuple[int, ...] = ()
    if any(kind.slope for kind in kinds):
        if new != rank - 1 or any(len(kind.slope) > 1 for kind in kinds):
            return scope.couple(node, "stacks positions of samples")
        slope = tuple((kind.slope or (0,))[0] for kind in kinds)
    return dataclasses.replace(first, axis=first.axis + (new <= first.axis), slope=slope)


@data_operands(1)
def _unpack(scope: Scope, node: Node, kinds: Sequence[Kind]) -> list[Kind] | Kind:
    rank = scope.rank(node.inputs[0])
    if rank is None or attr(node, "axis", 0) % rank == kinds[0].axis:
        return scope.couple(node, "takes samples of the batch apart")
    axis = attr(node, "axis", 0) % rank
    kind = kinds[0].at(kinds[0].axis - (axis < kinds[0].axis))
    last = axis == rank - 1
    return [
        dataclasses.replace(kind, slope=(kind.slope[i],)) if last and len(kind.slope) > 1 else kind
        for i in range(len(node.outputs))
    ]


def _split_rule(data: int, axis_operand: int) -> Rule:
    def rule(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
        kind = kinds[data]
        if not kind.rows:
            if kind.form is Form.SIZE:
                return SIZE
            return kind if kind.coupled or kind.total else shared()
        rank = scope.rank(node.inputs[data])
        axes = None if rank is None else scope.axes(node.inputs[axis_operand], rank)
        if axes is None or len(kind.slope) > 1:
            return scope.couple(node, "splits the batch along an axis that cannot be inferred")
        if axes[0] != kind.axis:
            return kind
        if node.op == "Split" and kind.outer and kind.outer % len(node.outputs) == 0 and not kind.origin:
            return dataclasses.replace(kind, outer=kind.outer // len(node.outputs))
        return scope.couple(node, "splits the batch, so that some samples are treated otherwise than others")

    return rule


@data_operands(1)
def _strided_slice(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    rank = scope.rank(node.inputs[0])
    parts = [scope.number(value) for value in node.inputs[1:]]
    if rank is None or any(part is None for part in parts):
        return _slice_of_unknown(scope, node, kinds[0])
    index = strided_index(dict(node.attrs), *parts)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        used = sum(1 for item in index if item is not None and item is not Ellipsis)
        index[at : at + 1] = [slice(None)] * (rank - used)
    source, target = 0, 0
    result: Kind | None = None
    for item in [*index, *[slice(None)] * (rank - sum(1 for item in index if item is not None))]:
        if item is None:
            target += 1
            continue
        if source == kinds[0].axis:
            result = _slice_batch_axis(scope, node, kinds[0], item, target)
        elif source == rank - 1 and len(kinds[0].slope) > 1:
            return _slice_positions(scope, node, kinds[0], item)
        source += 1
        target += not isinstance(item, int)
    return result if result is not None else scope.couple(node, "slices the batch")


def _slice_positions(scope: Scope, node: Node, kind: Kind, item: Any) -> Kind:
    picked = kind.slope[item]
    slope = (picked,) if isinstance(picked, int) else tuple(picked)
    return dataclasses.replace(kind, slope=slope if any(slope) else ())


def _slice_of_unknown(scope: Scope, node: Node, kind: Kind) -> Kind:
    """Return the kind of a slice whose bounds are not known: the batch axis must be taken whole by its masks."""
    bit = 1 << kind.axis
    plain = not any(attr(node, mask, 0) for mask in ("ellipsis_mask", "new_axis_mask"))
    taken = attr(node, "begin_mask", 0) & bit and attr(node, "end_mask", 0) & bit
    shrunk = attr(node, "shrink_axis_mask", 0)
    if plain and taken and len(kind.slope) < 2:
        return kind.at(kind.axis - bin(shrunk & (bit - 1)).count("1"))
    return scope.couple(node, "slices the batch by bounds that cannot be inferred")


def _slice_batch_axis(scope: Scope, node: Node, kind: Kind, item: Any, target: int) -> Kind:
    if isinstance(item, slice):
        if item == slice(None, None, 1) or item == slice(None):
            return kind.at(target)
        dims = scope.dims(node.inputs[0])
        length = None if dims is None else dims[kind.axis]
        if length is not None and item.step == 1 and kind.outer and not kind.origin and not kind.slope:
            first, end, _ = item.indices(length)
            block = scope.batch * kind.inner
            if first % block == 0 and end % block == 0 and end > first:
                return dataclasses.replace(kind, axis=target, outer=(end - first) // block)
        if not kind.outer and length is not None and item.step == 1:
            return kind.at(target)
    return scope.couple(node, "slices the batch, so that some samples are treated otherwise than others")


@data_operands(1)
def _slice(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    begin, size, dims = scope.number(node.inputs[1]), scope.number(node.inputs[2]), scope.dims(node.inputs[0])
    axis = kinds[0].axis
    if begin is None or size is None or dims is None or len(kinds[0].slope) > 1:
        return scope.couple(node, "slices the batch by bounds that cannot be inferred")
    if int(begin[axis]) == 0 and int(size[axis]) in (-1, dims[axis]):
        return kinds[0]
    end = dims[axis] if int(size[axis]) == -1 else int(begin[axis]) + int(size[axis])
    return _slice_batch_axis(scope, node, kinds[0], slice(int(begin[axis]), end, 1), axis)


@data_operands(1)
def _squeeze(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    rank, after = scope.rank(node.inputs[0]), scope.rank(Value(node.name))
    named = attr(node, "squeeze_dims", ())
    if rank is None:
        return scope.couple(node, "squeezes a tensor of unknown rank")
    removed = {axis % rank for axis in named}
    if not named:
        removed = {axis for axis, dim in enumerate(scope.dims(node.inputs[0]) or ()) if dim == 1}
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
    if others:
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
    if axes is None or kinds[0].axis in axes:
        return scope.couple(node, f"moves samples along the batch axis ({node.op})")
    return kinds[0] if len(kinds[0].slope) < 2 else scope.couple(node, "moves positions of samples")


def _reverse_sequence(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    found = only_rows(kinds)
    if not found:
        return next((kind for kind in kinds if kind.coupled or kind.total), shared())
    inside = kinds[0].rows and attr(node, "seq_dim", 0) != kinds[0].axis and not kinds[0].slope
    if inside and (kinds[1].shared or (kinds[1].rows and attr(node, "batch_dim", 0) == kinds[0].axis)):
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
            # A shape that is known depends on no value, also where the tensor does.
            trained = kind.trained and numbers is None
            found.append(CONSTANT if known else dataclasses.replace(SIZE, trained=trained))
        else:
            found.append(CONSTANT)
    return found


def _range(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    stopped = next((kind for kind in kinds if kind.coupled or kind.rows or kind.total), None)
    if stopped is not None:
        return stopped if stopped.coupled else scope.couple(node, "counts to a number that depends on samples")
    if all(kind.shared for kind in kinds):
        return shared()
    start, step = scope.number(node.inputs[0]), scope.number(node.inputs[2])
    axes = scope.batch_axes(Value(node.name))
    if start is None or int(start) or step is None or len(axes) != 1:
        return scope.couple(node, "counts over the batch from an unknown start")
    inner = axes[0][1]
    return dataclasses.replace(rows(0, 1, inner), slope=(int(step) * inner,))


def _fill(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
    dims, value = kinds
    if dims.coupled or value.coupled:
        return dims if dims.coupled else value
    if not dims.shared and dims.form is not Form.SIZE:
        return scope.couple(node, "makes a tensor whose shape depends on samples")
    if dims.form is Form.SIZE:
        return _filled(scope, node) if value.shared else scope.couple(node, "fills a tensor with a sum over the batch")
    return value


def _empty(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a tensor that is filled later."""
    if kinds[0].form is Form.SIZE:
        lengths = scope.number(node.inputs[0])
        axes = [] if lengths is None else [i for i, n in enumerate(lengths) if n > 0 and n % scope.batch == 0]
        if len(axes) == 1 and lengths is not None:
            return rows(axes[0], CONSTANT_ROWS, int(lengths[axes[0]]) // scope.batch)
    return shared() if kinds[0].shared else scope.couple(node, "makes a tensor of the batch's size in an unknown way")


def _space_to_batch(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    if not kinds[0].rows:
        return kinds[0] if kinds[0].coupled else shared()
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
        "Reshape": _reshape,
        "Transpose": _transpose,
        "ConjugateTranspose": _transpose,
        "ConcatV2": _concat,
        "Pack": _pack,
        "Unpack": _unpack,
        "Split": _split_rule(1, 0),
        "SplitV": _split_rule(0, 2),
        "StridedSlice": _strided_slice,
        "Slice": _slice,
        "Squeeze": _squeeze,
        "ExpandDims": _expand_dims,
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
        "SpaceToBatchND": _space_to_batch,
        "BatchToSpaceND": _space_to_batch,
    }
)
