"""Training steps under the options of a pipeline, with short batches and recorded; and the refusals of some steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import CaptureError, DappleError, ExactnessError, PartitionError, PlanError, UsageError
from tests.equality.test_training_steps import assert_equal, check
from tests.equality.training_steps import CASES, mlp, mse, regression, values_of

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.filterwarnings("ignore:slice=2")
@pytest.mark.parametrize("name", ["metrics_and_clipping", "sparse_gradients_clipped", "loss_scale"])
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": True},
        {"batch_loss": True, "schedule": "gpipe"},
        {"schedule": "zb-h1", "micro_batches": 4},
        {"slice": 2, "stages": 3, "micro_batches": 4},
        {"micro_batches": "auto"},
        {"stages": "auto", "micro_batches": "auto"},
    ],
    ids=str,
)
def test_a_training_step_takes_the_options_of_a_pipeline(name: str, options: Any) -> None:
    check(name, **({"stages": 2, "micro_batches": 3} | options))


def test_a_decorated_step_is_recorded_and_trains_on_a_short_batch() -> None:
    plain, wanted = CASES["metrics_and_clipping"]()
    function, found = CASES["metrics_and_clipping"]()
    step = dapple.train_step(stages=2, micro_batches=3)(function)
    whole = tf.function(plain)
    for number, (x, y) in enumerate(regression()):
        x, y = x[: 12 - 5 * number], y[: 12 - 5 * number]
        assert_equal(step.record(x, y) if number == 1 else step(x, y), whole(x, y))
    assert step.timeline.step_seconds > 0
    for ours, theirs in zip(values_of(found), values_of(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def lazily_built(scaled: bool) -> tuple[Callable[..., Any], Any, list[None]]:
    """Return a step whose optimizer its first update builds, the optimizer, and an entry for each trace to the end."""
    keras.utils.clear_session()  # so that layers of two models have the same names
    model, traces = mlp(), list[None]()
    optimizer: Any = keras.optimizers.Adam(0.01, name="adam", use_ema=True)
    if scaled:
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer, name="scale")

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x))
            target = 2.0 * loss if optimizer.built else loss  # TensorFlow's second trace is the one that counts
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(target, weights), weights, strict=True))
        traces.append(None)
        return target

    return train_step, optimizer, traces


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_is_traced_to_its_end_once_though_its_optimizer_is_not_built(scaled: bool) -> None:
    plain, wanted, _ = lazily_built(scaled)
    loss = tf.function(plain)(*regression()[0])
    function, optimizer, traces = lazily_built(scaled)
    assert_equal(dapple.train_step(function, stages=2, micro_batches=2)(*regression()[0]), loss)
    assert len(traces) == 1
    assert [variable.path for variable in optimizer.variables] == [variable.path for variable in wanted.variables]


def catching(optimizer: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return a step that catches whatever its update raises, and what it changes."""
    keras.utils.clear_session()
    model = mlp()

    def update(pairs: Sequence[tuple[Any, Any]]) -> None:
        try:
            optimizer.apply_gradients(pairs)
        except BaseException:
            optimizer.apply_gradients([(0.5 * gradient, weight) for gradient, weight in pairs])

    @tf.autograph.experimental.do_not_convert
    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x))
        weights = model.trainable_variables
        update(list(zip(tape.gradient(loss, weights), weights, strict=True)))
        return loss

    return train_step, [model, optimizer]


