"""Is the loss a mean over the batch? Told from the graph, where it can be."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from dapple_tf.errors import DappleWarning, LossError
from dapple_tf.frontend.capture import Captured
from graph_passes.analysis.layers import SHAPE_OPS
from graph_passes.ir.graph import Graph, Node, Opaque

# Ops that leave a sum a sum (or a mean a mean).
_SHAPING = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Select", "SelectV2")
_LINEAR = frozenset({*_SHAPING, "Neg", "AddV2", "Add", "AddN", "Sub"})
_DIVISIONS = frozenset({"RealDiv", "Div", "DivNoNan"})
# Ops whose inside is not looked into.
_OPAQUE = frozenset(
    {"PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "IdentityN"}
)
_REDUCTIONS = frozenset({"Sum", "Mean"})


@dataclass(frozen=True)
class _Facts:
    """What is known of a node's output.

    ``touched``: it depends on the arguments, be it on their shapes only; ``data``: on more than their shapes.
    ``spread``: it holds something for each sample still. ``scaled``: each sample's part was divided or multiplied by
    something of the whole batch. ``summed``: the op that summed it over the batch, where nothing of the batch has
    scaled it. ``divided``: what it was divided by, where that was computed from the data of the whole batch. ``bent``:
    the op that made one number of the batch otherwise than by a sum or mean, or that took one and is not linear.
    """

    touched: bool = False
    data: bool = False
    spread: bool = False
    scaled: bool = False
    summed: str = ""
    divided: str = ""
    bent: str = ""

    @property
    def whole(self) -> bool:
        """Whether this is something of the whole batch: its size, a count, a norm."""
        return self.touched and not self.spread


def check_loss(captured: Captured) -> None:
    """Follow the loss back to what reduced the batch.

    Raises LossError for a sum over the batch; warns (DappleWarning) when it is divided by something computed
    from the batch's data, since such weights differ between micro-batches.
    """
    graph = captured.graph
    facts: dict[str, _Facts] = {}
    for node in graph.nodes:
        facts[node.name] = _observe(graph, node, facts)
    loss = facts[graph.outputs[0].node]
    if loss.summed:
        raise LossError(
            f"the loss of {graph.name} is a sum over the batch ({loss.summed!r} sums axis 0), not a mean: its "
            "gradient would depend on the batch size; use tf.reduce_mean"
        )
    if loss.bent:
        warnings.warn(
            f"the loss of {graph.name} goes through {loss.bent!r} ({graph.node(loss.bent).op}) after samples "
            "were combined, so it is probably not a mean over the batch, and its micro-batches do not add up to it: "
            "compare with dapple.verify",
            DappleWarning,
            stacklevel=8,
        )
    if loss.divided:
        warnings.warn(
            f"the loss of {graph.name} is divided by {loss.divided!r}, which is computed from the batch's data (a "
            "count of unmasked tokens?): micro-batches then weigh samples otherwise than the whole batch does, and "
            "gradients differ from one device's",
            DappleWarning,
            stacklevel=8,
        )


def _observe(graph: Graph, node: Node, known: dict[str, _Facts]) -> _Facts:
    if node.op == "arg":
        return _Facts(touched=True, data=True, spread=True)
    inputs = [known[value.node] for value in node.inputs]
    data = node.op not in SHAPE_OPS and any(facts.data for facts in inputs)
    shapes = [kind.shape.dims for kind in node.outputs]
    spread = any(facts.spread for facts in inputs) and any(dims is None or None in dims for dims in shapes)

    def found(scaled: bool = False, summed: str = "", divided: str = "", spread: bool = spread) -> _Facts:
        return _Facts(any(facts.touched for facts in inputs), data, spread and data, scaled, summed, divided)

    if node.op in _LINEAR:
        result = _combine(inputs, found)
    elif node.op in _REDUCTIONS:
        result = _reduce(graph, node, inputs[0], found)
    elif node.op in _DIVISIONS:
        result = _divide(node, inputs[0], inputs[1], found)
    elif node.op == "Mul":
        result = _multiply(inputs[0], inputs[1], found)
    else:
        alone = data and not spread and node.op not in _OPAQUE
        return dataclasses.replace(found(), bent=node.name if alone else "")
    taken = inputs[:1] if node.op in _DIVISIONS else inputs  # what it is divided by is said otherwise
    bent = next((facts.bent for facts in taken if facts.bent), "")
    return dataclasses.replace(result, bent="" if result.spread else bent)


def _combine(inputs: list[_Facts], found: Callable[..., _Facts]) -> _Facts:
    return found(
        any(facts.scaled for facts in inputs),
        next((facts.summed for facts in inputs if facts.summed), ""),
        next((facts.divided for facts in inputs if facts.divided), ""),
    )


def _reduce(graph: Graph, node: Node, taken: _Facts, found: Callable[..., _Facts]) -> _Facts:
    if not _reduces_batch(graph, node, taken):
        return _combine([taken], found)
    summed = node.name if node.op == "Sum" and not taken.scaled else ""
    return found(taken.scaled, summed, taken.divided, spread=False)


def _divide(node: Node, top: _Facts, bottom: _Facts, found: Callable[..., _Facts]) -> _Facts:
    if not bottom.whole:
        return found(top.scaled, top.summed, top.divided)
    return found(scaled=True, divided=node.inputs[1].node if bottom.data else top.divided)


def _multiply(first: _Facts, second: _Facts, found: Callable[..., _Facts]) -> _Facts:
    divided = first.divided or second.divided
    if first.scaled or second.scaled or (first.touched and second.touched and (first.whole or second.whole)):
        return found(scaled=True, divided=divided)
    return found(summed=first.summed or second.summed, divided=divided)


def _reduces_batch(graph: Graph, node: Node, taken: _Facts) -> bool:
    """Whether the reduction goes over an axis of unknown length: the batch's, or one that holds the batch."""
    dims = graph.type_of(node.inputs[0]).shape.dims
    axes = _constant(graph.node(node.inputs[1].node))
    if not taken.spread or dims is None or axes is None:
        return False
    return any(dims[axis] is None for axis in axes)


def _constant(node: Node) -> list[int] | None:
    value = dict(node.attrs).get("value")
    if node.op != "Const" or not isinstance(value, Opaque):
        return None
    array = tf.make_ndarray(attr_value_pb2.AttrValue.FromString(value.data).tensor)
    return [int(axis) for axis in array.reshape(-1)]
