"""Custom gradients that capture tensors may be cut anywhere: what a gradient of a later stage uses is sent to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import CaptureError
from dapple_tf.frontend.trace import trace_loss
from dapple_tf.graph_passes.analysis.layers import find_layers
from tests.equality.one_device import Problem, compare
from tests.equality.small_models import WIDTH, data, sgd, weights


@tf.custom_gradient
def log1pexp(x: Any) -> Any:
    e = tf.exp(x)
    return tf.math.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))


@tf.custom_gradient
def nested(x: Any) -> Any:
    inner = log1pexp(x)
    outer = log1pexp(inner * 2)
    return outer * inner, lambda dy: dy * outer + inner


@tf.custom_gradient
def two_results(x: Any) -> Any:
    a = tf.sigmoid(x)
    b = tf.cos(a)
    return (a * 2, b * a), lambda first, second: first * a + second * b


@tf.custom_gradient
def of_a_loop(x: Any) -> Any:
    _, y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.sin(y) + x), (0, x))
    e = tf.cos(y)
    return e * 2, lambda dy: dy * y * e


@tf.custom_gradient
def of_a_list(x: Any) -> Any:
    found = tf.TensorArray(tf.float64, 2, element_shape=[None, WIDTH]).write(0, x).write(1, tf.sigmoid(x))
    return tf.reduce_sum(found.stack(), 0), lambda dy: dy * found.read(1)


def of_another_layer(x: Any) -> Any:
    h = tf.sin(x)

    @tf.custom_gradient
    def squash(y: Any) -> Any:
        return tf.tanh(y), lambda dy: dy * tf.sigmoid(h)

    return squash(h * 2)


def recomputed(x: Any) -> Any:
    h = tf.sin(x)
    return tf.recompute_grad(lambda y: tf.tanh(tf.sin(y + h) * 2))(x)


def rounded(x: Any) -> Any:
    return tf.sin(tf.grad_pass_through(tf.round)(x * 3))


FACTORS = np.linspace(0.5, 1.5, 100 * WIDTH).reshape(100, WIDTH)


def scaled_from_outside() -> Callable[[Any], Any]:
    """Return a function whose gradient alone reads a variable, a small constant and a large one."""
    outside: list[Any] = []

    @tf.custom_gradient
    def scaled(x: Any) -> Any:
        with tf.init_scope():
            outside[:] = outside or [tf.Variable(0.3, dtype=tf.float64), *map(tf.constant, (FACTORS[0], FACTORS))]
        rate, small, large = outside
        return tf.identity(x), lambda dy: -rate * dy * small * tf.reduce_mean(large, axis=0)

    return scaled


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "log1pexp": log1pexp,
    "nested": nested,
    "two results": lambda x: sum(two_results(x)),
    "of a loop": of_a_loop,
    "of a list": of_a_list,
    "of another layer": of_another_layer,
    "recomputed": recomputed,
    "rounded": rounded,
    "from outside": scaled_from_outside(),
}


def problem_of(function: Callable[..., Any]) -> Problem:
    first, second = weights(2)

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.reduce_sum(tf.square(function(x @ first) @ second - y), 1))

    return Problem(loss_fn, {"w0": first, "w1": second}, sgd)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_model_cut_before_any_op_of_a_custom_gradient_trains_as_on_one_device(function: Callable[..., Any]) -> None:
    problem, batch = problem_of(function), data(6)
    layers = find_layers(trace_loss(problem.loss_fn, batch, 6).graph)
    names = [layers.layers[position].name for position in layers.positions()]
    for first in range(0, len(names), 7):  # there are eight devices
        starts = names[first : first + 7]
        compare(problem, [batch, batch], stages=starts, micro_batches=3).check(1e-12)


@pytest.mark.parametrize("options", [{"replicas": [1, 2, 1]}, {"batch_loss": True}, {"recompute": True}], ids=str)
def test_what_a_custom_gradient_captures_is_sent_to_other_replicas_and_computed_again(options: dict[str, Any]) -> None:
    compare(problem_of(nested), [data(8)], stages=3, micro_batches=2, **options).check(1e-12)


def reading_step(rate: tf.Variable, *, nested_function: bool = False, written: bool = False) -> Any:
    """Return a training step with a custom gradient that reads ``rate``."""
    w = tf.Variable(np.ones([WIDTH, WIDTH]) / WIDTH)

    def scale(x: Any) -> Any:
        return tf.custom_gradient(lambda x: (tf.identity(x), lambda dy: rate * dy))(x)

    function = tf.function(scale) if nested_function else scale

    def train_step(x: Any, y: Any) -> Any:
        if written:
            rate.assign_add(1.0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(function(x @ w) - y))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    return train_step


def test_a_variable_that_is_written_before_a_gradient_reads_it_is_refused() -> None:
    rate = tf.Variable(0.3, dtype=tf.float64, trainable=False, name="rate")
    step = dapple.train_step(reading_step(rate, written=True), stages=1, micro_batches=2)
    with pytest.raises(CaptureError, match=r"test_custom_gradients.py:\d+: a custom gradient reads .*'rate'.*identity"):
        step(*data(4))


def test_a_loss_that_writes_what_its_gradient_reads_is_refused() -> None:
    rate, (w,) = tf.Variable(0.3, dtype=tf.float64, trainable=False, name="rate"), weights(1)

    def loss_fn(x: Any, y: Any) -> Any:
        rate.assign_add(1.0)
        hidden = tf.custom_gradient(lambda x: (tf.identity(x), lambda dy: rate * dy))(x @ w)
        return tf.reduce_mean(tf.square(hidden - y))

    with pytest.raises(CaptureError, match="a custom gradient reads the variable 'rate'"):
        dapple.pipeline(loss_fn, optimizer=sgd(), stages=1, micro_batches=2)(*data(4))


def test_a_variable_that_only_a_gradient_in_a_nested_function_reads_is_refused() -> None:
    rate = tf.Variable(0.3, dtype=tf.float64, trainable=False, name="rate")
    step = dapple.train_step(reading_step(rate, nested_function=True), stages=1, micro_batches=2)
    with pytest.raises(
        CaptureError, match=r"a tf.function that 'train_step' calls.*nothing else uses \(rate\).*identity"
    ):
        step(*data(4))


def test_a_gradient_that_uses_what_earlier_gradients_gave_is_refused() -> None:
    w, v = tf.Variable(np.ones([WIDTH, WIDTH]) / WIDTH), tf.Variable(np.ones([WIDTH, WIDTH]) / WIDTH)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ w @ v - y))
        gradient = tape.gradient(loss, v)
        v.assign_sub(0.1 * gradient)
        norm = tf.norm(gradient)
        with tf.GradientTape() as tape:
            hidden = tf.custom_gradient(lambda x: (tf.identity(x), lambda dy: norm * dy))(x @ w)
            loss = tf.reduce_mean(tf.square(hidden @ v - y))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    step = dapple.train_step(train_step, stages=1, micro_batches=2)
    with pytest.raises(
        CaptureError, match=r"test_custom_gradients.py:\d+: the custom gradient of .* make it an argument"
    ):
        step(*data(4))


def dense_labels(y: Any, p: Any) -> Any:
    samples = tf.shape(y)[0]
    return tf.nn.ctc_loss(y, p, tf.fill([samples], 3), tf.fill([samples], 10), logits_time_major=False, blank_index=-1)


def labels_of_zeros(y: Any, p: Any) -> Any:
    lengths = tf.fill([tf.shape(y)[0]], 10)
    return tf.nn.ctc_loss(tf.sparse.from_dense(y), p, None, lengths, logits_time_major=False, blank_index=0)


def all_labels(y: Any) -> Any:
    values = tf.reshape(y, [-1])
    return tf.SparseTensor(tf.where(tf.ones_like(y, tf.bool)), values, tf.cast(tf.shape(y), tf.int64))


def sparse_labels(y: Any, p: Any) -> Any:
    lengths = tf.fill([tf.shape(y)[0]], 10)
    return tf.nn.ctc_loss(all_labels(y), p, None, lengths, logits_time_major=False, blank_index=-1)


def of_the_first_version(y: Any, p: Any) -> Any:
    lengths = tf.fill([tf.shape(y)[0]], 10)
    return tf.compat.v1.nn.ctc_loss(all_labels(y), tf.transpose(p, [1, 0, 2]), lengths)


@pytest.mark.parametrize("batch_loss", [False, True])
@pytest.mark.parametrize(
    "loss",
    [keras.losses.CTC(), dense_labels, labels_of_zeros, sparse_labels, of_the_first_version],
    ids=["keras", "dense", "zeros", "sparse", "v1"],
)
@pytest.mark.parametrize("stages", [2, 3])
def test_a_ctc_loss_is_cut_and_trains_as_on_one_device(loss: Any, stages: int, batch_loss: bool) -> None:
    keras.utils.set_random_seed(1)
    dense = [keras.layers.Dense(width, activation) for width, activation in ((8, "relu"), (8, "relu"), (6, None))]
    model = keras.Sequential([keras.Input((10, 4)), *dense])
    random = np.random.default_rng(0)
    batch = random.normal(size=(8, 10, 4)).astype("float32"), random.integers(1, 5, size=(8, 3)).astype("int32")

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(loss(y, model(x, training=True)))

    options = {"stages": stages, "micro_batches": 4, "batch_loss": batch_loss}
    compare(Problem.of_model(model, loss_fn, sgd), [batch], **options).check(1e-5)
