"""Small integers of a graph at three batch sizes, evaluated as TensorFlow does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.frontend.dependence.numbers import (
    LARGEST,
    Numbers,
    affine,
    constant_value,
    evaluate,
    varies,
)
from dapple_tf.frontend.dependence.size_numbers import holds_for_all_sizes
from dapple_tf.frontend.node_attributes import read_attribute
from dapple_tf.graph_passes.ir.graph import DType, Node, tensor
from tests.dapple_tf.frontend.dependence.evaluation import Compute, analyse, make_loss


def arrays(*values: int) -> tuple[Any, ...]:
    return tuple(np.asarray(value) for value in values)


def test_affine_numbers_have_a_factor_and_an_offset() -> None:
    assert affine(arrays(13, 23, 33), 5) == (2, 3)
    assert affine(arrays(5, 5, 5), 5) == (0, 5)
    assert affine(arrays(1, 4, 9), 1) is None
    assert affine(arrays(2, 4, 6), 9) is None, "a quarter of the batch size, rounded"


def test_vectors_are_affine_entry_by_entry() -> None:
    found = affine((np.array([10, 4]), np.array([20, 4]), np.array([30, 4])), 10)
    assert found is not None
    assert [part.tolist() for part in found] == [[1, 0], [0, 4]]


N_SAMPLES = arrays(10, 20, 30)


@pytest.mark.parametrize(
    ("op", "operand", "holds"),
    [
        ("Maximum", arrays(1, 1, 1), True),
        ("Maximum", arrays(2, 2, 2), False),  # of a batch of 1 it is 2
        ("Minimum", arrays(1, 1, 1), True),
        ("Minimum", arrays(1000, 1000, 1000), False),
        ("Minimum", arrays(20, 40, 60), True),
        ("Greater", arrays(0, 0, 0), True),
        ("Greater", arrays(8, 8, 8), False),
        ("Greater", arrays(50, 50, 50), False),
        ("Equal", N_SAMPLES, True),
        ("Equal", arrays(0, 0, 0), True),
        ("Equal", arrays(7, 7, 7), False),
        ("FloorDiv", arrays(1, 1, 1), True),
        ("FloorDiv", arrays(2, 2, 2), False),
        ("FloorMod", arrays(5, 5, 5), False),
        ("Mul", arrays(3, 3, 3), True),
        ("LogicalAnd", N_SAMPLES, False),
        ("GatherV2", arrays(2, 2, 2), True),
        ("GatherV2", N_SAMPLES, False),
        ("DynamicStitch", arrays(2, 2, 2), False),
    ],
)
def test_results_at_three_sizes_hold_for_all(op: str, operand: Numbers, holds: bool) -> None:
    assert holds_for_all_sizes(Node("node", op), [N_SAMPLES, operand], 10) is holds


@pytest.mark.parametrize(("offset", "holds"), [(0, True), (1, True), (-1, False), (-10, False)])
def test_whether_there_are_any_holds_for_all_sizes_if_it_holds_for_one_sample(offset: int, holds: bool) -> None:
    node = Node("node", "Cast").with_attrs(DstT=DType("bool"))
    assert holds_for_all_sizes(node, [arrays(10 + offset, 20 + offset, 30 + offset)], 10) is holds


def test_numbers_vary_or_not() -> None:
    assert varies(arrays(1, 2, 3))
    assert not varies(arrays(2, 2, 2))
    assert varies((np.arange(1), np.arange(2), np.arange(3)))


def node_of(function: Callable[..., Any], *inputs: Any) -> tuple[Any, Node]:
    """The op of the only output of a function of integers, and its node."""
    graph = tf.Graph()
    with graph.as_default():
        fed = [tf.compat.v1.placeholder(np.asarray(value).dtype, np.shape(value)) for value in inputs]
        output = function(*fed)
    op = (output[0] if isinstance(output, list) else output).op
    attrs = tuple(sorted((name, read_attribute(value)) for name, value in op.node_def.attr.items()))
    kinds = tuple(tensor("int32") for _ in op.outputs)
    return op, Node(op.name, op.type, outputs=kinds, attrs=attrs)


V = np.array([4, 1, 6], np.int32)
RAW = tf.raw_ops
OPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "AddV2": (lambda x, y: RAW.AddV2(x=x, y=y), (V, np.int32(2))),
    "Sub": (lambda x, y: RAW.Sub(x=x, y=y), (V, np.int32(2))),
    "Mul": (lambda x, y: RAW.Mul(x=x, y=y), (V, V)),
    "FloorDiv": (lambda x, y: RAW.FloorDiv(x=x, y=y), (-V, np.int32(4))),
    "FloorMod": (lambda x, y: RAW.FloorMod(x=x, y=y), (-V, np.int32(4))),
    "Maximum": (lambda x, y: RAW.Maximum(x=x, y=y), (V, np.int32(4))),
    "Less": (lambda x, y: RAW.Less(x=x, y=y), (V, np.int32(4))),
    "Neg": (lambda x: RAW.Neg(x=x), (V,)),
    "Abs": (lambda x: RAW.Abs(x=x), (-V,)),
    "Cast to int64": (lambda x: RAW.Cast(x=x, DstT=tf.int64), (V,)),
    "Cast to float": (lambda x: RAW.Cast(x=x, DstT=tf.float32), (V,)),
    "Cast to bool": (lambda x: RAW.Cast(x=x, DstT=tf.bool), (V,)),
    "Pack": (lambda x, y: RAW.Pack(values=[x, y], axis=1), (V, V)),
    "Unpack": (lambda x: RAW.Unpack(value=x, num=3), (V,)),
    "ConcatV2": (lambda x, y, a: RAW.ConcatV2(values=[x, y], axis=a), (V, V, np.int32(0))),
    "Split": (lambda a, x: RAW.Split(axis=a, value=x, num_split=3), (np.int32(0), V)),
    "SplitV": (
        lambda x, s, a: RAW.SplitV(value=x, size_splits=s, axis=a, num_split=2),
        (V, np.array([1, 2], np.int32), np.int32(0)),
    ),
    "StridedSlice of one": (lambda x: x[1], (V,)),
    "StridedSlice of several": (lambda x: x[-2:], (V,)),
    "StridedSlice backwards": (lambda x: x[::-1], (V,)),
    "StridedSlice with a new axis": (lambda x: x[None, ..., 1:], (V,)),
    "Slice": (lambda x, b, s: RAW.Slice(input=x, begin=b, size=s), (V, np.array([1]), np.array([-1]))),
    "GatherV2": (lambda x, i, a: RAW.GatherV2(params=x, indices=i, axis=a), (V, V[1:2], np.int32(0))),
    "Reshape": (lambda x, s: RAW.Reshape(tensor=x, shape=s), (V, np.array([1, -1]))),
    "Squeeze": (lambda x: RAW.Squeeze(input=x), (V[None],)),
    "ExpandDims": (lambda x, a: RAW.ExpandDims(input=x, axis=a), (V, np.int32(-1))),
    "Fill": (lambda d, v: RAW.Fill(dims=d, value=v), (np.array([2]), np.int32(7))),
    "Range": (lambda a, b, s: RAW.Range(start=a, limit=b, delta=s), (np.int32(1), np.int32(8), np.int32(3))),
    "Prod": (lambda x, a: RAW.Prod(input=x, axis=a), (V, np.array([0]))),
    "Sum keeping axes": (lambda x, a: RAW.Sum(input=x, axis=a, keep_dims=True), (V, np.array([0]))),
    "Max": (lambda x, a: RAW.Max(input=x, axis=a), (V, np.int32(0))),
    "SelectV2": (lambda c, x, y: RAW.SelectV2(condition=c, t=x, e=y), (V > 2, V, -V)),
    "InvertPermutation": (lambda x: RAW.InvertPermutation(x=x), (np.array([2, 0, 1], np.int32),)),
    "BroadcastArgs": (lambda x, y: RAW.BroadcastArgs(s0=x, s1=y), (np.array([4, 1]), np.array([3, 1, 5]))),
    "BroadcastGradientArgs": (
        lambda x, y: [*RAW.BroadcastGradientArgs(s0=x, s1=y)],
        (np.array([4, 1], np.int32), np.array([3, 1, 5], np.int32)),
    ),
    "BroadcastGradientArgs of equal shapes": (
        lambda x, y: [*RAW.BroadcastGradientArgs(s0=x, s1=y)],
        (np.array([4, 3], np.int32), np.array([4, 3], np.int32)),
    ),
    "DynamicStitch": (
        lambda i, j, x, y: RAW.DynamicStitch(indices=[i, j], data=[x, y]),
        (np.array([0, 2], np.int32), np.array([1], np.int32), np.array([5, 6]), np.array([7])),
    ),
}


@pytest.mark.parametrize("case", OPS)
def test_ops_are_evaluated_as_tensorflow_does(case: str) -> None:
    function, inputs = OPS[case]
    op, node = node_of(function, *inputs)
    operands = [*inputs]
    if node.op == "StridedSlice":
        operands += [tf.get_static_value(operand) for operand in op.inputs[1:]]
    found = evaluate(node, operands)
    assert found is not None
    with tf.compat.v1.Session(graph=op.graph) as session:
        fed = {tensor.name: value for tensor, value in zip(op.inputs, inputs, strict=False)}
        expected = session.run(list(op.outputs), fed)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_unknown_and_impossible_ops_have_no_value() -> None:
    assert evaluate(Node("n", "Tanh"), [V]) is None
    assert evaluate(Node("n", "AddV2"), [V, np.arange(2)]) is None
    assert evaluate(Node("n", "AddV2"), [np.zeros(LARGEST + 1), 1]) is None
    assert evaluate(Node("n", "Fill"), [np.array([LARGEST + 1]), 1]) is None


def test_large_constants_and_other_ops_have_no_value() -> None:
    captured, _ = analyse(make_loss(lambda b: tf.reduce_mean(b.z + tf.constant(1.5, tf.float64))))
    constants = [node for node in captured.graph.nodes if node.op == "Const"]
    assert 1.5 in [constant_value(node) for node in constants if not node.outputs[0].shape.dims]
    axes = next(node for node in constants if node.outputs[0].shape.dims == (2,))
    assert constant_value(axes, largest=2) is not None
    assert constant_value(axes, largest=1) is None
    assert constant_value(Node("n", "AddV2")) is None


@pytest.mark.parametrize(
    ("compute", "scale", "offset"),
    [
        (lambda b: tf.cast(b.n + 1, tf.float64), 1, 1),
        (lambda b: tf.cast(tf.shape(b.z)[0] * 3 - 2, tf.float64), 3, -2),
        (lambda b: tf.cast(tf.reduce_prod(tf.shape(b.z)) + 1, tf.float64), 4, 1),
    ],
)
def test_sizes_of_a_loss_are_affine_in_the_batch_size(compute: Compute, scale: int, offset: int) -> None:
    _, dependence = analyse(make_loss(lambda b: tf.reduce_sum(b.z) / compute(b)))
    (size,) = dependence.sizes
    assert (int(size.scale), int(size.offset)) == (scale, offset)
