"""The sums of a batch norm layer's statistics: those of parts of a batch add up to the batch's."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.batch_norms import BatchNormRecorder, join_sums

ROWS = np.random.default_rng(0).normal(3.0, 2.0, size=(6, 4, 3))


def recorded(layer: keras.layers.BatchNormalization, *parts: Any, masks: Any = None) -> list[Any]:
    recorder = BatchNormRecorder()
    with internals.replace_moments(recorder):
        for i, part in enumerate(parts):
            layer(tf.constant(part), training=True, mask=None if masks is None else tf.constant(masks[i]))
    return recorder.calls


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_of_parts_give_the_statistics_of_the_whole(axis: int, dtype: str) -> None:
    layer = keras.layers.BatchNormalization(axis=axis, dtype=dtype)
    calls = recorded(layer, *np.split(ROWS.astype(dtype), [2, 3]))
    assert [(call.layer, call.rank, call.dtype) for call in calls] == [(layer, 3, dtype)] * 3
    assert {call.sums.dtype.name for call in calls} == {"float64"}
    mean, variance = join_sums(tf.add_n([call.sums for call in calls]))
    others = (0, 1) if axis == -1 else (0, 2)
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(mean, ROWS.mean(others), rtol=tolerance)
    np.testing.assert_allclose(variance, ROWS.var(others), rtol=tolerance)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_mask_weighs_each_part_by_what_it_keeps(channels: int) -> None:
    layer = keras.layers.BatchNormalization(dtype="float64")
    mask = np.random.default_rng(1).random(ROWS.shape[:2]) < 0.4
    rows = ROWS[..., :channels]
    calls = recorded(layer, *np.split(rows, 3), masks=np.split(mask, 3))
    mean, variance = join_sums(tf.add_n([call.sums for call in calls]))
    np.testing.assert_allclose(mean, rows[mask].mean(0), rtol=1e-6)  # Keras adds 1e-7 to what it divides by
    np.testing.assert_allclose(variance, rows[mask].var(0), rtol=1e-6)


def test_no_samples_give_zeros() -> None:
    mean, variance = join_sums(tf.zeros([3, 2], tf.float64))
    assert (mean.numpy().tolist(), variance.numpy().tolist()) == ([0, 0], [0, 0])


def test_a_frozen_layer_and_one_in_inference_mode_are_not_recorded() -> None:
    layer, frozen = keras.layers.BatchNormalization(), keras.layers.BatchNormalization(trainable=False)
    recorder = BatchNormRecorder()
    with internals.replace_moments(recorder):
        layer(tf.ones([2, 3]), training=False)
        frozen(tf.ones([2, 3]), training=True)
    assert recorder.calls == []
