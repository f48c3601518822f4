"""Cases in which a pipeline once computed something else, or reported a wrong error."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import CaptureError, PartitionError, PlanError, StepError

X = tf.constant(np.random.default_rng(0).normal(size=(8, 4)))
Y = tf.constant(np.random.default_rng(1).normal(size=(8, 1)))


def matrix(rows: int, columns: int, name: str) -> tf.Variable:
    return tf.Variable(np.random.default_rng(rows * columns).normal(size=(rows, columns)), name=name)


def two_layers() -> Any:
    w, v = matrix(4, 6, "w"), matrix(6, 1, "v")
    return lambda x, y: tf.reduce_mean(tf.square(tf.tanh(x @ w) @ v - y))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_update_starts_from_what_forward_wrote(micro_batches: int) -> None:
    w = matrix(4, 1, "w")
    start = w.numpy()

    def loss_fn(x: Any, y: Any) -> Any:
        w.assign(w * 0.5)
        return tf.reduce_mean(0.0 * x @ w + tf.reduce_sum(w) - y * 0.0)

    dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.125), stages=1, micro_batches=micro_batches)(X, Y)
    np.testing.assert_allclose(w.numpy(), start * 0.5 - 0.125, rtol=1e-12)  # written once a step


def test_rows_that_are_not_in_sample_order_are_not_split() -> None:
    w, v = matrix(4, 3, "w"), matrix(3, 1, "v")
    x = tf.constant(np.random.default_rng(2).normal(size=(6, 5, 4)))

    def loss_fn(x: Any) -> Any:
        rows = tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 4])  # time-major: [5 x batch, 4]
        with tf.name_scope("late"):
            hidden = tf.tanh(rows @ w)
        back = tf.transpose(tf.reshape(hidden, [5, -1, 3]), [1, 0, 2])
        return tf.reduce_mean(tf.square(tf.reduce_sum(back * tf.range(15.0, dtype=tf.float64)[:1], 1) @ v))

    options: dict[str, Any] = {"optimizer": keras.optimizers.SGD(0.1), "micro_batches": 2, "stages": ["late"]}
    assert dapple.verify(loss_fn, batch=(x,), replicas=[2, 2], **options).ok
    with pytest.raises(PartitionError, match="no single batch axis"):
        dapple.verify(loss_fn, batch=(x,), replicas=[1, 2], **options)


def test_a_batch_of_another_nesting_is_traced_again() -> None:
    w = matrix(4, 1, "w")

    def loss_fn(batch: Any) -> Any:
        sign = 1.0 if "plus" in batch else 3.0
        return tf.reduce_mean(sign * (batch["x"] @ w))

    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.0), stages=1, micro_batches=2)
    plus, other = step({"x": X, "plus": Y}), step({"x": X, "qlus": Y})
    np.testing.assert_allclose(float(other), 3 * float(plus), rtol=1e-12)


def test_a_later_dtype_that_needs_another_cast_is_cut_at_the_same_layers() -> None:
    w, v = matrix(4, 5, "w"), matrix(5, 3, "v")

    def loss_fn(x: Any, y: Any) -> Any:
        hidden = tf.tanh(x @ w)
        with tf.name_scope("late"):
            logits = hidden @ v
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))

    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.0), stages=["late"], micro_batches=2)
    labels = np.arange(8) % 3
    losses = [float(step(X, labels.astype(kind))) for kind in ("int64", "int32", "uint8")]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-12)


def test_steps_of_several_threads_do_not_mix() -> None:
    step = dapple.pipeline(two_layers(), optimizer=keras.optimizers.SGD(0.0), stages=2, micro_batches=4)
    _, wanted = step.run_exposed(X, Y)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(15):
            _, found = step.run_exposed(X, Y)
            wrong.extend(name for name in wanted if not np.array_equal(found[name], wanted[name]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_compiling_does_not_break_other_threads_that_build_tuples() -> None:
    stop, failed = threading.Event(), []

    def build_tuples() -> None:
        while not stop.is_set():
            try:
                tuple(i for i in range(300))
            except SystemError as error:
                failed.append(error)

    thread = threading.Thread(target=build_tuples)
    thread.start()
    try:
        for _ in range(3):
            dapple.pipeline(two_layers(), optimizer=keras.optimizers.SGD(0.1), stages=2, micro_batches=2)(X, Y)
    finally:
        stop.set()
        thread.join(60)
    assert not failed


def test_a_failure_with_one_micro_batch_names_the_stage() -> None:
    w = matrix(4, 1, "w")

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(tf.debugging.check_numerics(x, "not a number") @ w - y))

    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=1, micro_batches=1)
    with pytest.raises(StepError, match=r"(?s)All variables are as they were before the step.*stage 0.*not a number"):
        step(X * float("nan"), Y)


def test_an_aux_output_whose_batch_axis_is_not_axis_0_is_refused() -> None:
    w = matrix(4, 1, "w")

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(x @ w - y)), {"turned": tf.transpose(x @ w)}

    with pytest.raises(ValueError, match="does not have the batch on axis 0"):
        dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=1, micro_batches=2)(X, Y)


def test_no_optimizer_is_refused() -> None:
    with pytest.raises(PlanError, match="optimizer is None"):
        dapple.pipeline(lambda x: x, optimizer=None)


def test_a_gradient_that_is_only_rounding_error_passes_verification() -> None:
    keras.utils.set_random_seed(0)
    attention = keras.layers.MultiHeadAttention(2, 4, dtype="float64")
    x = tf.constant(np.random.default_rng(3).normal(size=(8, 5, 4)))
    attention(x, x)

    def loss_fn(x: Any) -> Any:
        return tf.reduce_mean(tf.square(attention(x, x)))

    report = dapple.verify(loss_fn, optimizer=keras.optimizers.SGD(0.1), batch=(x,), stages=1, micro_batches=4)
    assert report.ok, str(report)


def test_a_layer_that_holds_nearly_all_the_work_is_warned_of() -> None:
    w = matrix(400, 400, "w")
    inner = tf.function(lambda x: tf.tanh(tf.tanh(x @ w) @ w))

    def loss_fn(x: Any) -> Any:
        return tf.reduce_mean(inner(x))

    x = tf.ones((8, 400), tf.float64)
    with pytest.warns(dapple.errors.DappleWarning, match="'PartitionedCall|'StatefulPartitionedCall.*cannot be cut"):
        dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=2, micro_batches=2)(x)


def test_a_py_function_that_needs_a_gradient_is_refused() -> None:
    w = matrix(4, 1, "w")

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.py_function(tf.square, [x @ w - y], tf.float64))

    with pytest.raises(CaptureError, match=r"is a tf\.py_function between a variable and the loss"):
        dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=1, micro_batches=2, inexact="allow")(X, Y)


@pytest.mark.parametrize(
    "reduce",
    [
        lambda h: tf.linalg.trace(h)[:, tf.newaxis],
        lambda h: tf.reduce_sum(tf.linalg.diag_part(h), 1, keepdims=True),
        lambda h: tf.reduce_sum(tf.linalg.diag(h[:, 0]), [1, 2])[:, tf.newaxis],
        lambda h: tf.reduce_sum(tf.linalg.diag(tf.broadcast_to(h[:, :1, 0], [tf.shape(h)[0], 3])), [1, 2])[:, None],
    ],
    ids=["trace", "diag_part", "diag", "diag of a broadcast"],
)
def test_diagonals_have_their_length_in_backward(reduce: Any) -> None:
    w, v = matrix(4, 9, "w"), matrix(1, 1, "v")

    def loss_fn(x: Any, y: Any) -> Any:
        hidden = tf.reshape(tf.tanh(x @ w), [-1, 3, 3])
        return tf.reduce_mean(tf.square(reduce(hidden) @ v - y))

    options: dict[str, Any] = {"optimizer": keras.optimizers.SGD(0.1), "stages": 2, "micro_batches": 3}
    assert dapple.verify(loss_fn, batch=(X, Y), **options).ok


def causal(hidden: Any) -> Any:
    """Attention as in Whisper's decoder: a mask by a condition on the length, tiled to the batch."""
    samples, length = tf.shape(hidden)[0], tf.shape(hidden)[1]

    def mask() -> Any:
        later = tf.where(tf.range(length) < tf.range(1, length + 1)[:, None], tf.constant(0.0, tf.float64), -1e4)
        return tf.tile(later[tf.newaxis], [samples, 1, 1])

    scores = tf.cond(length > 1, mask, lambda: tf.zeros([samples, length, length], tf.float64))
    return tf.matmul(tf.nn.softmax(scores + tf.matmul(hidden, hidden, transpose_b=True)), hidden)


