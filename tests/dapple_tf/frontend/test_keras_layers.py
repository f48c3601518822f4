"""Ops are marked with the Keras layer whose call created them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.captured import Captured
from tests.dapple_tf.frontend.test_capture import the

X = np.ones((4, 2), np.float32)


def layers_of(captured: Captured) -> list[str]:
    """The paths of leaf layers, in the order of their first ops."""
    return list(dict.fromkeys(node.string("layer") for node in captured.graph.nodes if node.has("layer")))


def test_ops_are_named_by_the_keras_layer_that_made_them() -> None:
    layers = [keras.Input((2,)), keras.layers.Dense(3, name="hidden"), keras.layers.Dense(1, name="out")]
    model = keras.Sequential(layers, name="net")
    captured = capture(lambda x: tf.reduce_mean(model(x)), (X,))
    assert layers_of(captured) == ["net/hidden", "net/out"]
    assert not the(captured.graph, "Mean").has("layer")


def test_nested_models_give_paths() -> None:
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="a")], name="inner")
    outer = keras.Sequential([keras.Input((2,)), inner, keras.layers.Dense(1, name="b")], name="outer")
    assert layers_of(capture(lambda x: tf.reduce_mean(outer(x)), (X,))) == ["outer/inner/a", "outer/b"]


def test_a_layer_called_twice_has_one_name_for_both_calls() -> None:
    dense = keras.layers.Dense(2, name="shared")
    dense.build((None, 2))
    captured = capture(lambda x: tf.reduce_mean(dense(tf.exp(dense(x)))), (X,))
    assert [node.string("layer") for node in captured.graph.nodes if node.op == "MatMul"] == ["shared", "shared"]
    assert not the(captured.graph, "Exp").has("layer")


def test_a_custom_leaf_layer_is_one_layer() -> None:
    class Scale(keras.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(2,))

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.tanh(x * self.scale)

    layer = Scale(name="scale")
    captured = capture_built(layer)
    assert layers_of(captured) == ["scale"]
    assert the(captured.graph, "Tanh").string("layer") == "scale"


def capture_built(layer: keras.Layer) -> Captured:
    layer(X)
    return capture(lambda x: tf.reduce_mean(layer(x)), (X,))


def test_raw_ops_of_a_model_are_within_it_and_no_layer() -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="model")
            self.first, self.last = keras.layers.Dense(2, name="first"), keras.layers.Dense(1, name="last")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.last(tf.tanh(self.first(x)))

    captured = capture_built(Model())
    tanh = the(captured.graph, "Tanh")
    assert not tanh.has("layer")
    assert tanh.string("within") == "model"
    assert layers_of(captured) == ["model/first", "model/last"]


def test_layers_called_in_the_body_of_a_loop_do_not_name_ops_outside() -> None:
    class Tail(keras.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return keras.ops.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, dense(y)), (0, x))[1]

    dense = keras.layers.Dense(2, name="inside")
    dense.build((None, 2))
    tail = Tail(name="tail")

    def loss(x: tf.Tensor) -> tf.Tensor:
        for _ in range(20):
            x = tf.tanh(x)
        return tf.reduce_mean(tail(x))

    captured = capture(loss, (X,))
    assert not any(node.has("layer") or node.has("within") for node in captured.graph.nodes if node.op == "Tanh")
    assert the(captured.graph, "While").string("layer") == "tail"
