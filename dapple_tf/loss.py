"""Is the loss a mean over the batch? Told from the graph, where it can be."""

from __future__ import annotations

import warnings

from dapple_tf.capture import Captured
from dapple_tf.errors import DappleWarning, LossError
from graph_passes.ir import Graph, Node, Value, ancestors
from graph_passes.layers import SHAPE_OPS

# Ops that leave a sum a sum (or a mean a mean).
_LINEAR = frozenset({"Identity", "Cast", "Reshape", "Squeeze", "Neg", "AddV2", "Add", "AddN", "Sub", "Mul"})
_DIVISIONS = frozenset({"RealDiv", "Div", "DivNoNan"})


def check_loss(captured: Captured) -> None:
    """Follow the loss back to what reduced the batch.

    Raises LossError for a sum over the batch; warns (DappleWarning) when it is divided by something computed
    from the batch's data, since such weights differ between micro-batches.
    """
    graph = captured.graph
    batched = _batched(graph)
    pending, seen = [graph.outputs[0]], set()
    while pending:
        value = pending.pop()
        node = graph.node(value.node)
        if value in seen:
            continue
        seen.add(value)
        if node.op == "Sum" and _reduces_batch(graph, node, batched):
            raise LossError(
                f"the loss of {graph.name} is a sum over the batch ({node.name!r} sums axis 0), not a mean: its "
                "gradient would depend on the batch size; use tf.reduce_mean"
            )
        if node.op in _DIVISIONS:
            denominator = node.inputs[1]
            if graph.node(denominator.node).op == "Const":
                pending.append(node.inputs[0])
            elif _from_data(graph, denominator):
                warnings.warn(
                    f"the loss of {graph.name} is divided by {denominator.node!r}, which is computed from the batch's "
                    "data (a count of unmasked tokens?): micro-batches then weigh samples otherwise than the whole "
                    "batch does, and gradients differ from one device's",
                    DappleWarning,
                    stacklevel=6,
                )
        elif node.op in _LINEAR:
            pending += node.inputs


def _batched(graph: Graph) -> set[str]:
    """Nodes whose first output has an unknown axis 0 that comes from the arguments."""
    found = {node.name for node in graph.nodes if node.op == "arg"}
    for node in graph.nodes:
        if node.outputs and any(value.node in found for value in node.inputs):
            dims = node.outputs[0].shape.dims
            if dims and dims[0] is None:
                found.add(node.name)
    return found


def _reduces_batch(graph: Graph, node: Node, batched: set[str]) -> bool:
    if node.inputs[0].node not in batched:
        return False
    axes = graph.node(node.inputs[1].node)
    if axes.op != "Const":
        return False
    reduced = axes.outputs[0].shape.elements()
    rank = len(graph.type_of(node.inputs[0]).shape.dims or ())
    # A loss is a scalar: what is summed on the way to it is summed over all axes, or over axis 0 last.
    return reduced == rank or rank == 1


def _from_data(graph: Graph, value: Value) -> bool:
    """Whether a value depends on the arguments' data, and not only on their shapes."""
    shapes = {node.name for node in graph.nodes if node.op in SHAPE_OPS}
    return any(graph.node(name).op == "arg" for name in ancestors(graph, [value.node], stop=shapes))
