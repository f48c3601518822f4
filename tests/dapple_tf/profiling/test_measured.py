"""``dapple.profile``: what it measures, and that it changes nothing."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.devices import home_device, list_devices
from dapple_tf.errors import BatchError, CaptureError, DappleWarning, LossError, ProfileError
from dapple_tf.frontend.capture import capture
from dapple_tf.profiler.profile import LayerCost, Profile, WholeModel
from dapple_tf.profiling.layer_facts import examine_layers
from dapple_tf.profiling.measured import disagreement
from dapple_tf.profiling.probes import LayerRuns, PlainModel, empty_calls

N = 4
X = np.random.RandomState(0).randn(N, 3).astype(np.float32)


def profiled(loss: Callable[..., Any], batch: Any = (X,), **options: Any) -> Profile:
    """Return a profile of few rounds, without the warning that a tiny model's layers and the whole disagree."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the layers of", DappleWarning)
        return dapple.profile(loss, batch, **{"repeats": 2, **options})


def matrix(rows: int, columns: int) -> tf.Variable:
    return tf.Variable(tf.ones((rows, columns)) * 0.1)


def seconds(profile: Profile) -> tuple[float, float]:
    return sum(x.forward_seconds for x in profile.layers), sum(x.backward_seconds for x in profile.layers)


def test_a_profile_of_a_dense_model(tmp_path: Path) -> None:
    a, b = matrix(3, 5), matrix(5, 2)

    def dense(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.tanh(x @ a) @ b)

    found = profiled(dense, batch_sizes=[9, N, 2, 2])
    assert (found.model, found.batch_size, len(found.layers)) == ("dense", N, 4)
    assert [layer.activation_bytes for layer in found.layers] == [80, 80, 32, 0]
    assert [layer.stash_bytes for layer in found.layers] == [48, 80, 0, 0]
    assert [layer.parameter_bytes for layer in found.layers] == [60, 0, 40, 0]
    assert min(seconds(found)) > 0
    assert [timing.batch_size for timing in found.timings] == [2, 9]
    assert all(sum(t.forward_seconds) > 0 and sum(t.backward_seconds) > 0 for t in found.timings)
    assert found.whole.forward_seconds > 0
    assert found.error is not None
    assert "CPU" in found.device or "GPU" in found.device
    found.save(tmp_path / "p.json")
    assert dapple.Profile.load(tmp_path / "p.json") == found


def test_the_profile_has_the_layers_that_a_pipeline_cuts() -> None:
    model = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(4, name=f"d{i}") for i in range(3))], name="net")

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(model(x))

    step = dapple.pipeline(loss, optimizer=keras.optimizers.SGD(0.1), stages=2, micro_batches=2, example_batch=(X,))
    assert tuple(layer.name for layer in profiled(loss).layers) == step.layer_names


def test_profiling_changes_no_variable_device_or_affinity() -> None:
    norm, counter = keras.layers.BatchNormalization(), tf.Variable(0, trainable=False)
    dropout = keras.layers.Dropout(0.5, seed=3)
    numbers = tf.random.Generator.from_seed(1)
    a = matrix(3, 3)
    norm.build((None, 3))

    def loss(x: tf.Tensor) -> tf.Tensor:
        counter.assign_add(1)
        noise = numbers.normal(tf.shape(x))
        return tf.reduce_mean(dropout(norm(x @ a + noise, training=True), training=True))

    variables = [a, counter, numbers.state, *(v.value for v in (*norm.variables, *dropout.variables))]
    before = [np.array(variable.numpy()) for variable in variables]
    places = [variable.device for variable in variables]
    affinity = os.sched_getaffinity(0)
    profiled(loss, batch_sizes=[2])
    for variable, value, place in zip(variables, before, places, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
        assert variable.device == place
    assert os.sched_getaffinity(0) == affinity


def test_a_failing_loss_changes_no_variable() -> None:
    a, counter = matrix(3, 3), tf.Variable(0, trainable=False)

    def loss(x: tf.Tensor) -> tf.Tensor:
        counter.assign_add(1)
        with tf.control_dependencies([tf.debugging.assert_less(tf.shape(x)[0], 9, "too many rows")]):
            return tf.reduce_mean(x @ a)

    with pytest.raises(RuntimeError, match="too many rows"):
        profiled(loss, batch_sizes=[16])
    assert int(counter) == 0


def test_a_model_of_one_layer() -> None:
    a = matrix(3, 2)

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.tanh(x @ a))

    found = profiled(lambda x: inner(x))
    assert len(found.layers) == 1
    assert found.positions() == ()
    assert min(seconds(found)) > 0
    assert found.layers[0].activation_bytes == 0
    assert found.layers[0].parameter_bytes == 24


