"""A cost for every layer from shapes alone, to balance stages until a profile has been measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from graph_passes.analysis.layers import Layers
from graph_passes.ir.graph import Graph, Node, Shape

# A roofline with the proportions of a CPU core; only ratios matter for balancing.
_FLOPS_PER_SECOND = 5e10
_BYTES_PER_SECOND = 5e9


def layer_costs(layers: Layers, shapes: Mapping[str, Sequence[Shape]]) -> list[float]:
    """Seconds of forward of each layer (relative), given the shapes of all outputs at one batch size."""
    return [
        sum(node_seconds(layers.graph, layers.graph.node(name), shapes) for name in layer.nodes)
        for layer in layers.layers
    ]


def crossing_costs(layers: Layers, shapes: Mapping[str, Sequence[Shape]]) -> list[float]:
    """Seconds (relative) that sending the tensors of each cut takes."""
    return [
        sum(
            layers.graph.type_of(value).dtype.size * shapes[value.node][value.index].elements()
            for value in cut.crossing
            if value.node in shapes
        )
        / _BYTES_PER_SECOND
        for cut in layers.cuts
    ]


def node_seconds(graph: Graph, node: Node, shapes: Mapping[str, Sequence[Shape]]) -> float:
    """The larger of arithmetic and memory time of one op."""
    moved = sum(
        kind.dtype.size * shape.elements() for kind, shape in zip(node.outputs, shapes.get(node.name, ()), strict=False)
    )
    return max(flops(graph, node, shapes) / _FLOPS_PER_SECOND, moved / _BYTES_PER_SECOND)


def flops(graph: Graph, node: Node, shapes: Mapping[str, Sequence[Shape]]) -> float:
    """Multiply-adds count two; 0 for ops that are not matrix products or convolutions."""
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
        # Backward of a convolution does forward's products once more for each of its two gradients: as many as
        # the output's gradient (the last input) has elements, times the kernel's.
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
    """The lengths of the axes, 1 where one is not known."""
    return [max(1, dim or 1) for dim in shape.dims or ()]


def _einsum_summed(node: Node, sizes: Sequence[Sequence[int]]) -> int:
    """The product of the lengths of the axes that are summed away (those of an ellipsis never are)."""
    equation = node.attr("equation")
    assert isinstance(equation, bytes)
    terms, _, result = equation.decode().partition("->")
    lengths: dict[str, int] = {}
    for term, dims in zip(terms.split(","), sizes, strict=False):
        left, _, right = term.partition("...")
        lengths.update(zip(left, dims, strict=False))
        lengths.update(zip(right, dims[len(dims) - len(right) :], strict=False))
    return prod(length for label, length in lengths.items() if label not in result)
