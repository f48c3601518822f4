"""Weigh the terms of a loss so that the micro-batches' losses add up to the whole batch's.

A loss may add sums over the batch, means, and terms that do not depend on samples (regularisers). Sums of micro-batches
add up as they are; means and shared terms only after each micro-batch has multiplied them by its share of the samples.
A mean over rows that data chose (``tf.boolean_mask``) becomes their sum, divided by their number in the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.capture import read_again
from dapple_tf.frontend.captured import Captured, CapturedTensors
from dapple_tf.frontend.dependence.kinds import Form
from dapple_tf.frontend.dependence.numbers import constant_value
from dapple_tf.frontend.dependence.result import BatchDependence
from dapple_tf.frontend.names import name_set
from dapple_tf.frontend.rows import share_of
from dapple_tf.graph_passes.ir.graph import Node, Value

_TERMS = {
    "Select": slice(1, None),
    "SelectV2": slice(1, None),
    "ConcatV2": slice(None, -1),
    "Split": slice(1, None),
    "SplitV": slice(1),
}
_ONE_TERM = name_set(
    "Reshape Squeeze ExpandDims Sum Mean Transpose StridedSlice Slice GatherV2 Tile BroadcastTo Pad PadV2 Cumsum "
    "Cast ReverseV2 Roll MirrorPad ConjugateTranspose"
)
_FACTORS = frozenset({"Mul", "MulNoNan", "RealDiv", "Div", "DivNoNan", "MatMul", "BatchMatMulV2", "Einsum"})


def weigh_terms(captured: Captured, dependence: BatchDependence) -> Captured:
    """Return the captured loss with weighted terms: new ops in its trace, and a placeholder for the micro-batch's rows.

    Only ops on sums and means over the batch are made again; the tensors that these are taken of stay as they are.
    """
    return _Weighing(captured, dependence).result()


class _Weighing:
    """Builds the weighted ops. ``rows``: the placeholder; ``built``: weighted tensors by value."""

    def __init__(self, captured: Captured, dependence: BatchDependence) -> None:
        self.captured = captured
        self.dependence = dependence
        self.graph = captured.graph
        self.tensors = CapturedTensors(captured)
        self.built: dict[Value, Any] = {}

    def result(self) -> Captured:
        func_graph = self.captured.func_graph
        with func_graph.as_default(), tf.name_scope("weighted"):
            self.rows = tf.compat.v1.placeholder(tf.int64, [3], name="rows")
            self.share = share_of(self.rows)
            loss = self._weighted(self.graph.outputs[0])
            several = self.captured.several
            targets = [replace(target, value=self.tensors.value(self._weighted(target.value))) for target in several]
        return replace(read_again(self.captured, loss, self.rows), several=tuple(targets))

    def _weighted(self, value: Value) -> Any:
        """Return a tensor whose values on the micro-batches add up to ``value`` on the whole batch."""
        if value not in self.built:
            built = self._build(value)
            unrecorded = value.node in self.captured.unrecorded  # no gradient passes through it, nor through the new op
            self.built[value] = tf.stop_gradient(built) if unrecorded else built
        return self.built[value]

    def _build(self, value: Value) -> Any:
        kind, tensor = self.dependence.kinds[value], self.tensors[value]
        if kind.form is Form.SUM and not kind.mixed:
            return tensor
        if kind.form is not Form.SUM:
            return tensor * tf.cast(self.share, tensor.dtype)
        node = self.graph.node(value.node)
        inputs = [self.tensors[operand] for operand in node.inputs]
        if self.dependence.kinds[node.inputs[0]].rows:
            return self._mean_of_chosen(node, inputs)
        for i in self._terms(node, value.index):
            inputs[i] = self._weighted(node.inputs[i])
        return internals.copy_op(self.captured.func_graph, tensor.op, inputs).outputs[value.index]

    def _terms(self, node: Node, output: int) -> Sequence[int]:
        """Return the operands to weigh: all terms of a sum; the one factor of a product that depends on samples."""
        if node.op == "IdentityN":
            return [output]
        if node.op in _FACTORS:
            return [i for i, operand in enumerate(node.inputs) if self.dependence.kinds[operand].total]
        operands = range(len(node.inputs))
        if node.op in _ONE_TERM:
            return operands[:1]
        return operands[_TERMS.get(node.op, slice(None))]

    def _mean_of_chosen(self, node: Node, inputs: Sequence[Any]) -> Any:
        """Return the sum of rows that data chose, divided by their number in the whole batch."""
        keep = bool(node.get("keep_dims"))
        total = tf.raw_ops.Sum(input=inputs[0], axis=inputs[1], keep_dims=keep)
        origin = self.dependence.kinds[node.inputs[0]].origin
        of_origin = [value for value, kind in self.dependence.kinds.items() if kind.origin == origin]
        chosen = self.tensors[next(value for value in of_origin if self.graph.node(value.node).op == "Where")]
        count = tf.cast(tf.shape(chosen, tf.int64)[0], tf.float64)
        return total / tf.cast(count * self._entries(node), total.dtype)

    def _entries(self, node: Node) -> float:
        """Return how many entries of each chosen row a mean is taken over."""
        source = node.inputs[0]
        dims = self.graph.type_of(source).shape.dims or ()
        axes = constant_value(self.graph.node(node.inputs[1].node))
        assert axes is not None, "a mean over axes that are not constant is coupled"
        others = {int(axis) % len(dims) for axis in axes.reshape(-1)} - {self.dependence.kinds[source].axis}
        return float(math.prod(int(dims[axis] or 1) for axis in others))
