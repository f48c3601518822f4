"""One micro-batch on one replica of each stage runs what one device runs, whatever the loss computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import ExactnessError
from tests.equality.one_device import Problem, compare
from tests.equality.small_models import WIDTH, data, sgd, weights


@dataclass(frozen=True)
class Variables:
    """``first`` and ``second`` are trained; ``rows`` has a row for each of eight samples, ``mean`` one for all."""

    first: tf.Variable
    second: tf.Variable
    rows: tf.Variable
    mean: tf.Variable

    @staticmethod
    def make() -> Variables:
        first, second = weights(2)
        rows, mean = (tf.Variable(np.full(shape, 0.5), trainable=False) for shape in ([8, WIDTH], [WIDTH]))
        return Variables(first, second, rows, mean)


Hidden = Callable[[Variables, Any, Any], Any]
"""Returns from the variables, the first layer's result and x what the second layer takes."""


def problem_of(hidden: Hidden, loss: Callable[[Any, Any], Any] | None = None) -> Problem:
    """Return two layers with ``hidden`` between them."""
    v = Variables.make()

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("first"):
            h = hidden(v, tf.tanh(x @ v.first), x)
        with tf.name_scope("second"):
            z = tf.tanh(h @ v.second)
            return tf.reduce_mean(tf.square(z - y)) if loss is None else loss(z, y)

    named = {"first": v.first, "second": v.second, "rows": v.rows, "mean": v.mean}
    return Problem(loss_fn, named, sgd)


def mixed_with_the_reversed_batch(v: Variables, h: Any, x: Any) -> Any:
    return h + 0.3 * h[::-1]


def remembered(v: Variables, h: Any, x: Any) -> Any:
    """The state of a stateful recurrent layer has a row for each sample."""
    state = tf.tanh(h + v.rows @ v.second)
    v.rows.assign(state)
    return state


def written_twice(v: Variables, h: Any, x: Any) -> Any:
    v.mean.assign(0.9 * v.mean + 0.1 * tf.reduce_mean(h, 0))
    v.mean.assign_add(tf.reduce_max(h, 0))
    return h * v.mean


def written_after_it_is_read(v: Variables, h: Any, x: Any) -> Any:
    h = h @ v.second
    v.second.assign(tf.clip_by_value(v.second, -0.2, 0.2))
    return h


def through_a_network_that_follows(v: Variables, h: Any, x: Any) -> Any:
    """The layers of a network that the loss writes at its end cannot be in different stages."""
    for power in (1, 2, 3, 4):
        with tf.name_scope(f"following{power}"):
            h = tf.tanh(h @ v.second**power * v.mean)
    v.mean.assign(0.9 * v.mean + 0.1 * v.second[0])
    return h


def until_all_are_small(v: Variables, h: Any, x: Any) -> Any:
    return tf.while_loop(lambda h: tf.reduce_max(tf.abs(h)) > 0.3, lambda h: [h * 0.8], [h])[0]


def chosen_by_the_mean(v: Variables, h: Any, x: Any) -> Any:
    return tf.cond(tf.reduce_mean(h) > 0, lambda: h * 2, lambda: h @ v.second)


def grouped(v: Variables, h: Any, x: Any) -> Any:
    found, index = tf.unique(tf.cast(x[:, 0] * 2, tf.int32))
    return tf.gather(tf.math.unsorted_segment_max(h, index, tf.size(found)), index)


def sorted_by_python(v: Variables, h: Any, x: Any) -> Any:
    order = tf.numpy_function(lambda rows: np.argsort(rows[:, 0]), [x], tf.int64)
    order.set_shape([None])
    return tf.gather(h, order)


def computed_by_python(v: Variables, h: Any, x: Any) -> Any:
    found = tf.py_function(lambda h: tf.sin(h) * tf.reduce_mean(h), [h], tf.float64)
    return tf.ensure_shape(found, [None, WIDTH])


def normed_by_python(v: Variables, h: Any, x: Any) -> Any:
    return h @ tf.ensure_shape(tf.py_function(lambda w: w / tf.norm(w), [v.second], tf.float64), [WIDTH, WIDTH])