def padded(hidden: Any) -> Any:
    """A padding to a multiple of a window as in Swin, whose size is an eager tensor."""
    amount = (WINDOW - tf.shape(hidden)[1] % WINDOW) % WINDOW
    return tf.reshape(tf.pad(hidden, [[0, 0], [0, amount], [0, 0]]), [tf.shape(hidden)[0], 2, WINDOW * 3])


WINDOW = tf.constant(4)


@pytest.mark.parametrize("compute", [causal, padded])
@pytest.mark.parametrize("micro_batches", [3, 8])
def test_lengths_that_do_not_depend_on_the_batch_may_decide(compute: Any, micro_batches: int) -> None:
    w, v = matrix(4, 3, "w"), matrix(1, 5, "v")
    x = tf.constant(np.random.default_rng(2).normal(size=(8, 5, 4)))

    def loss_fn(x: Any) -> Any:
        found = compute(tf.tanh(x @ w))
        return tf.reduce_mean(tf.square(tf.reduce_sum(found, [1, 2])[:, tf.newaxis] * v - 1.0))

    options: dict[str, Any] = {"optimizer": keras.optimizers.SGD(0.1), "stages": 2, "micro_batches": micro_batches}
    assert dapple.verify(loss_fn, batch=(x,), **options).ok


def divided_by_another_number_of_the_samples(squares: Any, n: Any) -> Any:
    return tf.reduce_sum(squares) / (n + n), n + n


