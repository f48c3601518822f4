"""Rules of ops that give entries another shape in the same order, and of ops that add or remove axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dapple_tf.frontend.dependence.kinds import Kind
from dapple_tf.frontend.dependence.operands import CONSTANT_ROWS, Rule, data_operands
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.graph_passes.ir.graph import Node, Value

UNKNOWN = -1
"""``inner`` of rows whose number of entries for each sample is known only when the step runs."""


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
        return kind if whole else dataclasses.replace(kind, inner=UNKNOWN)
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
    return reshaped(scope, node, node.inputs[0], kinds[0], Value(node.name))


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


RULES: Mapping[str, Rule] = MappingProxyType({"Reshape": _reshape, "Squeeze": _squeeze, "ExpandDims": _expand_dims})
