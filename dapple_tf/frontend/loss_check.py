"""Check, as far as the graph shows it, that the loss is a mean over the batch."""

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

# Ops whose result is a sum over the batch (or a mean) if their input is one.
_SHAPING = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Select", "SelectV2")
_LINEAR = frozenset({*_SHAPING, "Neg", "AddV2", "Add", "AddN", "Sub"})
_DIVISIONS = frozenset({"RealDiv", "Div", "DivNoNan"})
# Ops whose function bodies are not analysed.
_OPAQUE = frozenset(
    {"PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "IdentityN"}
)
_REDUCTIONS = frozenset({"Sum", "Mean"})


@dataclass(frozen=True)
class _Dependence:
    """How a node's output depends on the batch.

    ``on_batch``: it depends on the arguments, at least on their shapes; ``on_data``: on their values. ``per_sample``:
    it still has a batch axis. ``normalised``: each sample's part was multiplied or divided by a quantity of the whole
    batch. ``sum_op``: the op that summed it over the batch, unless it is normalised. ``divisor``: the node that it was
    divided by, where that depends on the batch's values. ``nonlinear_op``: the op that combined the samples other than
    by a sum or mean, or that is applied to such a combination and is not linear. (Names of nodes; "" for none.)
    """

    on_batch: bool = False
    on_data: bool = False
    per_sample: bool = False
    normalised: bool = False
    sum_op: str = ""
    divisor: str = ""
    nonlinear_op: str = ""

    @property
    def whole_batch(self) -> bool:
        """Whether this is one quantity of the whole batch: its size, a count, a norm."""
        return self.on_batch and not self.per_sample


def check_loss(captured: Captured) -> None:
    """Follow the computation of the loss to the ops that reduce the batch.

    Raises LossError for a sum over the batch. Warns (DappleWarning) when the loss is divided by something computed
    from the batch's values, whose weights differ between micro-batches, and when the loss combines samples other than
    by a mean.
    """
    graph = captured.graph
    known: dict[str, _Dependence] = {}
    for node in graph.nodes:
        known[node.name] = _analyse(graph, node, known)
    loss = known[graph.outputs[0].node]
    if loss.sum_op:
        raise LossError(
            f"the loss of {graph.name} is a sum over the batch ({loss.sum_op!r} sums axis 0), not a mean: its "
            "gradient would depend on the batch size; use tf.reduce_mean"
        )
    if loss.nonlinear_op:
        warnings.warn(
            f"the loss of {graph.name} goes through {loss.nonlinear_op!r} ({graph.node(loss.nonlinear_op).op}) after "
            "samples were combined, so it is probably not a mean over the batch, and its micro-batches do not add up "
            "to it: compare with dapple.verify",
            DappleWarning,
            stacklevel=8,
        )
    if loss.divisor:
        warnings.warn(
            f"the loss of {graph.name} is divided by {loss.divisor!r}, which is computed from the batch's data (a "
            "count of unmasked tokens?): micro-batches then weigh samples otherwise than the whole batch does, and "
            "gradients differ from one device's",
            DappleWarning,
            stacklevel=8,
        )


def _analyse(graph: Graph, node: Node, known: dict[str, _Dependence]) -> _Dependence:
    if node.op == "arg":
        return _Dependence(on_batch=True, on_data=True, per_sample=True)
    inputs = [known[value.node] for value in node.inputs]
    on_data = node.op not in SHAPE_OPS and any(dependence.on_data for dependence in inputs)
    shapes = [kind.shape.dims for kind in node.outputs]
    per_sample = any(dependence.per_sample for dependence in inputs) and any(
        dims is None or None in dims for dims in shapes
    )

    def result(
        normalised: bool = False, sum_op: str = "", divisor: str = "", per_sample: bool = per_sample
    ) -> _Dependence:
        on_batch = any(dependence.on_batch for dependence in inputs)
        return _Dependence(on_batch, on_data, per_sample and on_data, normalised, sum_op, divisor)

    if node.op in _LINEAR:
        found = _combine(inputs, result)
    elif node.op in _REDUCTIONS:
        found = _reduce(graph, node, inputs[0], result)
    elif node.op in _DIVISIONS:
        found = _divide(node, inputs[0], inputs[1], result)
    elif node.op == "Mul":
        found = _multiply(inputs[0], inputs[1], result)
    else:
        combines = on_data and not per_sample and node.op not in _OPAQUE
        return dataclasses.replace(result(), nonlinear_op=node.name if combines else "")
    terms = inputs[:1] if node.op in _DIVISIONS else inputs  # a divisor has a message of its own
    nonlinear = next((dependence.nonlinear_op for dependence in terms if dependence.nonlinear_op), "")
    return dataclasses.replace(found, nonlinear_op="" if found.per_sample else nonlinear)


def _combine(inputs: list[_Dependence], result: Callable[..., _Dependence]) -> _Dependence:
    return result(
        any(dependence.normalised for dependence in inputs),
        next((dependence.sum_op for dependence in inputs if dependence.sum_op), ""),
        next((dependence.divisor for dependence in inputs if dependence.divisor), ""),
    )


def _reduce(graph: Graph, node: Node, reduced: _Dependence, result: Callable[..., _Dependence]) -> _Dependence:
    if not _reduces_batch_axis(graph, node, reduced):
        return _combine([reduced], result)
    sum_op = node.name if node.op == "Sum" and not reduced.normalised else ""
    return result(reduced.normalised, sum_op, reduced.divisor, per_sample=False)


def _divide(node: Node, dividend: _Dependence, divisor: _Dependence, result: Callable[..., _Dependence]) -> _Dependence:
    if not divisor.whole_batch:
        return result(dividend.normalised, dividend.sum_op, dividend.divisor)
    return result(normalised=True, divisor=node.inputs[1].node if divisor.on_data else dividend.divisor)


def _multiply(first: _Dependence, second: _Dependence, result: Callable[..., _Dependence]) -> _Dependence:
    divisor = first.divisor or second.divisor
    by_whole_batch = first.on_batch and second.on_batch and (first.whole_batch or second.whole_batch)
    if first.normalised or second.normalised or by_whole_batch:
        return result(normalised=True, divisor=divisor)
    return result(sum_op=first.sum_op or second.sum_op, divisor=divisor)


def _reduces_batch_axis(graph: Graph, node: Node, reduced: _Dependence) -> bool:
    """Return whether a reduction goes over an axis of unknown length: the batch axis, or one that contains it."""
    dims = graph.type_of(node.inputs[0]).shape.dims
    axes = _constant_axes(graph.node(node.inputs[1].node))
    if not reduced.per_sample or dims is None or axes is None:
        return False
    return any(dims[axis] is None for axis in axes)


def _constant_axes(node: Node) -> list[int] | None:
    value = dict(node.attrs).get("value")
    if node.op != "Const" or not isinstance(value, Opaque):
        return None
    array = tf.make_ndarray(attr_value_pb2.AttrValue.FromString(value.data).tensor)
    return [int(axis) for axis in array.reshape(-1)]