def divided_by_a_size_of_an_unstacked_shape(squares: Any, n: Any) -> Any:
    samples, width = tf.unstack(tf.cast(tf.shape(squares), tf.float64))
    return tf.reduce_sum(squares / samples) / (samples * width), samples + width


def divided_by_a_square(squares: Any, n: Any) -> Any:
    return tf.reduce_sum(squares) / (n * n / n), n


@pytest.mark.parametrize(
    "divide",
    [
        divided_by_another_number_of_the_samples,
        divided_by_a_size_of_an_unstacked_shape,
        divided_by_a_square,
    ],
)
def test_what_is_computed_from_a_number_of_samples_is_that_of_the_whole_batch(divide: Any) -> None:
    """The loss divides rows by the number of samples, and a sum by a number that it computes from it."""
    w, v = matrix(4, 6, "w"), matrix(6, 1, "v")

    def loss_fn(x: Any, y: Any) -> Any:
        n = tf.cast(tf.shape(x)[0], x.dtype)
        loss, size = divide(tf.square(tf.tanh((x / n) @ w) @ v - y), n)
        return loss, {"size": size, "samples": n, "sum": n * tf.reduce_mean(y)}

    wanted, found = loss_fn(X, Y), []
    for micro_batches in (1, 2, 8):
        options: dict[str, Any] = {"stages": 2, "micro_batches": micro_batches}
        assert dapple.verify(loss_fn, optimizer=keras.optimizers.SGD(0.1), batch=(X, Y), **options).ok
        step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.0), **options)
        found.append(step(X, Y))
    for results in found:
        for ours, theirs in zip(tf.nest.flatten(results), tf.nest.flatten(wanted), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_entries_that_are_looked_up_by_several_indices_are_those_of_one_device() -> None:
    """tf.gather_nd of a variable, as the transitions of a CRF are looked up, in a loop too."""
    w, transitions = matrix(4, 3, "w"), matrix(3, 3, "transitions")
    labels = tf.constant(np.random.default_rng(2).integers(0, 3, size=(8, 5)))

    def loss_fn(x: Any, y: Any) -> Any:
        of_pairs = tf.reduce_sum(tf.gather_nd(transitions, tf.stack([y[:, :-1], y[:, 1:]], -1)), 1)
        total = x @ w
        for _ in tf.range(3):
            total = tf.reduce_logsumexp(total[:, :, None] + transitions, axis=1)
        return tf.reduce_mean(tf.reduce_logsumexp(total, axis=1) - of_pairs)

    options: dict[str, Any] = {"optimizer": keras.optimizers.SGD(0.1), "stages": 2, "micro_batches": 4}
    assert dapple.verify(tf.function(loss_fn), batch=(X, labels), **options).ok
