"""Rules of ops that reduce or contract axes, and of ops that work on each entry of axis 0 by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dapple_tf.frontend.dependence.elementwise import PAIRS_SHARED, scale_total
from dapple_tf.frontend.dependence.kinds import SIZE, Form, Kind, first_rows, only_rows, same_order, shared
from dapple_tf.frontend.dependence.operands import Rule
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.frontend.names import name_set
from dapple_tf.graph_passes.ir.graph import Node, Value

REDUCTIONS = frozenset({"Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm"})
COMBINED_BY: Mapping[str, str] = MappingProxyType(
    {"Max": "max", "Min": "min", "Prod": "product", "All": "all", "Any": "any"}
)
"""The operation that combines a reduction's values on disjoint rows (see ``COMBINES``); sums have their own kind."""
_ALONG_AXIS = frozenset({"ArgMax", "ArgMin", "Cumsum", "Cumprod", "CumulativeLogsumexp"})
_LAST_AXIS = frozenset({"Softmax", "LogSoftmax", "TopKV2", "TopK", "InTopKV2", "NthElement"})
# Ops whose first axis holds independent entries; their other operands are shared, sizes, or rows of the same axis.
_ENTRY_BY_ENTRY = name_set(
    "AvgPool AvgPool3D AvgPoolGrad AvgPool3DGrad Conv2D Conv2DBackpropInput Conv3D Conv "
    "Conv3DBackpropInputV2 DepthToSpace DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput "
    "Dilation2D ExtractImagePatches FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 FusedBatchNormGradV3 "
    "HSVToRGB ImageProjectiveTransformV2 ImageProjectiveTransformV3 LRN LRNGrad MaxPool MaxPool3D MaxPoolGrad "
    "MaxPool3DGrad MaxPoolV2 MaxPoolGradV2 RGBToHSV ResizeArea ResizeBicubic ResizeBilinear ResizeBilinearGrad "
    "ResizeBicubicGrad ResizeNearestNeighbor ResizeNearestNeighborGrad AdjustContrastv2 AdjustHue "
    "AdjustSaturation SpaceToDepth SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits"
)
# The operands of these ops that hold entries, by position; of the others of _ENTRY_BY_ENTRY it is the first one.
_ENTRIES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad"), (1,)),
        **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"), (2,)),
        **dict.fromkeys(("FusedBatchNormGradV3", "ResizeBilinearGrad", "ResizeBicubicGrad"), (0, 1)),
        **dict.fromkeys(("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"), (0, 1)),
        **dict.fromkeys(("ImageProjectiveTransformV2", "ImageProjectiveTransformV3"), (0, 1)),
        **dict.fromkeys(("LRNGrad", "MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradV2"), (0, 1, 2)),
    }
)
# Ops on the last two axes; all axes before them hold independent matrices.
_MATRICES = name_set(
    "Cholesky LogMatrixDeterminant MatrixBandPart MatrixDeterminant MatrixDiag MatrixDiagPart MatrixDiagPartV2 "
    "MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixInverse MatrixSetDiagV3 MatrixSolve MatrixTriangularSolve "
    "MatrixExponential Qr SelfAdjointEigV2 Svd CholeskyGrad FFT IFFT RFFT IRFFT FFT2D IFFT2D"
)


