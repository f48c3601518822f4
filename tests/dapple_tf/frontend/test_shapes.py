"""Shapes at a known batch size, and which axes hold the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.shapes import infer_batch_axes, infer_shapes, mark_batch
from dapple_tf.graph_passes.ir.graph import OTHER, Graph, Node, Shape, tensor

X = np.ones((6, 4), np.float32)
W = tf.Variable(tf.ones([4, 3]), name="w")


def dims(shapes: Any, name: str) -> Any:
    return shapes[name][0].dims


def test_every_node_gets_its_shape_at_the_batch_size() -> None:
    scale = tf.range(400.0)  # large enough to be captured

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.matmul(x, W, name="product")
        return tf.reduce_mean(tf.reshape(y, [-1], name="flat")) * scale[0]

    captured = capture(loss, (X,))
    shapes = infer_shapes(captured, 5)
    assert dims(shapes, "product") == (5, 3)
    assert dims(shapes, "flat") == (15,)
    assert dims(shapes, "input/0") == (5, 4)
    assert dims(shapes, "w") == (4, 3)  # of the variable, not of its resource
    assert dims(shapes, "capture/0") == (400,)
    assert shapes.keys() >= {node.name for node in captured.graph.nodes}


def test_a_batch_size_that_the_model_refuses_gives_no_shapes() -> None:
    captured = capture(lambda x: tf.reduce_mean(tf.reshape(x @ W, [-1, 2, 3])), (X,))
    assert infer_shapes(captured, 3) == {}
    assert infer_shapes(captured, 4) != {}


def test_lengths_that_only_the_data_tells_stay_unknown() -> None:
    captured = capture(lambda x: tf.reduce_mean(tf.boolean_mask(x @ W, x[:, 0] > 0)), (X,))
    shapes = infer_shapes(captured, 5)
    (gathered,) = (node.name for node in captured.graph.nodes if node.op == "GatherV2")
    assert dims(shapes, gathered) == (None, 3)


def test_only_axes_of_the_batchs_length_are_batch_axes() -> None:
    """Pairs of samples, several rows a sample, and lengths that depend on the data are not."""

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.matmul(x, W, name="product")
        pairs = tf.reshape(y, [-1, 2, 3], name="pairs")
        rows = tf.reshape(y, [-1, 1], name="rows")
        mask = tf.boolean_mask(y, x[:, 0] > 0)
        turned = tf.transpose(y, name="turned")
        return tf.reduce_mean(pairs) + tf.reduce_mean(rows) + tf.reduce_mean(mask) + tf.reduce_mean(turned)

    captured, shapes = infer_batch_axes(capture(loss, (X,)), 6)
    found = {name: captured.graph.node(name).outputs[0].shape.dims for name in ("product", "pairs", "rows", "turned")}
    assert found == {"product": (None, 3), "pairs": (OTHER, 2, 3), "rows": (OTHER, 1), "turned": (3, None)}
    (gathered,) = (node for node in captured.graph.nodes if node.op == "GatherV2")
    assert gathered.outputs[0].shape.dims == (OTHER, 3)
    assert dims(shapes, "rows") == (18, 1)


def test_marking_leaves_known_lengths_and_unknown_ranks_alone() -> None:
    nodes = (
        Node("known", "Op", outputs=(tensor("float32", 7, None),)),
        Node("rank", "Op", outputs=(tensor("float32", None, None), tensor("int32", None))),
        Node("nothing", "Op", outputs=(tensor("float32", None),)),
    )
    unknown = Node("unranked", "Op", outputs=(tensor("float32"),))
    shapes = {"known": (Shape((7, 6)),), "rank": (Shape((6, 5)), Shape(None))}
    marked = mark_batch(Graph("g", (*nodes, unknown)), shapes, 6)
    assert [[kind.shape.dims for kind in node.outputs] for node in marked.nodes] == [
        [(7, None)],
        [(None, OTHER), (OTHER,)],
        [(OTHER,)],  # of which nothing was inferred
        [()],
    ]
