"""A cost for every layer from shapes alone, to balance stages until a profile has been measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graph_passes.analysis.layers import Layers
from graph_passes.analysis.op_costs import flops
from graph_passes.ir.graph import Graph, Node, Shape
from profiler.peaks import CPU_CORE


@dataclass(frozen=True)
class Costs:
    """Relative seconds: of each layer's forward, and of sending the tensors that cross each cut."""

    layers: Sequence[float]
    cuts: Sequence[float]


def estimate_costs(layers: Layers, shapes: Mapping[str, Sequence[Shape]]) -> Costs:
    """Return the costs of all layers and cuts, given the shapes of all outputs at one batch size."""
    return Costs(layer_costs(layers, shapes), crossing_costs(layers, shapes))


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
        / CPU_CORE.bytes_per_second
        for cut in layers.cuts
    ]


def node_seconds(graph: Graph, node: Node, shapes: Mapping[str, Sequence[Shape]]) -> float:
    """The larger of arithmetic and memory time of one op."""
    moved = sum(
        kind.dtype.size * shape.elements() for kind, shape in zip(node.outputs, shapes.get(node.name, ()), strict=False)
    )
    return CPU_CORE.seconds(flops(graph, node, shapes), moved)
