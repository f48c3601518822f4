"""Keras's batch norm takes its input in pieces."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.verification.divided_batch_norm import divide_batch_norm


def test_batch_norm_takes_its_input_in_parts_in_one_graph_only() -> None:
    layer = keras.layers.BatchNormalization(momentum=0.5, dtype="float64")
    rows = tf.constant([[1.0], [3.0], [10.0], [20.0], [30.0], [40.0]], tf.float64)  # two steps a sample
    inner = tf.function(lambda x: layer(x, training=True))

    @tf.function(autograph=False)
    def both(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with divide_batch_norm(lambda layer: [[1], [2]]):
            return layer(x, training=True), inner(x)

    divided, whole = both(rows)
    assert divided.numpy()[:2, 0] == pytest.approx([-1, 1], abs=1e-3)
    assert divided.numpy()[2:, 0].mean() == pytest.approx(0)
    assert divided.shape == rows.shape
    assert whole.numpy()[:2, 0].mean() < -1
    assert layer.moving_mean.numpy() == pytest.approx(((0 / 2 + 2 / 2) / 2 + 25 / 2) / 2 + rows.numpy().mean() / 2)
    assert keras.layers.BatchNormalization.call is keras.layers.BatchNormalization.__dict__["call"]
    assert layer(rows, training=True).numpy() == pytest.approx(whole.numpy())


def test_batch_norm_takes_parts_of_a_mask_too() -> None:
    layer = keras.layers.BatchNormalization(dtype="float64")
    rows = tf.constant(np.arange(12.0).reshape(4, 3, 1))
    mask = tf.constant([[True, True, False]] * 4)

    @tf.function(autograph=False)
    def divided(x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        with divide_batch_norm(lambda layer: [[2, 2]]):
            return layer(x, training=True, mask=mask)

    found = divided(rows, mask).numpy()
    for part in (slice(0, 2), slice(2, 4)):
        assert found[part] == pytest.approx(layer(rows[part], training=True, mask=mask[part]).numpy())


@pytest.mark.parametrize("mask", [None, [[True], [False], [True], [True], [True], [False]]])
def test_deferred_statistics_are_those_of_all_parts_together(mask: list[list[bool]] | None) -> None:
    layer = keras.layers.BatchNormalization(momentum=0.5, dtype="float64")
    layer.build((None, 1, 1))
    rows = tf.constant([[[1.0]], [[3.0]], [[10.0]], [[20.0]], [[30.0]], [[40.0]]], tf.float64)
    kept = None if mask is None else tf.constant(mask)

    @tf.function(autograph=False)
    def divided(x: tf.Tensor) -> tf.Tensor:
        with divide_batch_norm(lambda layer: [[1, 1], [2, 2]], deferred=True):
            return layer(x, training=True, mask=kept)

    found = divided(rows).numpy()[:, 0, 0]
    chosen = rows.numpy()[:, 0, 0] if mask is None else np.array([1.0, 10.0, 20.0, 30.0])
    assert layer.moving_mean.numpy()[0] == pytest.approx(chosen.mean() / 2, rel=1e-6)
    assert layer.moving_variance.numpy()[0] == pytest.approx(0.5 + chosen.var() / 2, rel=1e-6)
    assert found[2:4] == pytest.approx([-1, 1], abs=1e-3)