def one_after_the_other(v: Variables, h: Any, x: Any) -> Any:
    found = tf.TensorArray(tf.float64, 0, dynamic_size=True, element_shape=[WIDTH])
    _, found = tf.while_loop(
        lambda i, found: i < tf.shape(h)[0],
        lambda i, found: (i + 1, found.write(i, h[i] + h[tf.maximum(i - 1, 0)])),
        (0, found),
    )
    return found.stack()


def for_a_known_batch_size(v: Variables, h: Any, x: Any) -> Any:
    return h / float(x.shape[0]) + np.arange(x.shape[0])[:, np.newaxis]


def dropped(v: Variables, h: Any, x: Any) -> Any:
    """A draw for the samples and one for the batch, from a hidden state."""
    return tf.nn.dropout(h, 0.5, seed=3) * tf.random.uniform([], seed=4, dtype=tf.float64)


def with_a_gradient_that_combines_samples(v: Variables, h: Any, x: Any) -> Any:
    @tf.custom_gradient
    def double(h: Any) -> Any:
        return h * 2, lambda dy: dy - tf.reduce_mean(dy, 0, keepdims=True)

    return double(h)


HIDDEN = (
    mixed_with_the_reversed_batch,
    remembered,
    written_twice,
    written_after_it_is_read,
    through_a_network_that_follows,
    until_all_are_small,
    chosen_by_the_mean,
    grouped,
    sorted_by_python,
    computed_by_python,
    normed_by_python,
    one_after_the_other,
    for_a_known_batch_size,
    dropped,
    with_a_gradient_that_combines_samples,
)


@pytest.mark.parametrize("inexact", ["error", "allow"])
@pytest.mark.parametrize(
    "hidden",
    HIDDEN,
    ids=[hidden.__name__ for hidden in HIDDEN],
)
def test_a_model_that_cannot_be_cut_into_micro_batches_runs_as_on_one_device(hidden: Hidden, inexact: str) -> None:
    # Each program of a step has a hidden state of its own: the second step may be another program than the first.
    seeds = (1,) if hidden is dropped else (1, 2)
    comparison = compare(
        problem_of(hidden), [data(8, seed) for seed in seeds], stages=2, micro_batches=1, inexact=inexact
    )
    comparison.check(1e-12)
    assert comparison.step.exactness.exact


