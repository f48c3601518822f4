"""Estimate the cost of every layer from shapes alone, to balance stages before a profile has been measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dapple_tf.graph_passes.analysis.layers import Layers
from dapple_tf.graph_passes.analysis.op_costs import flops
from dapple_tf.graph_passes.ir.graph import Node, Shape
from dapple_tf.profiler.peaks import CPU_CORE

BACKWARD_OVER_FORWARD = 2.0
"""Seconds of a backward over those of its forward: for each product of forward, the gradients of its two operands."""


@dataclass(frozen=True)
class EstimatedCosts:
    """Estimated seconds on one CPU core. Only their ratios count.

    ``layers``: forward seconds of each layer. ``cuts``: seconds to send the tensors that cross each cut; entry p - 1
    is the cut before layer p.
    """

    layers: Sequence[float]
    cuts: Sequence[float]


def estimate_costs(layers: Layers, shapes: Mapping[str, Sequence[Shape]]) -> EstimatedCosts:
    """Return the costs of all layers and cuts. ``shapes``: the shapes of every node's outputs, at one batch size."""
    seconds = [
        sum(estimate_node_seconds(layers.graph.node(name), shapes) for name in layer.nodes) for layer in layers.layers
    ]
    crossing = [
        sum(
            layers.graph.type_of(value).dtype.size * shapes[value.node][value.index].elements()
            for value in cut.crossing
            if value.node in shapes
        )
        for cut in layers.cuts
    ]
    return EstimatedCosts(seconds, [size / CPU_CORE.bytes_per_second for size in crossing])


def estimate_node_seconds(node: Node, shapes: Mapping[str, Sequence[Shape]]) -> float:
    """Return the seconds of one op by the roofline: the longer of its arithmetic and of writing its outputs."""
    written = sum(
        kind.dtype.size * shape.elements() for kind, shape in zip(node.outputs, shapes.get(node.name, ()), strict=False)
    )
    return CPU_CORE.seconds(flops(node, shapes), written)
