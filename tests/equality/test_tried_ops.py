"""Models with ops that only an experiment describes: a pipeline equals one device, or its first step raises."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import ExactnessError

OPTIONS: Any = {"stages": 2, "micro_batches": 4}


def make_problem(middle: Callable[[Any], Any], scale: float = 1.0) -> tuple[Callable[..., Any], tuple[Any, Any], Any]:
    """Return a loss with ``middle`` between two matrices, a batch of nine samples, and the first matrix."""
    random = np.random.default_rng(0)
    w, v = (tf.Variable(random.normal(size=shape)) for shape in ((5, 9), (9, 1)))

    def loss(x: Any, y: Any) -> Any:
        with tf.name_scope("first"):
            h = tf.tanh(x @ w) * scale
        with tf.name_scope("second"):
            return tf.reduce_mean((tf.ensure_shape(middle(h), [None, 9]) @ v - y) ** 2)

    return loss, (tf.constant(random.normal(size=(9, 5))), tf.constant(random.normal(size=(9, 1)))), w


MIDDLES: dict[str, Callable[[Any], Any]] = {
    "map_fn with a variable": lambda h: tf.map_fn(lambda row: tf.cumsum(row) * tf.reduce_max(row), h),
    "vectorized_map": lambda h: (
        tf.vectorized_map(lambda row: tf.linalg.matvec(tf.reshape(row, [3, 3]), row[:3]), h)
        @ tf.ones([3, 9], tf.float64)
    ),
    "matrix exponential": lambda h: tf.reshape(tf.linalg.expm(tf.reshape(h, [-1, 3, 3])), [-1, 9]),
    "cross product": lambda h: tf.tile(tf.linalg.cross(h[:, :3], h[:, 3:6]), [1, 3]),
}


@pytest.mark.parametrize("name", MIDDLES)
@pytest.mark.parametrize("micro_batches", [4, 9])
def test_a_step_with_a_tried_op_equals_one_device(name: str, micro_batches: int) -> None:
    loss, batch, _ = make_problem(MIDDLES[name])
    options = {"stages": 2, "micro_batches": micro_batches, "optimizer": keras.optimizers.Adam(0.01)}
    report = dapple.verify(loss, batch=batch, **options)
    assert report.ok, report


def test_exactness_and_one_line_on_stderr_name_the_tried_ops(capfd: pytest.CaptureFixture[str]) -> None:
    loss, batch, _ = make_problem(MIDDLES["cross product"])
    step = dapple.pipeline(loss, optimizer=keras.optimizers.SGD(0.1), **OPTIONS)
    for _ in range(2):
        step(*batch)
    assert step.exactness.exact
    assert [(tried.op, tried.gives) for tried in step.exactness.tried] == [("Cross", "a row for each sample")]
    assert "Cross" in str(step.exactness)
    assert capfd.readouterr().err.count("Cross (second/Cross) gives a row for each sample") == 1


def couples_large_numbers(h: Any) -> Any:
    """Treat samples one by one up to numbers that no experiment draws, and multiply over samples above."""
    limit = tf.constant(35.0, h.dtype)  # experiments try values of this magnitude, and not of its exponential

    def body(i: Any, h: Any) -> tuple[Any, Any]:
        return i + 1, h * tf.cast(tf.math.cumprod(1 + tf.cast(h > tf.exp(limit), tf.int64), 0), h.dtype)

    return tf.while_loop(lambda i, _: i < 1, body, (0, h))[1]  # the experiment sees arguments and results only


def test_a_first_step_that_differs_from_the_whole_batch_raises_and_trains_nothing() -> None:
    loss, batch, w = make_problem(couples_large_numbers, scale=1e16)
    before = w.numpy()
    step = dapple.pipeline(loss, optimizer=keras.optimizers.SGD(0.1), **OPTIONS)
    with pytest.raises(ExactnessError, match=r"the first run of loss has the loss .* and one device .*micro_batches=1"):
        step(*batch)
    np.testing.assert_array_equal(w.numpy(), before)


@pytest.mark.parametrize(
    ("result", "name"), [("loss", "loss 7.* one device"), ("rows", "result 1 beside its loss, wh")]
)
def test_a_first_run_forward_that_differs_from_the_whole_batch_raises(result: str, name: str) -> None:
    loss, batch, w = make_problem(couples_large_numbers, scale=1e16)
    step = dapple.pipeline(loss, optimizer=keras.optimizers.SGD(0.1), **OPTIONS)

    def rows(x: Any, _: Any) -> Any:
        with tf.name_scope("first"):
            h = tf.tanh(x @ w) * 1e16
        with tf.name_scope("second"):
            return 0.0 * tf.reduce_mean(x), {"rows": couples_large_numbers(h)}

    run = step.forward if result == "loss" else step.forward_of(rows)
    with pytest.raises(ExactnessError, match=f"has the {name}"):
        run(*batch)


def test_where_an_experiment_is_right_for_the_data_the_step_is_exact() -> None:
    loss, batch, w = make_problem(couples_large_numbers)
    with tf.GradientTape() as tape:
        wanted = loss(*batch)
    updated = w.numpy() - 0.1 * tape.gradient(wanted, w).numpy()
    step = dapple.pipeline(loss, optimizer=keras.optimizers.SGD(0.1), **OPTIONS)
    np.testing.assert_allclose(step(*batch), wanted, rtol=1e-12)
    np.testing.assert_allclose(w.numpy(), updated, rtol=1e-6)  # the learning rate is a float32


def text_model(mode: str) -> keras.Model:
    text = keras.layers.TextVectorization(max_tokens=9, output_mode=mode)
    text.adapt(["a b c", "b d", "c a a d"])
    words = keras.Input((1,), dtype="string")
    return keras.Model(words, keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(text(words))))


@pytest.mark.parametrize("mode", ["multi_hot", "tf_idf"])
def test_a_model_that_reads_strings_fits_as_keras_does(mode: str) -> None:
    x = tf.constant([["a b"], ["c d a"], ["d"], ["b b c"]] * 4)
    y = np.random.default_rng(0).normal(size=(16, 1))

    def fit(*, pipelined: bool) -> tuple[list[float], list[Any]]:
        keras.utils.set_random_seed(0)
        model = text_model(mode)
        model.compile("adam", "mse")
        if pipelined:
            dapple.keras.pipeline(model, **OPTIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        return history, [weight.numpy() for weight in model.trainable_variables]

    (wanted, weights), (found, trained) = fit(pipelined=False), fit(pipelined=True)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for one, other in zip(trained, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_dropout_behind_a_layer_that_reads_strings_draws_the_rows_of_one_device() -> None:
    words = keras.Input((1,), dtype="string")
    text = keras.layers.TextVectorization(max_tokens=9, output_mode="tf_idf")
    text.adapt(["a b c", "b d", "c a a d"])
    hidden = keras.layers.Dropout(0.3, seed=1)(text(words))
    model = keras.Model(words, keras.layers.Dense(1, kernel_initializer="ones")(hidden))

    def loss(x: Any, y: Any) -> Any:
        return tf.reduce_mean((model(x, training=True) - y) ** 2)

    batch = tf.constant([["a b"], ["c d a"], ["d"], ["b b c"]]), tf.ones([4, 1])
    report = dapple.verify(loss, batch=batch, optimizer=keras.optimizers.SGD(0.1), stages=2, micro_batches=4)
    assert report.ok, report
