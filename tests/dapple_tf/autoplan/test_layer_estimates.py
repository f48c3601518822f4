"""Costs from shapes: the multiply-adds of ops, counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.autoplan.layer_estimates import estimate_costs, estimate_node_seconds
from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.shapes import infer_shapes
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.graph_passes.analysis.op_costs import flops
from dapple_tf.graph_passes.ir.graph import Node, Shape, Value, attributes, tensor
from tests.dapple_tf.builders import X, chain, layers_of

SCALE = tf.Variable(1.0)
IMAGES = np.ones((2, 6, 6, 3), np.float32)


def counted(loss: Callable[[tf.Tensor], tf.Tensor], batch: np.ndarray, op: str) -> float:
    """The operations of the nodes of kind ``op`` for two samples."""
    captured = capture(tf.function(lambda x: tf.reduce_mean(loss(x) * SCALE), autograph=False), (batch,))
    shapes = infer_shapes(captured, 2)
    nodes = [node for node in captured.graph.nodes if node.op == op]
    assert nodes
    return sum(flops(node, shapes) for node in nodes)


def depthwise(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    return tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME")


@pytest.mark.parametrize(
    ("op", "loss", "batch", "expected"),
    [
        ("MatMul", lambda x: x @ tf.ones((4, 5)), X, 2 * 2 * 4 * 5),
        ("MatMul", lambda x: tf.matmul(x, tf.ones((5, 4)), transpose_b=True), X, 2 * 2 * 4 * 5),
        ("MatMul", lambda x: tf.matmul(x, x, transpose_a=True), X, 2 * 4 * 2 * 4),
        ("BatchMatMulV2", lambda x: tf.matmul(x, tf.ones((1, 6, 3, 5))), IMAGES, 2 * 2 * 6 * 6 * 3 * 5),
        ("BatchMatMulV2", lambda x: tf.matmul(x, x, adjoint_a=True), IMAGES, 2 * 2 * 6 * 3 * 6 * 3),
        ("Conv2D", lambda x: tf.nn.conv2d(x, tf.ones((3, 3, 3, 7)), 1, "SAME"), IMAGES, 2 * 2 * 36 * 7 * 27),
        ("Conv2D", lambda x: tf.nn.conv2d(x, tf.ones((3, 3, 3, 7)), 2, "VALID"), IMAGES, 2 * 2 * 4 * 7 * 27),
        ("DepthwiseConv2dNative", lambda x: depthwise(x, tf.ones((3, 3, 3, 2))), IMAGES, 2 * 2 * 36 * 6 * 9),
        ("Einsum", lambda x: tf.einsum("bhwc,cd->bhwd", x, tf.ones((3, 5))), IMAGES, 2 * 2 * 36 * 3 * 5),
        ("Einsum", lambda x: tf.einsum("...c,cd->...d", x, tf.ones((3, 5))), X[:, :3], 2 * 2 * 3 * 5),
        ("Einsum", lambda x: tf.einsum("...c,cd->...d", x, tf.ones((3, 5))), IMAGES, 2 * 2 * 36 * 3 * 5),
        ("Exp", lambda x: tf.exp(x), X, 0),
    ],
)  # fmt: skip
def test_operations_are_counted(
    op: str, loss: Callable[[tf.Tensor], tf.Tensor], batch: np.ndarray, expected: float
) -> None:
    assert counted(loss, batch, op) == expected


def test_unknown_shapes_cost_nothing() -> None:
    assert flops(Node("m", "MatMul", (Value("a"),)), {}) == 0
    product = Node("m", "MatMul", (Value("a"),), (tensor("float32"),), attributes({"transpose_a": False}))
    assert flops(product, {"m": (Shape(None),), "a": (Shape(None),)}) == 0


def test_a_node_takes_the_longer_of_arithmetic_and_memory() -> None:
    def seconds(op: str, width: int) -> float:
        attrs = attributes({"transpose_a": False})
        node = Node("m", op, (Value("a"),), (tensor("float32", None, 4),), attrs)
        return estimate_node_seconds(node, {"m": (Shape((8, 4)),), "a": (Shape((8, width)),)})

    assert seconds("Exp", 1) > 0
    assert seconds("MatMul", 1) == seconds("Exp", 1), "bound by memory"
    assert seconds("MatMul", 2000) == pytest.approx(2 * seconds("MatMul", 1000)), "bound by arithmetic"


def test_a_wider_layer_costs_more_and_sends_more() -> None:
    wide = np.ones((8, 4), np.float32)
    first, second = tf.Variable(tf.ones((4, 512))), tf.Variable(tf.ones((512, 8)))

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.tanh(tf.tanh(x @ first) @ second))

    captured = capture(loss, (wide,))
    layers, shapes = find_layers(captured.graph), infer_shapes(captured, 8)
    names = [layers.graph.node(layer.nodes[0]).op for layer in layers.layers]
    assert names == ["MatMul", "Tanh", "MatMul", "Tanh", "Mean"]
    costs = estimate_costs(layers, shapes)
    crossing = costs.cuts
    assert max(costs.layers) == costs.layers[0]
    assert crossing[0] == crossing[1] == pytest.approx(64 * crossing[2])  # 512 columns against 8


def test_there_is_one_cost_for_each_layer_and_each_cut() -> None:
    _, loss = chain(3)
    layers = layers_of(loss)
    shapes = infer_shapes(capture(loss, (X,)), 4)
    costs = estimate_costs(layers, shapes)
    assert len(costs.layers) == len(layers.layers) == len(costs.cuts) + 1
    assert costs.layers[0] == costs.layers[1] == costs.layers[2] > 0


def test_inferred_shapes_have_the_batch_size() -> None:
    captured = capture(lambda x: tf.reduce_mean(tf.reshape(x, (-1, 2)) * SCALE), (X,))
    shapes = infer_shapes(captured, 6)
    assert shapes["input/0"] == (Shape((6, 4)),)
    (reshape,) = (node.name for node in captured.graph.nodes if node.op == "Reshape")
    assert shapes[reshape] == (Shape((12, 2)),)
    assert shapes[next(iter(captured.variables))] == (Shape(()),)
