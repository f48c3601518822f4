"""Rules of ops that pick entries by index, choose rows by data, sum rows by label, or take ragged or sparse rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from dapple_tf.frontend.dependence.elementwise import PAIRS_SHARED, POSITIONS_AS_NUMBERS
from dapple_tf.frontend.dependence.kinds import SIZE, Form, Kind, only_rows, rows, same_order, shared
from dapple_tf.frontend.dependence.operands import CONSTANT_ROWS, rule_of_each
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.graph_passes.analysis.layers import CAPTURED_INPUTS
from dapple_tf.graph_passes.ir.graph import Effect, Node, Value

_RESHAPING = frozenset({"Reshape", "Squeeze", "ExpandDims", "Identity"})
_DEEPEST = 8  # ops that are nested in a text of ``_expression``; a deeper value is written as its name


def _gather(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    source, index = kinds[0], kinds[1]
    ranks = [scope.rank(value) for value in node.inputs[:2]]
    batch_dims = node.get("batch_dims", 0)
    number = scope.number(node.inputs[2]) if node.op == "GatherV2" else None
    if (found := _gather_without_rows(scope, node, source, index)) is not None:
        return found
    if node.op == "ResourceGather":
        return index.plain().at(index.axis) if not index.slope else scope.couple(node, POSITIONS_AS_NUMBERS)
    if None in ranks or (node.op == "GatherV2" and number is None):
        return scope.couple(node, "picks entries of tensors of unknown rank")
    source_rank, index_rank = (int(r or 0) for r in ranks)
    axis = int(number) % source_rank if number is not None else 0
    if batch_dims < 0:
        batch_dims += index_rank
    if not source.rows:
        if index.slope:
            return scope.couple(node, POSITIONS_AS_NUMBERS)
        if index.axis < batch_dims:
            return scope.couple(node, PAIRS_SHARED)
        return index.at(axis + index.axis - batch_dims)
    if source.axis < min(batch_dims, axis):
        if index.rows and index.axis == source.axis and same_order([index, source]) and not index.slope:
            return (source if source.outer else index).plain()
        return scope.couple(node, "picks entries of other samples")
    if source.axis != axis:
        if index.form is Form.SIZE:
            return scope.couple(node, "picks entries by the size of the micro-batch")
        if index.rows:
            return scope.couple(node, "pairs each sample with others (it gathers by an index of every sample)")
        return source.at(source.axis + (index_rank - batch_dims - 1 if source.axis > axis else 0))
    # The gathered axis is the batch's: each index must point to the sample that it belongs to.
    if len(index.slope) == 1 and _names_own(source, index, index.slope[0]):
        return index.plain().at(axis + index.axis)
    return scope.couple(node, "picks samples of the batch by index")


def _gather_without_rows(scope: Scope, node: Node, source: Kind, index: Kind) -> Kind | None:
    """Return the kind of entries that are picked, where neither operand is rows, or the other one is a total."""
    if source.rows or index.rows:
        total = source.total or index.total
        why = "picks, by samples or for them, entries of a sum or mean over the batch"
        return scope.couple(node, why) if total else None
    if index.total:
        return scope.couple(node, "picks entries by a sum or mean over the batch")
    if source.total:
        why = "picks entries of a sum or mean over the batch by an index that depends on the batch"
        return source if index.shared else scope.couple(node, why)
    if Form.ROW_BOUNDS in (source.form, index.form):
        return source
    if Form.SIZE in (source.form, index.form):
        return SIZE
    return shared()


def _names_own(source: Kind, index: Kind, slope: int) -> bool:
    """Return whether an index with this slope, into the batch axis of ``source``, names each sample's own rows."""
    return index.rows and slope == source.inner and source.outer == 1 and not source.origin and not source.slope


