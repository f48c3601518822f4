"""Layers whose statistics replicas can join, and layers that are refused."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.trace import trace_loss
from tests.equality.test_batch_norm import Counting, OwnMoments, Unbiased

WIDTH = 3
X = tf.ones([6, WIDTH], tf.float64)
BASE = keras.layers.BatchNormalization


def trace(layer: Any, *, within: Any = None) -> Captured:
    """The traced loss of ``layer`` behind a weight, called as it is, or by ``within``."""
    weight = tf.Variable(tf.eye(WIDTH, dtype=tf.float64))
    layer.build((None, WIDTH))
    call = within or (lambda x: layer(x, training=True))
    return trace_loss(lambda x: tf.reduce_mean(call(x @ weight) ** 2), (X,), 6, "allow", batch_norm="sync")


def joins(captured: Captured) -> list[str]:
    return [node.string("join") for node in captured.graph.nodes if node.has("join")]


@pytest.mark.parametrize("options", [{}, {"renorm": True}, {"scale": False, "center": False}, {"axis": 1}])
def test_the_layer_of_keras_is_joined(options: dict[str, Any]) -> None:
    captured = trace(BASE(dtype="float64", **options))
    assert joins(captured) == ["moments"]
    assert [reason.why.rsplit("; ", 1)[-1] for reason in captured.dependence.exactness.reasons] == [
        "it takes them over all replicas"
    ]


def test_a_layer_that_only_infers_is_not_joined() -> None:
    layer = BASE(dtype="float64")
    assert joins(trace(layer, within=lambda x: layer(x, training=False))) == []


def test_statistics_of_the_arguments_are_the_whole_batchs() -> None:
    layer, weight = BASE(dtype="float64"), tf.Variable(tf.eye(WIDTH, dtype=tf.float64))
    layer.build((None, WIDTH))
    captured = trace_loss(lambda x: tf.reduce_mean((layer(x, training=True) @ weight) ** 2), (X,), 6, batch_norm="sync")
    assert joins(captured) == []
    assert captured.dependence.exactness.exact


class Shifting(BASE):
    """A layer that also takes the largest entry of the micro-batch."""

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        normalised = super().call(inputs, training=training, mask=mask)
        return normalised - tf.reduce_max(inputs, 0)


class Centring(BASE):
    """A layer that hands on what is left of its input without the micro-batch's mean."""

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        centred = inputs - tf.reduce_mean(inputs, 0)
        return super().call(centred, training=training, mask=mask)


def test_a_layer_that_computes_with_the_number_of_its_samples_is_refused() -> None:
    says = r"batch_norm='sync': layer 'odd' computes with the number of its samples .*Take batch_norm='micro-batch'"
    with pytest.raises(CaptureError, match=says):
        trace(Unbiased(dtype="float64", name="odd"))


@pytest.mark.parametrize("kind", [OwnMoments, Shifting, Centring])
def test_a_layer_with_statistics_of_its_own_is_refused(kind: type[Any]) -> None:
    says = r"batch_norm='sync': layer 'odd' computes statistics in a way of its own .*take batch_norm='micro-batch'"
    with pytest.raises(CaptureError, match=says):
        trace(kind(dtype="float64", name="odd"))


def test_what_else_a_layer_does_is_no_reason_to_refuse_it() -> None:
    assert joins(trace(Counting(dtype="float64"))) == ["moments"]


def test_a_layer_in_a_function_of_its_own_is_refused() -> None:
    layer = BASE(dtype="float64", name="inside")
    inner = tf.function(lambda x: layer(x, training=True))
    with pytest.raises(CaptureError, match=r"batch_norm='sync': .* of layer 'inside': the layer is called in a nested"):
        trace(layer, within=inner)


def test_a_layer_in_a_loop_is_refused() -> None:
    layer = BASE(dtype="float64", name="inside")

    def loop(x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, layer(h, training=True)), (0, x))[1]

    with pytest.raises(CaptureError, match=r"batch_norm='sync': .* of layer 'inside': the layer is called in a nested"):
        trace(layer, within=loop)
