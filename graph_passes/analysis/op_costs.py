"""The cost of an op from its shapes: floating-point operations, bytes moved, bytes of a tensor.

A roofline turns these into seconds: see ``dapple_tf.profiler.peaks.Peak.seconds``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal

from dapple_tf.graph_passes.analysis.layers import CAPTURED_INPUTS, SHAPE_OPS
from dapple_tf.graph_passes.ir.graph import Graph, Node, Shape, Value

VIEW_OPS = frozenset(
    {"Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient", "EnsureShape"}
)
"""Ops whose outputs are their inputs under another shape or name: the same memory."""

_LIST_OPS = frozenset({"TensorListGetItem", "TensorListPopBack", "TensorListPushBack", "TensorListSetItem"})

FREE_OPS = (
    VIEW_OPS
    | CAPTURED_INPUTS
    | SHAPE_OPS
    | _LIST_OPS  # a list refers to its tensors: none is copied
    | {"Const", "ReadVariableOp", "Placeholder", "BroadcastGradientArgs"}
)
"""Ops that take no time worth counting: views, inputs, shapes, constants, reads of variables, elements of lists."""


OpClass = Literal["product", "convolution", "loop", "other"]
"""Classes of ops whose kernels reach different fractions of a device's peak rates; "loop": all ops in a loop's body."""

_PRODUCTS = frozenset({"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"})


def op_class(op: str) -> OpClass:
    """Return the class of an op that is not in a loop."""
    if op in _PRODUCTS:
        return "product"
    return "convolution" if op.startswith(("Conv2D", "Conv3D", "DepthwiseConv2dNative")) else "other"


def moved_bytes(graph: Graph, node: Node, shapes: Mapping[str, Sequence[Shape]], unknown: int = 1) -> int:
    """Return the bytes that an op moves: it reads each input once and writes each output once.

    ``shapes``: the output shapes of all nodes; each unknown dimension counts as ``unknown``.
    """
    return sum(value_bytes(graph, value, shapes, unknown) for value in (*node.inputs, *node.values()))


def value_bytes(graph: Graph, value: Value, shapes: Mapping[str, Sequence[Shape]], unknown: int = 1) -> int:
    """Return the bytes of one tensor, with ``unknown`` for each unknown dimension; handles take 0 bytes."""
    kind = graph.type_of(value)
    if kind.dtype.handle:
        return 0
    found = shapes.get(value.node, ())
    shape = found[value.index] if value.index < len(found) and found[value.index].dims is not None else kind.shape
    return kind.dtype.size * shape.elements(unknown)


def flops(node: Node, shapes: Mapping[str, Sequence[Shape]]) -> float:
    """Return the floating-point operations of an op.

    A multiply-add counts as two. Ops other than matrix products, convolutions and their gradients count as 0, and so
    does an op with an input of unknown rank. ``shapes``: the output shapes of all nodes; an unknown dimension counts as
    1.
    """
    if not node.outputs or node.name not in shapes:
        return 0.0
    out = shapes[node.name][0].elements()
    inputs = [shapes[v.node][v.index].dims for v in node.inputs if v.index < len(shapes.get(v.node, ()))]
    if not inputs or any(dims is None for dims in inputs):
        return 0.0
    sizes = [_known(Shape(dims)) for dims in inputs]
    match node.op:
        case "MatMul":
            return 2.0 * out * sizes[0][0 if node.attr("transpose_a") else 1]
        case "BatchMatMulV2" | "BatchMatMulV3" | "BatchMatMul":
            return 2.0 * out * sizes[0][-2 if node.attr("adj_x") else -1]
        case "Conv2D" | "Conv3D":
            return 2.0 * out * prod(sizes[1][:-1])
        case "DepthwiseConv2dNative":
            return 2.0 * out * prod(sizes[1][:2])
        # Each of the two gradients of a convolution takes as many products as forward: the elements of the output's
        # gradient (the last input), times those of the kernel.
        case "Conv2DBackpropInput" | "Conv3DBackpropInputV2":
            return 2.0 * prod(sizes[2]) * prod(sizes[1][:-1])
        case "Conv2DBackpropFilter" | "Conv3DBackpropFilterV2":
            return 2.0 * prod(sizes[2]) * prod(_known(shapes[node.name][0])[:-1])
        case "DepthwiseConv2dNativeBackpropInput":
            return 2.0 * prod(sizes[2]) * prod(sizes[1][:2])
        case "DepthwiseConv2dNativeBackpropFilter":
            return 2.0 * prod(sizes[2]) * prod(_known(shapes[node.name][0])[:2])
        case "Einsum":
            return 2.0 * out * _einsum_summed(node, sizes)
    return 0.0


def _known(shape: Shape) -> list[int]:
    """Return the dimensions, 1 for each that is unknown."""
    return [max(1, dim or 1) for dim in shape.dims or ()]


def _einsum_summed(node: Node, sizes: Sequence[Sequence[int]]) -> int:
    """Return the product of the dimensions that the equation sums over (those of an ellipsis never are)."""
    equation = node.attr("equation")
    assert isinstance(equation, bytes)
    terms, _, result = equation.decode().partition("->")
    lengths: dict[str, int] = {}
    for term, dims in zip(terms.split(","), sizes, strict=False):
        left, _, right = term.partition("...")
        lengths.update(zip(left, dims, strict=False))
        lengths.update(zip(right, dims[len(dims) - len(right) :], strict=False))
    return prod(length for label, length in lengths.items() if label not in result)
