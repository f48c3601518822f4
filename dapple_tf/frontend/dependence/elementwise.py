"""Rules of ops that combine tensors entry by entry, with broadcasting, and of linear ops on sums and means."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dapple_tf.frontend.dependence.kinds import SIZE, Form, Kind, first_rows, same_order, shared
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.frontend.names import name_set
from dapple_tf.graph_passes.ir.graph import Node, TensorType, Value

UNARY = name_set(
    "Abs Acos Acosh Angle Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 "
    "BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Bitcast Bucketize Cast Ceil CheckNumerics CheckNumericsV2 "
    "ComplexAbs Conj Cos Cosh Dawsn DeepCopy Digamma Elu EnsureShape Erf Erfc Erfinv Exp Expint Expm1 "
    "FakeQuantWithMinMaxArgs Floor FresnelCos FresnelSin Identity Imag Inv Invert IsFinite IsInf IsNan LeakyRelu "
    "Lgamma Log Log1p LogicalNot Ndtri Neg OnesLike PopulationCount PreventGradient QuantizeAndDequantizeV4Grad "
    "Real Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Spence Sqrt "
    "Square StopGradient Tan Tanh ZerosLike AsString RegexFullMatch RegexReplace StaticRegexFullMatch "
    "StaticRegexReplace StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast "
    "StringToHashBucketStrong StringToNumber StringUpper UnicodeTranscode"
)
BINARY = name_set(
    "AccumulateNV2 Add AddN AddV2 ApproximateEqual Atan2 Betainc BiasAddV1 BitwiseAnd BitwiseOr BitwiseXor "
    "ClipByValue Complex Div DivNoNan Equal FakeQuantWithMinMaxVars FloorDiv FloorMod Greater GreaterEqual Igamma "
    "IgammaGradA Igammac LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan NextAfter "
    "NotEqual Polygamma Pow QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 RealDiv "
    "RightShift Select SelectV2 SquaredDifference Sub TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta EluGrad "
    "InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad "
    "SoftsignGrad SqrtGrad StringJoin TanhGrad"
)
ELEMENTWISE = UNARY | BINARY

_ADDING = frozenset({"AccumulateNV2", "Add", "AddV2", "AddN", "Sub"})
_CHOOSING = frozenset({"Select", "SelectV2"})
_DIVIDING = frozenset({"RealDiv", "Div", "DivNoNan"})
_QUANTIZING = name_set("QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4")
SCALING = frozenset({"Mul", "MulNoNan"}) | _DIVIDING
_WIDE = frozenset({"int32", "int64", "uint32", "uint64", "float32", "float64"})  # they hold all positions of samples
PAIRS_SHARED = "pairs samples, by their positions, with entries of a tensor that all micro-batches share"
POSITIONS_AS_NUMBERS = "computes with positions of samples in the batch (tf.range of its size)"
_LINEAR_UNARY = name_set(
    "Identity IdentityN Neg StopGradient PreventGradient CheckNumerics CheckNumericsV2 Snapshot EnsureShape Real "
    "Imag Conj Cast DeepCopy"
)


def elementwise(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of an op that works entry by entry."""
    kinds = _whole_sizes(scope, node, kinds)
    if stopped := next((kind for kind in kinds if kind.coupled), None):
        return stopped
    if any(kind.form is Form.SIZE for kind in kinds):
        return SIZE
    if any(kind.total or kind.form is Form.ROW_BOUNDS for kind in kinds):
        return _of_totals(scope, node, kinds)
    if any(kind.rows for kind in kinds):
        if node.op in _QUANTIZING and not node.get("range_given", False):
            return scope.couple(node, "quantizes by the smallest and the largest number of the batch")
        return _of_rows(scope, node, kinds)
    return shared(once=any(kind.once for kind in kinds))


