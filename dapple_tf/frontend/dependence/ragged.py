"""Rules of ops of ragged and sparse tensors whose rows are samples.

Their values are entries that a mask chose (see ``frontend.composite``), and the number of the row of each value is the
position of its sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dapple_tf.frontend.dependence.kinds import Form, Kind, only_rows, rows, shared
from dapple_tf.frontend.dependence.operands import Rule
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.graph_passes.ir.graph import Node, Value


def reduce_rows(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of values that are reduced by the sample to which they belong (``unsorted_segment_sum``)."""
    values, row_ids, _ = kinds
    a_row_a_sample = (0, 1) in scope.batch_axes(Value(node.name))
    if a_row_a_sample and _of_equal_rows(values, row_ids) and not values.slope and row_ids.slope == (1,):
        return rows(0)
    return scope.couple(node, "sums samples by label, or combines entries by the positions of samples")


def _reduce(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    if not only_rows(kinds):
        return scope.couple(node, "combines totals over the batch") if any(k.total for k in kinds) else shared()
    return reduce_rows(scope, node, kinds) if kinds[1].slope else scope.couple(node, "combines samples by label")


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


def _sparse_to_dense(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    places, shape, values, default = kinds
    return _of_sparse_rows(scope, node, places, values, shape, default)


def _sparse_matmul(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    places, values, shape, other = kinds
    if node.get("adjoint_a", False):
        return scope.couple(node, "multiplies a sparse matrix whose columns are samples")
    return _of_sparse_rows(scope, node, places, values, shape, other)


def _of_sparse_rows(scope: Scope, node: Node, places: Kind, values: Kind, shape: Kind, other: Kind) -> Kind:
    kinds = [places, values, shape, other]
    if not only_rows(kinds):
        total = any(kind.total for kind in kinds)
        return scope.couple(node, "takes a sum over the batch as a sparse matrix") if total else shared()
    in_place = _of_equal_rows(values, places) and places.slope == (1, 0) and not values.slope
    if in_place and shape.form is Form.SIZE and other.shared:
        return rows(0)
    return scope.couple(node, "computes with a sparse matrix whose rows are not samples")


def _of_equal_rows(values: Kind, row_ids: Kind) -> bool:
    return values.rows and row_ids.rows and values.axis == row_ids.axis == 0 and values.layout == row_ids.layout


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "UnsortedSegmentMax": _reduce,
        "UnsortedSegmentMin": _reduce,
        "UnsortedSegmentProd": _reduce,
        "RaggedTensorToTensor": _pad,
        "SparseToDense": _sparse_to_dense,
        "SparseTensorDenseMatMul": _sparse_matmul,
    }
)