class Anchored(keras.optimizers.SGD):
    """Draws weights to what its build remembers of them."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.anchors = [self.add_variable_from_reference(variable, name="anchor") for variable in variables]
        for anchor, variable in zip(self.anchors, variables, strict=True):
            anchor.assign(variable)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        anchor = self.anchors[self._get_variable_index(variable)]
        super().update_step(gradient + 0.1 * (variable - anchor), variable, learning_rate)


def scaled_anchored(rate: float) -> Any:
    return keras.mixed_precision.LossScaleOptimizer(Anchored(rate), initial_scale=1.0)


@pytest.mark.parametrize("make", [keras.optimizers.Adam, Anchored, scaled_anchored])
def test_an_optimizer_is_built_in_a_step_that_catches_all_or_by_a_build_that_writes(make: Any) -> None:
    (plain, wanted), (function, found) = catching(make(0.1)), catching(make(0.1))
    compiled, step = tf.function(plain), dapple.train_step(function, stages=2, micro_batches=2)
    for batch in regression():
        assert_equal(step(*batch), compiled(*batch))
    for ours, theirs in zip(values_of(found), values_of(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_training_step_has_no_forward_and_no_windows() -> None:
    step = dapple.train_step(CASES["tutorial"]()[0], stages=2, micro_batches=3)
    with pytest.raises(UsageError, match=r"such a step runs as a whole"):
        step.forward(*regression()[0])
    with pytest.raises(PlanError, match=r"windows need dapple\.pipeline"):
        dapple.train_step(CASES["tutorial"]()[0], mode="async", stages=2)


# --- what is refused, at the user's line


def jacobian(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    with tf.GradientTape() as tape:
        loss = mse(y, model(x))
    optimizer.apply(tape.jacobian(loss, model.trainable_variables), model.trainable_variables)  # here


def inside_the_tape(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    with tf.GradientTape(persistent=True) as tape:
        loss = mse(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)  # here
    optimizer.apply(gradients, model.trainable_variables)


def in_a_loop(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    for _ in tf.range(2):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)  # here
        optimizer.apply(gradients, model.trainable_variables)


def in_a_condition(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    if tf.reduce_mean(y) > 100:
        with tf.GradientTape() as tape:
            loss = mse(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)  # here
        optimizer.apply(gradients, model.trainable_variables)


def of_each_sample(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    def clipped(sample: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mse(sample[1], model(sample[0][None]))
        gradients = tape.gradient(loss, model.trainable_variables)  # here
        return tf.clip_by_global_norm(gradients, 0.1)[0]

    gradients = tf.vectorized_map(clipped, (x, y))
    optimizer.apply([tf.reduce_mean(gradient, 0) for gradient in gradients], model.trainable_variables)


def by_python(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    with tf.GradientTape() as tape:
        loss = mse(y, model(x))
    gradients = tape.gradient(loss, model.trainable_variables)
    if tf.norm(gradients[0]).numpy() > 1:  # here
        optimizer.apply(gradients, model.trainable_variables)


def hidden_draw(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    with tf.GradientTape() as tape:
        loss = mse(y, model(x))
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients[0] += tf.random.normal(gradients[0].shape, dtype=tf.float64)  # here
    optimizer.apply(gradients, model.trainable_variables)


def log_of_the_mean(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    with tf.GradientTape() as tape:
        error = mse(y, model(x))
        loss = tf.math.log(1 + error)  # here
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def trial_weights(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = mse(y, model(x))
    gradients = tape.gradient(loss, model.trainable_variables)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_sub(0.5 * gradient)
    back = tf.where(mse(y, model(x)) < loss, tf.zeros_like(loss), 0.4 * tf.ones_like(loss))
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_add(back * gradient)  # here
    return loss


def no_gradient(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    return mse(y, model(x))


REFUSED: list[tuple[Callable[..., Any], type[DappleError], str]] = [
    (jacobian, CaptureError, r"tape.jacobian is no sum over micro-batches"),
    (inside_the_tape, CaptureError, r"while the tape still records"),
    (in_a_loop, CaptureError, r"that TensorFlow traces by itself"),
    (in_a_condition, CaptureError, r"take it always, and let a condition decide on the update"),
    (of_each_sample, CaptureError, r"for each sample by itself \(tf.vectorized_map\)"),
    (by_python, CaptureError, r"let no Python code depend on them"),
    (hidden_draw, CaptureError, r"draws from a hidden state after the gradients"),
    (log_of_the_mean, ExactnessError, r"would not equal one device's step"),
    (trial_weights, PartitionError, r"a forward with weights that it has changed: use one stage"),
    (no_gradient, CaptureError, r"takes no gradient of a variable with tf.GradientTape"),
]


@pytest.mark.parametrize(("body", "kind", "why"), REFUSED, ids=[body.__name__ for body, _, _ in REFUSED])
def test_what_cannot_be_pipelined_is_refused_at_the_users_line(
    body: Callable[..., Any], kind: type[DappleError], why: str
) -> None:
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)
    before = values_of([model])

    def train_step(x: Any, y: Any) -> Any:
        return body(model, optimizer, x, y)

    step = dapple.train_step(train_step, stages=2, micro_batches=3)
    with pytest.raises(kind, match=why) as caught:
        step(*regression()[0])
    with open(__file__, encoding="utf-8") as file:
        lines = list(file)
    start = body.__code__.co_firstlineno
    here = [i for i, line in enumerate(lines, 1) if "# here" in line and i > start][:1]
    if body is not no_gradient:
        assert f"test_training_step_options.py:{here[0]}" in str(caught.value) or f"line {here[0]}" in str(caught.value)
    for ours, theirs in zip(values_of([model]), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_dense_gradient_is_not_made_of_the_slices_that_a_step_gets() -> None:
    with pytest.raises(CaptureError, match="sparse_gradients='dense': the step gets a sparse gradient of"):
        check("sparse_gradients_clipped", stages=2, micro_batches=3, sparse_gradients="dense")