def contrastive(z: Any, y: Any) -> Any:
    labels = tf.range(tf.shape(z)[0])
    logits = tf.matmul(z, y, transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def with_odd_results(z: Any, y: Any) -> Any:
    aux = {"columns": tf.transpose(z), "size": tf.shape(z)[0], "largest": tf.reduce_max(z), "text": tf.constant("a")}
    return tf.reduce_mean(tf.square(z - y)) * tf.reduce_max(z), aux


LOSSES = (contrastive, with_odd_results, lambda z, y: tf.sqrt(tf.reduce_sum(tf.square(z - y))) + tf.reduce_max(z))


@pytest.mark.parametrize("batch_loss", [False, True, "auto"])
@pytest.mark.parametrize("loss", LOSSES, ids=["contrastive", "with odd results", "mixed"])
def test_a_loss_of_any_form_is_one_devices(loss: Callable[[Any, Any], Any], batch_loss: bool | str) -> None:
    options = {"stages": 2, "micro_batches": 1, "batch_loss": batch_loss}
    comparison = compare(problem_of(lambda v, h, x: h, loss), [data(8), data(8, 2)], **options)
    comparison.check(1e-12)
    assert comparison.step.exactness.exact


@pytest.mark.parametrize("options", [{"recompute": True}, {"schedule": "zb-h1"}, {"micro_batches": [8]}], ids=str)
def test_other_options_do_not_change_what_runs(options: dict[str, Any]) -> None:
    options = {"stages": 2, "micro_batches": 1} | options
    compare(problem_of(mixed_with_the_reversed_batch), [data(8)], **options).check(1e-12)


@pytest.mark.parametrize("hidden", [mixed_with_the_reversed_batch, for_a_known_batch_size])
@pytest.mark.parametrize("options", [{"stages": 2}, {"stages": "auto"}], ids=str)
def test_one_micro_batch_is_chosen_for_a_model_that_needs_it(options: dict[str, Any], hidden: Hidden) -> None:
    comparison = compare(problem_of(hidden), [data(8)], micro_batches="auto", **options)
    comparison.check(1e-12)
    assert comparison.step.plan.uncut


def losses(problem: Problem, sizes: list[int], **options: Any) -> tuple[list[Any], list[Any], Any]:
    """Return the losses of a step that changes nothing for batches of these sizes, those of plain calls, the step."""
    step = dapple.pipeline(problem.loss_fn, optimizer=keras.optimizers.SGD(0.0), stages=2, **options)
    batches = [data(size, size) for size in sizes]
    return [step(*batch).numpy() for batch in batches], [problem.loss_fn(*batch).numpy() for batch in batches], step


def test_a_batch_that_is_one_micro_batch_alone_is_one_devices_and_others_are_as_allowed() -> None:
    problem = problem_of(lambda v, h, x: h, contrastive)
    found, wanted, step = losses(problem, [8, 1], micro_batches=4, inexact="allow")
    assert found[0] != pytest.approx(wanted[0])
    assert found[1] == pytest.approx(wanted[1])
    assert step.exactness.exact
    step(*data(8))
    assert not step.exactness.exact


def test_a_batch_for_which_replicas_are_left_out_is_one_devices() -> None:
    problem = problem_of(mixed_with_the_reversed_batch)
    found, wanted, _ = losses(problem, [1, 8, 1], micro_batches=1, replicas=None)
    assert found == pytest.approx(wanted)
    found, wanted, step = losses(problem, [8, 1], micro_batches=1, replicas=[2, 1], inexact="allow")
    assert found[1] == pytest.approx(wanted[1])
    assert step.exactness.exact
    with pytest.raises(ExactnessError):
        losses(problem, [8], micro_batches=1, replicas=[2, 1])


def test_a_model_of_a_known_batch_size_is_traced_for_each_size() -> None:
    found, wanted, step = losses(problem_of(for_a_known_batch_size), [8, 3, 8, 3], micro_batches=1)
    assert found == pytest.approx(wanted)
    assert len(step._compiled.all_models()) == 2


@pytest.mark.parametrize("hidden", [mixed_with_the_reversed_batch, for_a_known_batch_size])
@pytest.mark.parametrize("micro_batches", [1, "auto"])
def test_forward_runs_are_those_of_one_device(hidden: Hidden, micro_batches: int | str) -> None:
    problem, batch = problem_of(hidden), data(8)
    step = dapple.pipeline(problem.loss_fn, optimizer=keras.optimizers.SGD(0.0), stages=2, micro_batches=micro_batches)
    before = step.forward(*batch).numpy()
    step(*batch)
    wanted = pytest.approx(problem.loss_fn(*batch).numpy())
    assert [before, step.forward(*batch).numpy()] == [wanted, wanted]


def test_a_plan_for_one_micro_batch_runs_a_model_that_cannot_be_cut() -> None:
    problem, batch = problem_of(mixed_with_the_reversed_batch), data(8)
    options = {"optimizer": keras.optimizers.SGD(0.0), "micro_batches": 2, "inexact": "allow"}
    cut = dapple.pipeline(problem.loss_fn, stages=2, example_batch=batch, **options).plan
    plan = replace(cut, micro_batches=1, micro_batch_size=8)
    step = dapple.pipeline(problem.loss_fn, optimizer=keras.optimizers.SGD(0.0), plan=plan)
    assert step(*batch).numpy() == pytest.approx(problem.loss_fn(*batch).numpy())


def test_verify_says_that_one_micro_batch_is_exact() -> None:
    problem = problem_of(dropped)
    report = dapple.verify(problem.loss_fn, optimizer=sgd(), batch=data(8), stages=2, micro_batches=1)
    assert report.ok
    assert report.exactness.exact