def test_a_model_with_a_loop() -> None:
    a = matrix(3, 3)

    @tf.function
    def loss(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = tf.tanh(x @ a)
        return tf.reduce_mean(x)

    with pytest.warns(DappleWarning, match="stash_bytes leaves out lists of unknown length, of the While loops in "):
        found = profiled(loss)
    assert min(seconds(found)) > 0


def test_a_batch_of_dicts_and_a_loss_with_aux_outputs() -> None:
    a = matrix(3, 1)

    def loss(batch: dict[str, tf.Tensor]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        error = batch["x"] @ a - batch["y"]
        return tf.reduce_mean(tf.square(error)), {"worst": tf.reduce_max(error)}

    batch_dict = {"y": np.zeros((N, 1), np.float32), "x": X}
    for batch in (batch_dict, (batch_dict,), [batch_dict]):
        found = profiled(loss, batch, batch_sizes=[6])
        assert found.batch_size == N
        assert min(seconds(found)) > 0
    turned = profiled(loss, dict(reversed(batch_dict.items())))
    assert [layer.stash_bytes for layer in turned.layers] == [layer.stash_bytes for layer in found.layers]
    assert [layer.name for layer in turned.layers] == [layer.name for layer in found.layers]


def test_layers_are_measured_in_runs_of_consecutive_ones() -> None:
    matrices = [matrix(64, 64) for _ in range(6)]

    def loss(x: tf.Tensor) -> tf.Tensor:
        for a in matrices:
            x = tf.tanh(x @ a)
        return tf.reduce_mean(x)

    batch = tf.ones((256, 64))
    device, home = list_devices()[0], home_device()
    facts = examine_layers(capture(loss, (batch,)), 256)
    runs = LayerRuns.build(facts, 3, device, home)
    assert (len(runs.bounds), runs.bounds[0], runs.bounds[-1]) == (4, 0, 13)
    found = runs.probe([batch])()
    assert found.shape == (6,)
    assert (found > 0).all()
    # Medians of three rounds are 5 (forward) and 7 (backward) for every run; a call that does nothing takes 1.
    rounds = np.array([[4.0] * 3 + [7.0] * 3, [5.0] * 3 + [6.0] * 3, [9.0] * 3 + [8.0] * 3])
    forward, backward = runs.split(rounds, 1.0)
    assert forward.sum() == pytest.approx(12)
    assert backward.sum() == pytest.approx(18)
    assert (forward[::2][:-1] > forward[1::2]).all()  # products outweigh tanh
    # Without calls of 4 seconds 1 of 5 and 3 of 7 would remain, but at least half counts as the run's own.
    assert [part.sum() for part in runs.split(rounds, 4.0)] == pytest.approx([7.5, 10.5])


def test_runs_are_longer_where_a_gradient_needs_a_tensor_of_an_earlier_layer() -> None:
    a, b, c = (matrix(3, 3) for _ in range(3))

    def loss(x: tf.Tensor) -> tf.Tensor:
        first = tf.tanh(x @ a)

        @tf.custom_gradient
        def scaled(y: tf.Tensor) -> Any:
            return y * 2, lambda upstream: upstream * first

        return tf.reduce_mean(scaled(tf.tanh(tf.tanh(first * 1 @ b) @ c)))

    facts = examine_layers(capture(loss, (X,)), N)
    runs = LayerRuns.build(facts, 8, list_devices()[0], home_device())
    assert (runs.probe([tf.constant(X)])() > 0).all()


def test_the_plain_model_and_empty_calls_take_time() -> None:
    a = matrix(3, 3)
    plain = PlainModel(lambda x: (tf.reduce_mean(x @ a), {"aux": x}), (X,), list_devices()[0])
    assert float(plain.forward()[0]) > 0
    assert float(plain.both()[0]) > 0
    assert empty_calls(list_devices()[0])().sum() > 0


def whole(forward: float, backward: float, measured: tuple[float, float] | None) -> Profile:
    layer = LayerCost("one", forward, backward, 0, 0, 0)
    return Profile("m", 1, "d", (layer,), whole=None if measured is None else WholeModel(*measured), error=0.02)


def test_disagreement_is_the_sum_over_the_whole() -> None:
    assert disagreement(whole(1, 2, (0.5, 1.5))) == pytest.approx(0.5)
    assert disagreement(whole(1, 2, (3, 1))) == pytest.approx(-0.25)
    assert disagreement(whole(1, 2, None)) is None


def test_a_sum_that_is_far_from_the_whole_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    a = matrix(3, 3)
    monkeypatch.setattr(PlainModel, "both", lambda self: np.array([1000.0]))  # so slow that no layers could sum to it
    with pytest.warns(DappleWarning, match="the layers of big sum to .* ms, which is -100% from the "):
        found = dapple.profile(lambda x: tf.reduce_mean(x @ a), (X,), repeats=2, model="big")
    assert found.whole.forward_seconds + found.whole.backward_seconds > 1


@pytest.mark.parametrize(
    ("batch", "options", "error", "message"),
    [
        ((X,), {"repeats": 0}, ProfileError, "repeats=0: at least one is needed"),
        ((X,), {"batch_sizes": [2, 0]}, ProfileError, r"batch_sizes=\[2, 0\]: 0 is less than one sample"),
        ((), {}, BatchError, "the batch has no tensors: at least one argument must be an array"),
        ((X[:0],), {}, BatchError, "the batch is empty"),
        ((np.float32(1),), {}, BatchError, r"first tensor has shape \(\): axis 0 must be the number of samples"),
        ((X, X[:2]), {}, BatchError, "not batched alike on axis 0"),
    ],
)
def test_invalid_options_are_refused(batch: Any, options: Any, error: type[Exception], message: str) -> None:
    a = matrix(3, 3)
    with pytest.raises(error, match=message):
        dapple.profile(lambda *x: tf.reduce_mean(x[0] @ a), batch, **options)


def test_the_part_of_a_loss_that_runs_once_is_no_layer() -> None:
    a, b = matrix(3, 3), matrix(3, 3)

    def loss(x: Any) -> Any:
        z = tf.tanh(tf.tanh(x @ a) @ b)
        return tf.reduce_mean(tf.nn.softmax(z @ tf.transpose(z)) ** 2)

    found = profiled(loss, batch_loss=True)
    assert [layer.name for layer in found.layers] == ["matmul", "Tanh", "matmul_1", "Tanh_1"]
    assert len(profiled(loss).layers) > 4


def test_losses_that_a_pipeline_refuses_are_refused() -> None:
    with pytest.raises(CaptureError, match="uses no trainable variable"):
        profiled(lambda x: tf.reduce_mean(x))
    a = matrix(3, 3)
    with pytest.raises(LossError, match="has shape"):
        profiled(lambda x: x @ a)