def add_totals(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a sum, a choice, or a concatenation of sums, means and shared values."""
    if any(kind.rows for kind in kinds):
        return scope.couple(node, "combines samples with a sum or mean over the batch")
    if any(kind.form in (Form.SIZE, Form.LIST) for kind in kinds):
        return scope.couple(node, "joins a sum or mean over the batch and sizes of the micro-batch")
    if any(kind.form is Form.ROW_BOUNDS for kind in kinds):
        alone = all(kind.form is Form.ROW_BOUNDS for kind in kinds)
        return kinds[0] if alone else scope.couple(node, "uses row bounds")
    sums = [kind for kind in kinds if kind.form is Form.SUM]
    if not sums:
        return Kind(Form.MEAN)
    mixed = len(sums) < len(kinds) or any(kind.mixed for kind in sums)
    if mixed and not node.outputs[0].dtype.differentiable:
        return scope.couple(node, "adds integers that depend on samples and integers that do not")
    return Kind(Form.SUM, mixed=mixed)


def scale_total(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a product of a sum or mean and shared values."""
    totals = [kind for kind in kinds if kind.total or kind.form is Form.ROW_BOUNDS]
    if any(kind.rows for kind in kinds):
        return scope.couple(node, "scales samples by a sum or mean over the batch")
    bounds = [kind for kind in totals if kind.form is Form.ROW_BOUNDS]
    if bounds:
        others = [kind for kind in kinds if kind.form is not Form.ROW_BOUNDS]
        if len(bounds) == 1 and all(kind.shared or kind.form is Form.MEAN for kind in others) and others:
            return Kind(Form.SUM)
        return bounds[0] if not others else scope.couple(node, "uses row bounds")
    if len(totals) > 1:
        return scope.couple(node, "multiplies two sums or means over the batch")
    return totals[0]


def _whole_sizes(scope: Scope, node: Node, kinds: Sequence[Kind]) -> list[Kind]:
    """Return the kinds of the operands; sizes that are combined with data are replaced by the whole batch's."""
    sizes = [i for i, kind in enumerate(kinds) if kind.form is Form.SIZE]
    if not sizes or all(kind.form is Form.SIZE or (kind.shared and not kind.once) for kind in kinds):
        return [SIZE if sizes else kind for kind in kinds]
    if node.op in _DIVIDING and kinds[0].form is Form.SUM and not kinds[0].mixed and sizes == [1]:
        coefficients = scope.affine(node.inputs[1])
        proportional = coefficients is not None and coefficients[0].shape == () and not coefficients[1]
        if proportional and node.inputs[1] not in scope.whole:
            scope.mean_sizes.add(node.inputs[1])
            return [Kind(Form.MEAN), shared()]
    result = list(kinds)
    for i in sizes:
        result[i] = whole_size(scope, node, i)
    return result


def whole_size(scope: Scope, node: Node, operand: int) -> Kind:
    """Note that the operand must be a size of the whole batch, not of the micro-batch, and return its kind."""
    value = node.inputs[operand]
    kind = scope.kinds[value]
    if scope.nested:
        return scope.couple(node, "uses the size of the micro-batch as a number, inside a nested function")
    if scope.number(value) is not None:
        return shared()
    if _becomes_integer(scope, value):
        return scope.couple(node, "computes with a size of the micro-batch that is used as a shape or an index too")
    alone = not scope.graph.type_of(value).dtype.differentiable or len(scope.graph.node(value.node).outputs) == 1
    if alone and scope.affine(value) is not None:
        scope.sizes[node.name, operand] = value
        return shared()
    no_shape = not is_integer(scope.graph.type_of(value))  # no op uses it as a shape
    if not kind.trained and no_shape and scope.knows_shapes(value):
        scope.once_sizes.add(value)
        return shared(once=True)
    return scope.couple(node, "uses the size of the micro-batch as a number")


def is_integer(type_: TensorType) -> bool:
    """Return whether tensors of this type are integers, which may be shapes or indices."""
    return not type_.dtype.differentiable and type_.dtype.name != "bool"


def _becomes_integer(scope: Scope, value: Value) -> bool:
    """Return whether an integer is made of a float or a boolean, which may be a shape: that stays the micro-batch's."""
    pending = [] if is_integer(scope.graph.type_of(value)) else [value]
    sizes = set(pending)
    while pending:
        source = pending.pop()
        for user in (node for node in scope.graph.nodes if source in node.inputs):
            if any(scope.kinds.get(operand, SIZE).form not in (Form.SIZE, Form.SHARED) for operand in user.inputs):
                continue
            if any(is_integer(output) for output in user.outputs):
                return True
            new = [output for output in user.values() if output not in sizes]
            sizes.update(new)
            pending += new
    return False


def _of_totals(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    if node.op in _LINEAR_UNARY:
        before, after = scope.graph.type_of(node.inputs[0]).dtype, node.outputs[0].dtype
        rounds = after.name == "bool" or (before.differentiable and not after.differentiable)
        if rounds and before != after and kinds[0].form is not Form.ROW_BOUNDS:
            return scope.couple(node, "rounds a sum or mean over the batch")
        return kinds[0]
    if node.op in _ADDING:
        return add_totals(scope, node, kinds)
    if node.op in _CHOOSING and kinds[0].shared:
        return add_totals(scope, node, kinds[1:])
    divides = node.op in _DIVIDING
    if divides and not node.outputs[0].dtype.differentiable:
        return scope.couple(node, "rounds a sum or mean over the batch")
    if divides and kinds[0].form is Form.ROW_BOUNDS and kinds[1].form is Form.ROW_BOUNDS:
        return kinds[0]
    if node.op in SCALING and not (divides and not kinds[1].shared):
        return scale_total(scope, node, kinds)
    return scope.couple(node, f"applies {node.op} to a sum or mean over the batch, which is not linear")


def _of_rows(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    if node.op == "Select" and scope.rank(node.inputs[0]) != scope.rank(node.inputs[1]) and scope.rank(node.inputs[0]):
        return _select_rows(scope, node, kinds)
    batched = [(value, kind) for value, kind in zip(node.inputs, kinds, strict=False) if kind.rows]
    ranks = [scope.rank(value) for value in node.inputs]
    if None in ranks:
        return scope.couple(node, "combines tensors of unknown rank")
    known = [rank for rank in ranks if rank is not None]
    if scope.rank(Value(node.name)) not in (None, max(known)):  # == gives one False, no row for each sample
        return scope.couple(node, "compares tensors whose shapes do not fit")
    from_right = {kind.axis - (scope.rank(value) or 0) for value, kind in batched}
    if len(from_right) > 1:
        return scope.couple(node, "pairs each sample with others (its operands have the batch on different axes)")
    others = [value for value, kind in zip(node.inputs, kinds, strict=False) if not kind.rows]
    if not all(scope.repeats(value, axis) for value in others for axis in from_right):
        return scope.couple(node, PAIRS_SHARED)
    if not same_order(kinds):
        return scope.couple(node, "combines rows of the batch in different orders, or chosen by different data")
    axis = max(known) + (batched[0][1].axis - (scope.rank(batched[0][0]) or 0))
    return _positions(scope, node, kinds, dataclasses.replace(first_rows(kinds).plain(), axis=axis))


def _select_rows(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a ``Select`` whose condition is a vector: it has an entry for each entry of axis 0."""
    aligned = all(kind.rows and not kind.axis and not kind.slope for kind in kinds)
    if not aligned or not same_order(kinds):
        return scope.couple(node, "chooses between rows of the batch that are in different orders")
    return first_rows(kinds)


def _positions(scope: Scope, node: Node, kinds: Sequence[Kind], result: Kind) -> Kind:
    """Return ``result`` with its slope, where operands are positions of rows."""
    if not any(kind.slope for kind in kinds):
        return result
    slopes = [kind.slope or (0,) for kind in kinds]
    wide_enough = node.outputs[0].dtype.name in _WIDE
    if node.op in ("Identity", "StopGradient", "EnsureShape", "IdentityN") or (node.op == "Cast" and wide_enough):
        return dataclasses.replace(result, slope=slopes[0])
    width = max(len(slope) for slope in slopes)
    wide = [slope * width if len(slope) == 1 else slope for slope in slopes]
    moved = any(kind.rows and kind.outer and not kind.slope for kind in kinds)
    if moved and node.op in ("Add", "AddV2", "Sub") and any(slope == (1,) for slope in slopes):
        return scope.couple(node, "adds data to positions of samples in the batch, which may name other samples")
    if node.op in ("Add", "AddV2", "Sub"):
        sign = -1 if node.op == "Sub" else 1
        return result.sloped([a + sign * b for a, b in zip(*wide, strict=True)])
    if node.op == "Mul":
        for i, j in ((0, 1), (1, 0)):
            number = scope.number(node.inputs[j])
            if kinds[i].slope and kinds[j].shared and number is not None and number.ndim < 2:
                factors = [int(factor) for factor in number.reshape(-1)]
                own = slopes[i] * len(factors) if len(slopes[i]) == 1 else slopes[i]
                factors = factors * len(own) if len(factors) == 1 else factors
                return result.sloped([s * factor for s, factor in zip(own, factors, strict=True)])
    if node.op in ("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual") and wide[0] == wide[1]:
        return result
    if node.op in ("SelectV2", "Select") and not kinds[0].slope and wide[1] == wide[2]:
        return dataclasses.replace(result, slope=wide[1])
    return scope.couple(node, POSITIONS_AS_NUMBERS)
