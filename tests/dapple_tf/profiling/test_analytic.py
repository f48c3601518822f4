"""Profiles of models that are not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import BatchError, ProfileError
from dapple_tf.graph_passes.analysis.op_costs import OpClass
from dapple_tf.profiler.peaks import Peak

SLOW = Peak("slow", 10.0, float("inf"), 0.0, 0.5)
"""Ten FLOP per second at peak, of which half is attainable."""


def dense() -> Any:
    a, b = tf.Variable(tf.ones((3, 5))), tf.Variable(tf.ones((5, 2)))
    return lambda x: tf.reduce_mean(tf.tanh(x @ a) @ b)


def test_seconds_are_flops_over_the_attainable_rate() -> None:
    found = dapple.analytic_profile(dense(), (tf.TensorSpec((4, 3), tf.float32),), SLOW, model="net")
    assert (found.model, found.batch_size, found.device) == ("net", 4, "slow (analytic)")
    first, second = 2 * 4 * 3 * 5, 2 * 4 * 5 * 2
    assert [layer.forward_seconds for layer in found.layers] == [first / 5, 0, second / 5, 0]
    assert [layer.backward_seconds for layer in found.layers] == [first / 5, 0, 2 * second / 5, 0]
    assert [layer.activation_bytes for layer in found.layers] == [80, 80, 32, 0]
    assert [layer.parameter_bytes for layer in found.layers] == [60, 0, 40, 0]
    assert (found.whole, found.error, found.measured_sizes) == (None, None, (1, 2, 4, 8, 16, 32, 64))


def recurrent() -> Any:
    rnn = keras.layers.SimpleRNN(4)
    rnn.build((None, 5, 3))
    matrix = tf.Variable(tf.ones((4, 600)))
    return lambda x: tf.reduce_mean(tf.tanh(rnn(x)) @ matrix)


@pytest.mark.parametrize(("make", "shape"), [(dense, (3,)), (recurrent, (5, 3))])
def test_times_at_other_batch_sizes_are_those_of_a_profile_for_them(make: Any, shape: tuple[int, ...]) -> None:
    loss, peak = make(), Peak("p", 1e6, 1e5, 0.0, 1.0, {}, 1e-3)
    found = dapple.analytic_profile(loss, tf.TensorSpec((20, *shape), tf.float32), peak)
    assert found.measured_sizes == (1, 2, 4, 8, 16, 20, 32, 64)
    for size in (1, 8, 32, 64):
        other = dapple.analytic_profile(loss, tf.TensorSpec((size, *shape), tf.float32), peak)
        for field in ("forward_seconds", "backward_seconds"):
            wanted = [getattr(layer, field) for layer in other.layers]
            np.testing.assert_allclose(getattr(found, field)(size), wanted, rtol=1e-12)
    assert found.forward_seconds(1).sum() > 1.5 * found.forward_seconds(20).sum() / 20  # launches, and weights


def test_a_model_for_one_batch_size_has_times_for_that_alone() -> None:
    a = tf.Variable(tf.ones((3, 5)))
    found = dapple.analytic_profile(lambda x: tf.reduce_mean((x + tf.ones([4, 3])) @ a), tf.TensorSpec((4, 3)), SLOW)
    assert found.measured_sizes == (4,)


def test_a_loop_takes_the_time_of_its_body_in_every_round() -> None:
    rnn = keras.layers.SimpleRNN(4, name="rnn")
    rnn.build((None, 5, 3))
    found = dapple.analytic_profile(lambda x: tf.reduce_mean(rnn(x)), (tf.TensorSpec((2, 5, 3), tf.float32),), SLOW)
    (loop,) = (layer for layer in found.layers if layer.forward_seconds)
    assert loop.name.endswith("while")
    assert loop.forward_seconds == 5 * 2 * 2 * (3 + 4) * 4 / 5  # five positions, two samples
    assert loop.backward_seconds == 2 * loop.forward_seconds


def test_each_kind_of_op_takes_its_own_fraction_of_the_rates() -> None:
    rnn = keras.layers.SimpleRNN(4, name="rnn")
    rnn.build((None, 5, 8))
    kernel, matrix = tf.Variable(tf.ones((3, 3, 2, 4))), tf.Variable(tf.ones((4, 8)))

    def loss(x: tf.Tensor) -> tf.Tensor:
        y = tf.nn.conv2d(x, kernel, 1, "SAME")
        y = tf.reshape(y, [-1, 5, 4]) @ matrix
        return tf.reduce_mean(rnn(y))

    spec = tf.TensorSpec((2, 5, 1, 2), tf.float32)

    def forward(by_class: Mapping[OpClass, float]) -> float:
        peak = Peak("p", 10.0, float("inf"), 0.0, 1.0, by_class)
        return sum(layer.forward_seconds for layer in dapple.analytic_profile(loss, (spec,), peak).layers)

    of_each: Mapping[OpClass, float] = {
        "convolution": 2 * 2 * 5 * 3 * 3 * 2 * 4 / 10,
        "product": 2 * 2 * 5 * 4 * 8 / 10,
        "loop": 5 * 2 * 2 * (8 + 4) * 4 / 10,
    }
    assert forward({}) == pytest.approx(sum(of_each.values()))
    for kind, seconds in of_each.items():
        assert forward({kind: 0.5}) == pytest.approx(forward({}) + seconds)


def test_a_loop_over_no_list_counts_as_one_round() -> None:
    kernel = tf.Variable(tf.ones((3, 3)))

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.while_loop(lambda i, _: i < 4, lambda i, y: (i + 1, y @ kernel), (0, x))[1])

    found = dapple.analytic_profile(loss, (tf.TensorSpec((2, 3), tf.float32),), SLOW)
    assert sum(layer.forward_seconds for layer in found.layers) == 2 * 2 * 3 * 3 / 5


def test_arrays_and_specs_give_the_same_profile() -> None:
    loss = dense()
    specs, arrays = tf.TensorSpec((4, 3), tf.float32), np.ones((4, 3), np.float32)
    assert dapple.analytic_profile(loss, (specs,)) == dapple.analytic_profile(loss, arrays)


def test_analysing_a_loss_runs_no_op() -> None:
    a, counter = tf.Variable(tf.ones((3, 1))), tf.Variable(0, trainable=False)

    def loss(x: tf.Tensor) -> tf.Tensor:
        counter.assign_add(1)
        with tf.control_dependencies([tf.debugging.Assert(tf.shape(x)[0] < 0, ["this ran"])]):
            return tf.reduce_mean(x @ a)

    # An array of this size would not fit into memory.
    found = dapple.analytic_profile(loss, (tf.TensorSpec((10**9, 3), tf.float32),), "H100")
    assert int(counter) == 0
    assert sum(layer.stash_bytes for layer in found.layers) == 12 * 10**9


def test_faster_devices_take_less_time() -> None:
    loss, spec = dense(), tf.TensorSpec((512, 3), tf.float32)
    totals = [
        sum(
            layer.forward_seconds + layer.backward_seconds for layer in dapple.analytic_profile(loss, spec, name).layers
        )
        for name in ("V100", "A100", "H100")
    ]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] > 0


def test_dicts_and_aux_outputs() -> None:
    a = tf.Variable(tf.ones((3, 1)))

    def loss(batch: dict[str, tf.Tensor]) -> Any:
        return tf.reduce_mean(batch["x"] @ a - batch["y"]), {"n": tf.reduce_sum(batch["y"])}

    specs = {"y": tf.TensorSpec((8, 1), tf.float32), "x": tf.TensorSpec((8, 3), tf.float32)}
    assert dapple.analytic_profile(loss, specs).batch_size == 8


@pytest.mark.parametrize(
    ("batch", "device", "error", "message"),
    [
        (tf.TensorSpec((4, 3), tf.float32), "P100", ProfileError, "no peak figures are known for device 'P100'"),
        (tf.TensorSpec((None, 3), tf.float32), "V100", BatchError, "axis 0 must be the number of samples"),
        (tf.TensorSpec((0, 3), tf.float32), "V100", BatchError, "the batch is empty"),
        ((), "V100", BatchError, "the batch has no tensors"),
    ],
)
def test_an_unknown_device_or_size_is_refused(batch: Any, device: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dapple.analytic_profile(dense(), batch, device)
