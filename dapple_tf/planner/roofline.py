"""Seconds of an op on a device of known peak figures: the longer of arithmetic and memory traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dapple_tf.autoplan.estimate import flops
from graph_passes.analysis.layers import INPUT_OPS, SHAPE_OPS
from graph_passes.ir.graph import Graph, Node, Shape, Value
from profiler.peaks import Peak

VIEW_OPS = frozenset(
    {"Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient", "EnsureShape"}
)
"""Ops whose outputs are their inputs under another shape or name: the same memory."""

_FREE_OPS = VIEW_OPS | INPUT_OPS | SHAPE_OPS | {"Const", "ReadVariableOp", "Placeholder", "BroadcastGradientArgs"}


def op_seconds(graph: Graph, node: Node, shapes: Mapping[str, Sequence[Shape]], peak: Peak, unknown: int = 1) -> float:
    """Seconds of one op, given the shapes of all outputs; ``unknown`` stands for each unknown length.

    Every input is read once and every output written once.
    """
    if node.op in _FREE_OPS:
        return 0.0
    moved = sum(value_bytes(graph, value, shapes, unknown) for value in (*node.inputs, *node.values()))
    return peak.seconds(flops(graph, node, shapes), moved)


def value_bytes(graph: Graph, value: Value, shapes: Mapping[str, Sequence[Shape]], unknown: int = 1) -> int:
    """Bytes of one tensor, with ``unknown`` standing for each length that is not known; handles count nothing."""
    kind = graph.type_of(value)
    if kind.dtype.name in ("resource", "variant"):
        return 0
    found = shapes.get(value.node, ())
    shape = found[value.index] if value.index < len(found) and found[value.index].dims is not None else kind.shape
    return kind.dtype.size * shape.elements(unknown)
