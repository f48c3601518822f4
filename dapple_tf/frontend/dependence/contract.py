"""Rules of ops that reduce or contract axes, and of ops that work on each entry of axis 0 by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dapple_tf.frontend.dependence.elementwise import PAIRS_SHARED, POSITIONS_AS_NUMBERS, scale_total
from dapple_tf.frontend.dependence.kinds import SIZE, Form, Kind, first_rows, only_rows, same_order, shared
from dapple_tf.frontend.dependence.operands import rule_of_each
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.frontend.names import name_set
from dapple_tf.graph_passes.ir.graph import Node, Value

REDUCTIONS = name_set("Sum Mean Max Min Prod All Any EuclideanNorm")
COMBINED_BY: Mapping[str, str] = MappingProxyType(
    {"Max": "max", "Min": "min", "Prod": "product", "All": "all", "Any": "any"}
)
"""The operation that combines a reduction's values on disjoint rows (see ``COMBINES``); sums have their own kind."""
# Ops whose first axis holds independent entries; their other operands are shared, sizes, or rows of the same axis.
_ENTRY_BY_ENTRY = (
    "AvgPool AvgPool3D AvgPoolGrad AvgPool3DGrad Conv2D Conv2DBackpropInput Conv3D Conv "
    "Conv3DBackpropInputV2 DepthToSpace DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput "
    "Dilation2D ExtractImagePatches FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 FusedBatchNormGradV3 "
    "HSVToRGB ImageProjectiveTransformV2 ImageProjectiveTransformV3 LRN LRNGrad MaxPool MaxPool3D MaxPoolGrad "
    "MaxPool3DGrad MaxPoolV2 MaxPoolGradV2 RGBToHSV ResizeArea ResizeBicubic ResizeBilinear ResizeBilinearGrad "
    "ResizeBicubicGrad ResizeNearestNeighbor ResizeNearestNeighborGrad AdjustContrastv2 AdjustHue "
    "AdjustSaturation SpaceToDepth SparseSoftmaxCrossEntropyWithLogits"
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
_MATRICES = (
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
    axes = scope.axes(node.inputs[1], scope.rank(node.inputs[0]))
    if axes is None:
        return scope.couple(node, "reduces axes that cannot be inferred")
    if kind.slope:
        return scope.couple(node, POSITIONS_AS_NUMBERS)
    if kind.axis not in axes:
        return kind if node.get("keep_dims", False) else kind.at(kind.axis - sum(a < kind.axis for a in axes))
    return _reduce_batch(scope, node, kind, axes)


def reduces_batch_axis(scope: Scope, node: Node, kind: Kind) -> bool:
    """Return whether the reduction runs over the batch axis, of values that are no positions of samples."""
    axes = scope.axes(node.inputs[1], scope.rank(node.inputs[0]))
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
    left = "...ji" if node.get("transpose_a", False) or node.get("adj_x", False) else "...ij"
    right = "...kj" if node.get("transpose_b", False) or node.get("adj_y", False) else "...jk"
    return _contract(scope, node, kinds[:2], (left, right), "...ik", max(int(r or 0) for r in ranks))


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
    return _contract(scope, node, kinds, left.split(","), right, scope.rank(Value(node.name)))


def _contract(
    scope: Scope, node: Node, kinds: Sequence[Kind], terms: Sequence[str], right: str, result: int | None
) -> Kind:
    """Return the kind of an einsum of ``terms`` to ``right``, whose rank is ``result``; some of ``kinds`` are rows."""
    axes = [_expanded(term, scope.rank(value) or 0) for value, term in zip(node.inputs, terms, strict=False)]
    labels: set[str] = set()  # of the batch axes
    for value, kind, own in zip(node.inputs, kinds, axes, strict=False):
        if not kind.rows:
            continue
        if scope.rank(value) is None or result is None:
            return scope.couple(node, "contracts tensors of unknown rank")
        label, output = own[kind.axis], _expanded(right, result)
        if output.count(label) > 1 or own.count(label) > 1:
            return scope.couple(node, "takes a diagonal over the batch")
        labels.add(label)
        for other, operand, places in zip(node.inputs, kinds, axes, strict=False):
            if operand.rows or label not in places:
                continue
            if label not in output or not scope.repeats(other, places.index(label) - len(places)):
                return scope.couple(node, PAIRS_SHARED)
    if len(labels) > 1:
        return scope.couple(node, "multiplies samples with each other")
    if not same_order(kinds):
        return scope.couple(node, "multiplies rows of the batch that are in different orders")
    if any(kind.total for kind in kinds):
        return scope.couple(node, "multiplies samples with a sum or mean over the batch")
    label = labels.pop()
    return dataclasses.replace(first_rows(kinds), axis=output.index(label)) if label in output else Kind(Form.SUM)


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
    axes = scope.axes(node.inputs[1], scope.rank(node.inputs[0]))
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


RULES = rule_of_each(
    {
        _reduce: " ".join(REDUCTIONS),
        _along_axis: "ArgMax ArgMin Cumsum Cumprod CumulativeLogsumexp",
        _last_axis: "Softmax LogSoftmax TopKV2 TopK InTopKV2 NthElement",
        _entry_by_entry: _ENTRY_BY_ENTRY,
        _cross_entropy: "SoftmaxCrossEntropyWithLogits",
        _matrices: _MATRICES,
        _bias_add: "BiasAdd",
        _search: "LowerBound UpperBound",
        _l2_loss: "L2Loss",
        _matmul: "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3",
        _einsum: "Einsum",
    }
)