def _gather_nd(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    source, index = kinds[0], kinds[1]
    if (found := _gather_without_rows(scope, node, source, index)) is not None:
        return found
    dims, index_rank = scope.dims(node.inputs[1]), scope.rank(node.inputs[1])
    if dims is None or dims[-1] is None or index_rank is None or node.get("batch_dims", 0):
        return scope.couple(node, "picks entries of tensors of unknown rank")
    depth = int(dims[-1])
    slopes = index.slope or (0,)
    wide = slopes * depth if len(slopes) == 1 else slopes
    if index.form is Form.SIZE:
        return scope.couple(node, "picks entries by the size of the micro-batch")
    if index.rows and index.axis == index_rank - 1:
        return scope.couple(node, "picks entries by an index that spans samples")
    if not source.rows:
        return scope.couple(node, POSITIONS_AS_NUMBERS) if any(wide) else index.plain()
    if source.axis >= depth:
        if index.rows:
            return scope.couple(node, "pairs each sample with others (it gathers by an index of every sample)")
        return source.at(source.axis - depth + index_rank - 1)
    others = [slope for axis, slope in enumerate(wide) if axis != source.axis]
    if _names_own(source, index, wide[source.axis]) and not any(others):
        return index.plain()
    return scope.couple(node, "picks samples of the batch by index")


def _crop(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of crops of images: each box must be of the image of its own sample."""
    images, boxes, index, size = kinds
    if not only_rows(kinds):
        return scope.couple(node, "crops a sum or mean over the batch") if any(k.total for k in kinds) else shared()
    aligned = boxes.rows and boxes.axis == 0 and same_order([boxes, index]) and not boxes.slope and size.shared
    if aligned and images.rows and not images.axis and index.slope and _names_own(images, index, index.slope[0]):
        return boxes if boxes.outer else index.plain()
    return scope.couple(node, "picks images of the batch by index")


def _one_hot(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    if kinds[0].slope:
        return scope.couple(node, "compares each sample's position with others (one_hot or eye of the batch's size)")
    if any(kind.form is Form.SIZE or kind.rows or kind.total for kind in kinds[1:]):
        return scope.couple(node, "makes one entry for each sample of the batch (one_hot or eye of the batch's size)")
    if kinds[0].form is Form.SIZE:
        return SIZE
    if not kinds[0].rows:
        return scope.couple(node, "compares a sum over the batch with others") if kinds[0].total else shared()
    rank = scope.rank(Value(node.name))
    axis = node.get("axis", -1)
    if rank is None:
        return scope.couple(node, "has an unknown rank")
    return kinds[0].at(kinds[0].axis + (axis % rank <= kinds[0].axis))


def _where(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of the coordinates of the true entries: rows that data chose, and positions."""
    if not kinds[0].rows:
        return scope.couple(node, "chooses by a sum or mean over the batch") if kinds[0].total else shared()
    rank = scope.rank(node.inputs[0])
    if rank is None or kinds[0].axis or kinds[0].outer not in (CONSTANT_ROWS, 1) or kinds[0].slope:
        return scope.couple(node, "chooses entries of a tensor whose first axis is not the batch")
    slope = (kinds[0].inner,) if rank == 1 else (kinds[0].inner, *[0] * (rank - 1))
    mask = node.inputs[0]
    while scope.graph.node(mask.node).op in _RESHAPING:  # the same entries in the same order
        mask = scope.graph.node(mask.node).inputs[0]
    entries = _all_entries(scope, mask)
    if entries is not None:
        return dataclasses.replace(rows(0, 1, entries // scope.batch), slope=slope)
    origin = _expression(scope, mask, _DEEPEST)
    return dataclasses.replace(rows(0, 1, 1), origin=origin, slope=slope)


def _all_entries(scope: Scope, mask: Value) -> int | None:
    """Return the number of entries of a mask that chooses all of them, as ``tf.ones_like`` makes it; else None."""
    node = scope.graph.by_name.get(mask.node)
    dims = scope.dims(mask)
    if node is None or node.op != "Fill" or dims is None or None in dims:
        return None
    chosen = scope.number(node.inputs[1])
    return math.prod(int(dim or 0) for dim in dims) if chosen is not None and bool(chosen) else None


def _expression(scope: Scope, value: Value, depth: int) -> str:
    """Return the ops, constants and inputs that compute ``value``, as a text; tensors of equal text are equal."""
    node = scope.graph.by_name.get(value.node)
    if node is None or node.effect is not Effect.PURE or node.op in CAPTURED_INPUTS or not depth:
        return str(value)
    places = ("layer", "within", "batch_norm")
    attrs = ", ".join(f"{name}={item!r}" for name, item in node.attrs if name not in places)
    inputs = ", ".join(_expression(scope, operand, depth - 1) for operand in node.inputs)
    return f"{node.op}:{value.index}[{attrs}]({inputs})"


def _look_up(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a table's values for these keys; a key may be a vector, and so may a value."""
    _, keys, default = kinds
    if not only_rows(kinds):
        return scope.couple(node, "looks up a sum over the batch") if any(k.total for k in kinds) else shared()
    rank = scope.rank(Value(node.name))
    if rank is None:
        why = "looks up samples in a table whose lookups have no known shape (a mutable table)"
        return scope.couple(node, f"{why}; a tf.lookup.StaticHashTable has one")
    if not keys.rows or not default.shared or keys.slope or keys.axis >= rank:
        return scope.couple(
            node, "looks up positions in the batch, or takes several samples as one key, or a default for each sample"
        )
    return keys


def _segment_sum(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a sum of rows by label, as ``tf.math.unsorted_segment_sum`` computes it."""
    if not only_rows(kinds):
        return scope.couple(node, "sums a total over the batch by label") if any(k.total for k in kinds) else shared()
    data, labels, count = kinds
    if labels.slope:
        return _reduce_rows(scope, node, kinds)
    aligned = data.rows and labels.rows and data.axis == labels.axis == 0 and data.layout == labels.layout
    if aligned and not data.slope and count.shared:
        return Kind(Form.SUM)
    return scope.couple(node, "sums samples by label")


def _count_by_value(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    if any(kind.total for kind in kinds):
        return scope.couple(node, "counts values of a sum over the batch")
    if not only_rows(kinds):
        return shared()
    values, weights = kinds[0], kinds[2]
    weighted = weights.rows and weights.axis == values.axis and weights.layout == values.layout and not weights.slope
    unweighted = weights.shared and 0 in (scope.dims(node.inputs[2]) or ())
    rank = scope.rank(node.inputs[0])
    if not values.rows or not (weighted or unweighted) or not kinds[1].shared or values.slope or rank is None:
        return scope.couple(node, "counts values of the samples")
    if rank == 2 and values.axis == 0:  # each row by itself
        return values
    if rank == 1 and not node.get("binary_output", False):
        return Kind(Form.SUM)
    return scope.couple(node, "counts values of the samples")


def _scatter_nd(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of rows written to their own positions."""
    if node.op == "ScatterNd":
        index, updates, shape = kinds
        sizes = scope.batch_axes(Value(node.name))
        target = rows(0) if shape.form is Form.SIZE and sizes == [(0, 1)] else shared()
    else:
        target, index, updates = kinds
    if not only_rows([target, index, updates]):
        return scope.couple(node, "scatters sums over the batch") if any(k.total for k in kinds) else shared()
    dims = scope.dims(node.inputs[0 if node.op == "ScatterNd" else 1])
    depth = None if dims is None else dims[-1]
    wide = index.slope * (depth or 1) if len(index.slope) == 1 else index.slope
    plain = target.rows and target.axis == 0 and target.outer == 1 and not target.origin
    if plain and index.rows and index.axis == 0 and wide[:1] == (target.inner,) and not any(wide[1:]):
        own = updates.rows and updates.axis == 0 and updates.origin == index.origin
        return target if own else scope.couple(node, "writes samples to positions of others")
    if index.shared and updates.rows and target.rows and depth is not None and depth <= target.axis:
        rank = scope.rank(node.inputs[0 if node.op == "ScatterNd" else 1])
        aligned = rank is not None and updates.axis == target.axis - depth + rank - 1
        if aligned and same_order([updates, target]):
            return target if target.outer else dataclasses.replace(target, outer=updates.outer, inner=updates.inner)
    return scope.couple(node, "writes samples to positions of others")


def _ctc(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
    logits, index, values, lengths = kinds[:4]
    if not only_rows(kinds):
        return shared()
    aligned = logits.rows and logits.axis == 1 and logits.layout == (1, 1, "") and lengths.rows and lengths.axis == 0
    if aligned and index.rows and index.slope[:1] == (1,) and not any(index.slope[1:]) and values.rows:
        return [rows(0), rows(1)]
    return scope.couple(node, "computes a CTC loss whose labels cannot be matched with the samples")


# --- Ragged and sparse tensors whose rows are samples
# Their values are entries that a mask chose (see ``frontend.composite``), and the number of each value's row is the
# position of its sample.


def _reduce_rows(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of values that are reduced by the sample to which they belong (``unsorted_segment_sum``)."""
    values, row_ids, _ = kinds
    a_row_a_sample = (0, 1) in scope.batch_axes(Value(node.name))
    if a_row_a_sample and _of_equal_rows(values, row_ids) and not values.slope and row_ids.slope == (1,):
        return rows(0)
    return scope.couple(node, "sums samples by label, or combines entries by the positions of samples")


def _reduce(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    if not only_rows(kinds):
        return scope.couple(node, "combines totals over the batch") if any(k.total for k in kinds) else shared()
    return _reduce_rows(scope, node, kinds) if kinds[1].slope else scope.couple(node, "combines samples by label")


def _pad(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of ragged rows that are padded to a known length, as to that of the whole batch's longest."""
    values, default, samples, row_ids = kinds[1], kinds[2], kinds[3], kinds[-1]
    if not only_rows(kinds):
        return scope.couple(node, "pads a sum over the batch") if any(kind.total for kind in kinds) else shared()
    if len(kinds) != 5 or samples.form is not Form.SIZE or row_ids.slope != (1,):
        return scope.couple(node, "pads rows that cannot be assigned to samples")
    if not _of_equal_rows(values, row_ids) or values.slope or not default.shared:
        return scope.couple(node, "pads rows with values of other samples")
    dims = scope.dims(Value(node.name))
    if dims is None or dims[1] is None:
        return scope.couple(node, "pads rows to the longest of the micro-batch")
    return rows(0)


def _of_sparse_rows(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a sparse matrix as a dense one, or of its product with a dense one."""
    places, values, shape, other = kinds
    if node.op == "SparseToDense":
        places, shape, values, other = kinds
    if node.get("adjoint_a", False):
        return scope.couple(node, "multiplies a sparse matrix whose columns are samples")
    if not only_rows(kinds):
        total = any(kind.total for kind in kinds)
        return scope.couple(node, "takes a sum over the batch as a sparse matrix") if total else shared()
    in_place = _of_equal_rows(values, places) and places.slope == (1, 0) and not values.slope
    if in_place and shape.form is Form.SIZE and other.shared:
        return rows(0)
    return scope.couple(node, "computes with a sparse matrix whose rows are not samples")


def _of_equal_rows(values: Kind, row_ids: Kind) -> bool:
    return values.rows and row_ids.rows and values.axis == row_ids.axis == 0 and values.layout == row_ids.layout


RULES = rule_of_each(
    {
        _gather: "GatherV2 Gather ResourceGather",
        _gather_nd: "GatherNd ResourceGatherNd",
        _crop: "CropAndResize",
        _one_hot: "OneHot",
        _look_up: "LookupTableFindV2",
        _where: "Where",
        _segment_sum: "UnsortedSegmentSum",
        _count_by_value: "DenseBincount Bincount",
        _scatter_nd: "ScatterNd TensorScatterUpdate TensorScatterAdd TensorScatterSub",
        _ctc: "CTCLoss CTCLossV2",
        _reduce: "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd",
        _pad: "RaggedTensorToTensor",
        _of_sparse_rows: "SparseToDense SparseTensorDenseMatMul",
    }
)