def _reduce(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    kind = kinds[0]
    if kinds[1].rows or kinds[1].total:
        return scope.couple(node, "reduces axes that depend on samples")
    if not kind.rows:
        if kind.total and node.op not in ("Sum", "Mean"):
            return scope.couple(node, f"applies {node.op} to a sum or mean over the batch, which is not linear")
        return kind if kind.total or kind.form in (Form.SIZE, Form.ROW_BOUNDS) else shared()
    rank = scope.rank(node.inputs[0])
    axes = None if rank is None else scope.axes(node.inputs[1], rank)
    if rank is None or axes is None:
        return scope.couple(node, "reduces axes that cannot be inferred")
    if kind.slope:
        return scope.couple(node, "computes with positions of samples in the batch (tf.range of its size)")
    if kind.axis not in axes:
        return kind if node.get("keep_dims", False) else kind.at(kind.axis - sum(a < kind.axis for a in axes))
    return _reduce_batch(scope, node, kind, axes)


def reduces_batch_axis(scope: Scope, node: Node, kind: Kind) -> bool:
    """Return whether the reduction runs over the batch axis, of values that are no positions of samples."""
    rank = scope.rank(node.inputs[0])
    axes = None if rank is None else scope.axes(node.inputs[1], rank)
    return kind.rows and not kind.slope and axes is not None and kind.axis in axes


def _reduce_batch(scope: Scope, node: Node, kind: Kind, axes: Sequence[int]) -> Kind:
    if node.op == "Sum":
        return Kind(Form.SUM)
    whole_numbers = not node.outputs[0].dtype.differentiable  # their mean is rounded
    if node.op == "Mean" and not kind.origin and not whole_numbers:
        return Kind(Form.MEAN)
    if node.op == "Mean" and not whole_numbers:
        dims = scope.graph.type_of(node.inputs[0]).shape.dims or ()
        here = any(k.origin == kind.origin and scope.graph.node(v.node).op == "Where" for v, k in scope.kinds.items())
        if scope.nested or not here or scope.graph.node(node.inputs[1].node).op != "Const":
            return scope.couple(node, "takes the mean over rows that a nested function chose, or over computed axes")
        if all(axis == kind.axis or (axis < len(dims) and (dims[axis] or 0) > 0) for axis in axes):
            return Kind(Form.SUM, mixed=True)
    return scope.couple(node, f"takes the {node.op.lower()} over the batch")


def _l2_loss(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    if kinds[0].total or kinds[0].slope:
        return scope.couple(node, "squares a sum or mean over the batch, or positions of samples")
    return Kind(Form.SUM) if kinds[0].rows else shared()


def _matmul(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    first, second = kinds[:2]
    if not first.rows and not second.rows:
        return _multilinear(scope, node, kinds)
    ranks = [scope.rank(value) for value in node.inputs[:2]]
    if None in ranks or any(kind.slope for kind in kinds):
        return scope.couple(node, "multiplies matrices of unknown rank, or positions of samples")
    rank = max(int(r or 0) for r in ranks)
    flip_first = node.get("transpose_a", False) or node.get("adj_x", False)
    flip_second = node.get("transpose_b", False) or node.get("adj_y", False)
    # Axis labels of the operands, counted from the right end of the result: -1 column, -2 row; 0 is contracted.
    labels: list[int | None] = []
    for kind, r, flip, free in ((first, ranks[0], flip_first, 0), (second, ranks[1], flip_second, 1)):
        if not kind.rows:
            labels.append(None)
            continue
        axis = kind.axis - int(r or 0)
        if axis < -2:
            labels.append(axis)
            continue
        place = (axis + 2) ^ int(bool(flip))  # 0: row, 1: column
        labels.append((-2 if free == 0 else -1) if place == free else 0)
    for value, label, other in zip(node.inputs, labels[::-1], kinds, strict=False):
        if not other.rows and label is not None and (label == 0 or (label < -2 and not scope.repeats(value, label))):
            return scope.couple(node, PAIRS_SHARED)
    return _contracted(scope, node, kinds[:2], labels, rank)


def _contracted(scope: Scope, node: Node, kinds: Sequence[Kind], labels: Sequence[int | None], rank: int) -> Kind:
    """Return the kind of a product.

    ``labels``: for each operand with a batch axis, that axis in the result, counted from the right (-1 is the last); 0
    where it is contracted.
    """
    found = {label for label in labels if label is not None}
    if len(found) > 1:
        return scope.couple(node, "multiplies samples with each other")
    if not same_order(kinds):
        return scope.couple(node, "multiplies rows of the batch that are in different orders")
    if any(kind.total for kind in kinds):
        return scope.couple(node, "multiplies samples with a sum or mean over the batch")
    label = found.pop()
    if label == 0:
        return Kind(Form.SUM)
    return dataclasses.replace(first_rows(kinds), axis=rank + label)


def _multilinear(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a product of operands that are not rows."""
    if any(kind.total or kind.form is Form.ROW_BOUNDS for kind in kinds):
        return scale_total(scope, node, kinds)
    if any(kind.form is Form.SIZE for kind in kinds):
        return scope.couple(node, "multiplies a matrix made of sizes of the micro-batch")
    return shared()


def _einsum(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    if not only_rows(kinds):
        return _multilinear(scope, node, kinds)
    if any(kind.slope for kind in kinds):
        return scope.couple(node, "multiplies positions of samples")
    equation = node.get("equation", b"").decode().replace(" ", "")
    left, _, right = equation.partition("->")
    labels: list[int | None] = []
    result = scope.rank(Value(node.name))
    for value, kind, term in zip(node.inputs, kinds, left.split(","), strict=True):
        rank = scope.rank(value)
        if not kind.rows:
            labels.append(None)
            continue
        if rank is None or result is None:
            return scope.couple(node, "contracts tensors of unknown rank")
        label = _expanded(term, rank)[kind.axis]
        output = _expanded(right, result)
        if output.count(label) > 1 or _expanded(term, rank).count(label) > 1:
            return scope.couple(node, "takes a diagonal over the batch")
        labels.append(output.index(label) - result if label in output else 0)
        for other, operand, axes in _terms(node, kinds, left):
            places = _expanded(axes, scope.rank(other) or 0)
            shares = operand.rows or label not in places or scope.repeats(other, places.index(label) - len(places))
            if not shares or (label not in output and label in places and not operand.rows):
                return scope.couple(node, PAIRS_SHARED)
    if 0 in labels and len({_label_of(scope, n, k, t) for n, k, t in _terms(node, kinds, left) if k.rows}) > 1:
        return scope.couple(node, "multiplies samples with each other")
    return _contracted(scope, node, kinds, labels, result or 0)


def _terms(node: Node, kinds: Sequence[Kind], left: str) -> list[tuple[Value, Kind, str]]:
    return list(zip(node.inputs, kinds, left.split(","), strict=True))


def _label_of(scope: Scope, value: Value, kind: Kind, term: str) -> str:
    return _expanded(term, scope.rank(value) or 0)[kind.axis]


def _expanded(term: str, rank: int) -> list[str]:
    """Return the labels of the axes of an einsum term; those of its ellipsis are "...3", counted from the right."""
    if "..." not in term:
        return list(term)
    before, after = term.split("...")
    missing = rank - len(before) - len(after)
    return [*before, *(f"...{i}" for i in range(missing, 0, -1)), *after]


def _along_axis(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    kind = kinds[0]
    if kind.total:
        linear = node.op == "Cumsum"
        return kind if linear else scope.couple(node, f"applies {node.op} to a sum or mean over the batch")
    if not kind.rows:
        return SIZE if kind.form is Form.SIZE else shared()
    rank = scope.rank(node.inputs[0])
    axes = None if rank is None else scope.axes(node.inputs[1], rank)
    if axes is None or axes[0] == kind.axis or kind.slope:
        return scope.couple(node, f"applies {node.op} along the batch axis")
    removed = node.op in ("ArgMax", "ArgMin") and axes[0] < kind.axis
    return kind.at(kind.axis - removed)


def _last_axis(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
    found = only_rows(kinds)
    if any(kind.total for kind in kinds):
        return scope.couple(node, f"applies {node.op} to a sum or mean over the batch")
    if not found:
        return shared()
    if any(not kind.rows and scope.dims(value) != () for value, kind in zip(node.inputs, kinds, strict=True)):
        return scope.couple(node, PAIRS_SHARED)
    rank = scope.rank(node.inputs[0])
    if rank is None or any(kind.axis == rank - 1 or kind.slope for kind in found[:1]) or not _same_rows(found):
        return scope.couple(node, f"applies {node.op} along the batch axis")
    return found[0]


def _same_rows(found: Sequence[Kind]) -> bool:
    return len({kind.axis for kind in found}) == 1 and same_order(found)


def _entry_by_entry(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
    found = only_rows(kinds)
    if node.op.startswith("FusedBatchNorm") and node.get("is_training", True) and found:
        return scope.couple(node, "normalises by the mean and variance of the batch")
    if any(kind.total or kind.form is Form.ROW_BOUNDS for kind in kinds):
        return scope.couple(node, f"applies {node.op} to a sum or mean over the batch")
    if not found:
        return shared()
    entries = _ENTRIES.get(node.op, (0,))
    if any(kind.rows for i, kind in enumerate(kinds) if i not in entries):
        return scope.couple(node, f"uses samples as weights or parameters of {node.op}")
    if not all(kinds[i].rows or (scope.dims(node.inputs[i]) or (None,))[0] == 1 for i in entries):
        return scope.couple(node, PAIRS_SHARED)
    if any(kind.axis or kind.slope for kind in found) or not _same_rows(found):
        why = f"applies {node.op}, which mixes the entries of all axes but the first, to a batch on another axis"
        return scope.couple(node, why)
    kind = first_rows(found)
    if node.op.startswith("FusedBatchNorm"):
        return [kind, *[shared()] * (len(node.outputs) - 1)]
    return kind


def _cross_entropy(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
    """Return the kind of the cross entropy of logits and labels, which are broadcast: a vector is one of classes."""
    if any(kind.rows and scope.rank(value) != 2 for value, kind in zip(node.inputs, kinds, strict=True)):
        return scope.couple(node, "takes a number for each sample as the numbers of classes")
    return _entry_by_entry(scope, node, kinds)


def _bias_add(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a sum of entries and a bias for each channel; all axes but the channels' are independent."""
    data, bias = kinds
    if any(kind.total or kind.form is Form.ROW_BOUNDS for kind in kinds):
        return scope.couple(node, "applies BiasAdd to a sum or mean over the batch")
    if not only_rows(kinds):
        return shared()
    rank = scope.rank(node.inputs[0])
    channels = 1 if node.get("data_format", b"NHWC") == b"NCHW" else (rank or 0) - 1
    if rank is None or not data.rows or bias.rows or data.axis == channels or data.slope:
        return scope.couple(node, "adds a bias for each sample, or to each sample as a channel")
    return data


def _search(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of the places of values in sorted rows: row i of the values is looked for in row i."""
    ordered, values = kinds
    if any(kind.total or kind.form is Form.ROW_BOUNDS for kind in kinds):
        return scope.couple(node, "searches a sum or mean over the batch, or searches for one")
    if not only_rows(kinds):
        return shared()
    own = ordered.rows and values.rows and ordered.axis == values.axis == 0 and same_order(kinds)
    one_row = ordered.shared and values.rows and values.axis == 1
    if (own or one_row) and not ordered.slope and not values.slope:
        return values if values.outer or one_row else ordered
    return scope.couple(node, "searches the sorted values of other samples")


def _matrices(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
    found = only_rows(kinds)
    if any(kind.total for kind in kinds):
        return scope.couple(node, f"applies {node.op} to a sum or mean over the batch")
    if not found:
        return shared()
    rank = scope.rank(node.inputs[0])
    diagonal = node.op == "MatrixSetDiagV3"  # the operand after the matrices may have an axis less
    ranks = {scope.rank(value) for value, kind in zip(node.inputs, kinds, strict=False) if kind.rows}
    if not ranks <= {rank, *([(rank or 0) - 1] if diagonal else [])}:
        return scope.couple(node, f"applies {node.op} to operands of different ranks")
    if diagonal and not kinds[1].rows:
        return scope.couple(node, PAIRS_SHARED)
    others = [value for value, kind in zip(node.inputs, kinds, strict=True) if not kind.rows]
    if not all(scope.repeats(value, found[0].axis - (rank or 0)) for value in others):
        return scope.couple(node, PAIRS_SHARED)
    core = 1 if node.op in ("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3", "FFT", "IFFT", "RFFT", "IRFFT") else 2
    if rank is None or not kinds[0].rows or kinds[0].axis >= rank - core or not _same_rows(found) or kinds[0].slope:
        return scope.couple(node, f"applies {node.op} to a matrix of samples")
    return found[0]


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(REDUCTIONS, _reduce),
        **dict.fromkeys(_ALONG_AXIS, _along_axis),
        **dict.fromkeys(_LAST_AXIS, _last_axis),
        **dict.fromkeys(_ENTRY_BY_ENTRY, _entry_by_entry),
        "SoftmaxCrossEntropyWithLogits": _cross_entropy,
        **dict.fromkeys(_MATRICES, _matrices),
        "BiasAdd": _bias_add,
        "LowerBound": _search,
        "UpperBound": _search,
        "L2Loss": _l2_loss,
        "MatMul": _matmul,
        "BatchMatMul": _matmul,
        "BatchMatMulV2": _matmul,
        "BatchMatMulV3": _matmul,
        "Einsum": _einsum,
    }
)
