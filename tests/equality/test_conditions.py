"""Optimizers whose update holds conditions over all variables equal one device: skipped steps, accumulation, averages.

An infinite input to the first layer leaves the loss finite (tanh of it is 1), but the gradient of its kernel is
not: an optimizer that scales the loss skips the step, on all stages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import CaptureError, DappleWarning, PlanError, StepError
from tests.equality.one_device import TOLERANCE, Problem, compare, named_variables, train_on_one_device

optimizers = keras.optimizers

WIDTH = 5
STEPS, OVERFLOWS = 7, (2, 5)
EMA = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2}


def scaling(inner: Any, **options: Any) -> Any:
    return optimizers.LossScaleOptimizer(inner, **{"initial_scale": 64.0, "dynamic_growth_steps": 2, **options})


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "scale, Adam": lambda: scaling(optimizers.Adam(0.01)),
    "scale, momentum, clipnorm": lambda: scaling(optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1)),
    "scale, global_clipnorm": lambda: scaling(optimizers.Adam(0.01, global_clipnorm=0.05)),
    "scale, clipvalue, weight_decay": lambda: scaling(optimizers.AdamW(0.01, weight_decay=0.1, clipvalue=0.01)),
    "scale, Nadam": lambda: scaling(optimizers.Nadam(0.01)),  # all variables share a product of momenta
    "scale, schedule": lambda: scaling(optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))),
    "scale, everything": lambda: scaling(
        optimizers.Adam(0.01, global_clipnorm=0.05, gradient_accumulation_steps=2, **EMA)
    ),
}
FINITE_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "accumulation over 2": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "accumulation over 3, global_clipnorm": lambda: optimizers.SGD(
        0.05, momentum=0.9, gradient_accumulation_steps=3, global_clipnorm=0.05
    ),
    "accumulation, Nadam": lambda: optimizers.Nadam(0.01, gradient_accumulation_steps=2),
    "averages": lambda: optimizers.SGD(0.1, **EMA),
    "averages, accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2, weight_decay=0.1, **EMA),
    "loss_scale_factor": lambda: optimizers.Adam(0.01, loss_scale_factor=128.0),
    "loss_scale_factor, global_clipnorm": lambda: optimizers.SGD(0.1, loss_scale_factor=128.0, global_clipnorm=0.05),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "S = 1, M = 1": {"stages": 1, "micro_batches": 1},
    "S = 1, M = 3, 2 replicas": {"stages": 1, "micro_batches": 3, "replicas": [2]},
    "S = 2, M = 4": {"stages": ["dense_1"], "micro_batches": 4},
    "S = 2, M = 2, 2:1": {"stages": ["dense_1"], "micro_batches": 2, "replicas": [2, 1]},
    "S = 3, M = 3, recompute": {"stages": ["dense_1", "dense_2"], "micro_batches": 3, "recompute": True},
    "S = 3, M = 4, zb-h1": {"stages": ["dense_1", "dense_2"], "micro_batches": 4, "schedule": "zb-h1"},
}


def with_layouts(*tables: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, layout) for table in tables for name in table for layout in LAYOUTS]


def problem(make_optimizer: Callable[[], Any], loss: str = "mean") -> Problem:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(WIDTH, "tanh", dtype="float64", name=f"dense_{i}") for i in range(3)]
    model = keras.Sequential([keras.Input((WIDTH,), dtype="float64"), *layers], name="net")

    def loss_fn(x: Any, y: Any) -> Any:
        errors = tf.reduce_sum(tf.square(model(x) - y), 1)
        return tf.reduce_sum(errors) if loss == "sum" else tf.reduce_mean(errors)

    return Problem.of_model(model, loss_fn, make_optimizer)


def batches(overflows: tuple[int, ...] = OVERFLOWS, size: int = 7) -> list[Any]:
    random = np.random.default_rng(0)
    made = []
    for i in range(STEPS):
        x, y = (random.normal(size=(size, WIDTH)) for _ in range(2))
        if i in overflows:
            x[i % size, 1] = np.inf
        made.append((tf.constant(x), tf.constant(y)))
    return made


@pytest.mark.parametrize(("name", "layout"), with_layouts(OPTIMIZERS))
def test_steps_with_and_without_overflow_equal_one_device(name: str, layout: str) -> None:
    compare(problem(OPTIMIZERS[name]), batches(), **LAYOUTS[layout]).check(TOLERANCE["float64"])


@pytest.mark.parametrize(("name", "layout"), with_layouts(FINITE_OPTIMIZERS))
def test_conditions_of_optimizers_equal_one_device(name: str, layout: str) -> None:
    compare(problem(FINITE_OPTIMIZERS[name]), batches(()), **LAYOUTS[layout]).check(TOLERANCE["float64"])


def test_a_step_that_overflows_changes_no_variable_of_any_stage_and_halves_the_scale() -> None:
    case, optimizer = problem(lambda: None), scaling(optimizers.Adam(0.01))
    step = dapple.pipeline(case.loss_fn, optimizer=optimizer, stages=3, micro_batches=2)
    good, bad = batches((1,))[:2]
    losses = [float(step(*good))]
    before = {name: v.numpy() for name, v in named_variables(case, optimizer).items()}
    losses.append(float(step(*bad)))
    after = {name: v.numpy() for name, v in named_variables(case, optimizer).items()}
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert np.isfinite(losses).all()
    assert changed == {"slot dynamic_scale", "slot step_counter"}
    assert (before["slot dynamic_scale"], after["slot dynamic_scale"], after["slot step_counter"]) == (64.0, 32.0, 0)
    assert int(optimizer.iterations.numpy()) == 1
    assert len([n for n in step.graph.nodes if n.op == "update_terms"]) == 3


@pytest.mark.parametrize("name", ["scale, Adam", "loss_scale_factor"])
def test_a_sum_over_the_samples_is_scaled_too(name: str) -> None:
    make = {**OPTIMIZERS, **FINITE_OPTIMIZERS}[name]
    expected = train_on_one_device(problem(make, "sum"), batches(()))
    case, optimizer = problem(make, "sum"), make()
    step = dapple.pipeline(case.loss_fn, optimizer=optimizer, stages=2, micro_batches=3)
    with pytest.warns(DappleWarning, match="is a sum over the batch"):
        losses = [float(step(*batch)) for batch in batches(())]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-12)
    for variable_name, variable in named_variables(case, optimizer).items():
        np.testing.assert_allclose(variable.numpy(), expected.values[variable_name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["scale, Adam", "loss_scale_factor"])
def test_a_loss_of_the_whole_batch_is_scaled_too(name: str) -> None:
    random = np.random.default_rng(1)
    w, v = (tf.Variable(random.normal(size=(WIDTH, WIDTH)), name=name) for name in "wv")

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("first"):
            a, b = tf.tanh(x @ w), tf.tanh(y @ w)
        with tf.name_scope("second"):
            scores = tf.tanh(a @ v) @ tf.transpose(b)
            labels = tf.range(tf.shape(scores)[0])
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))

    case = Problem(loss_fn, {"w": w, "v": v}, {**OPTIMIZERS, **FINITE_OPTIMIZERS}[name])
    options = {"stages": ["second"], "micro_batches": 3, "batch_loss": True, "schedule": "gpipe"}
    compare(case, batches(()), **options).check(TOLERANCE["float64"])


def with_embedding(make_optimizer: Callable[[], Any]) -> tuple[Problem, list[Any]]:
    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Embedding(9, WIDTH, dtype="float64", name="embedding"),
        keras.layers.Flatten(name="flatten"),
        keras.layers.Dense(WIDTH, "tanh", dtype="float64", name="dense_0"),
        keras.layers.Dense(1, dtype="float64", name="dense_1"),
    ]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    random = np.random.default_rng(0)
    made = [(tf.constant(random.integers(0, 4, (7, 3))), tf.constant(random.normal(size=(7, 1)))) for _ in range(4)]
    return Problem.of_model(model, lambda x, y: tf.reduce_mean(tf.square(model(x) - y)), make_optimizer), made


@pytest.mark.parametrize("name", [*OPTIMIZERS, *FINITE_OPTIMIZERS])
def test_sparse_gradients_equal_one_device_or_are_refused_as_by_keras(name: str) -> None:
    make = {**OPTIMIZERS, **FINITE_OPTIMIZERS}[name]
    case, made = with_embedding(make)
    try:
        train_on_one_device(case, made[:1])
    except (TypeError, ValueError):
        case, made = with_embedding(make)
        step = dapple.pipeline(case.loss_fn, optimizer=case.make_optimizer(), stages=["dense_1"], micro_batches=2)
        with pytest.raises(PlanError, match=r'are sparse, .* give sparse_gradients="dense"'):
            step(*made[0])
    else:
        case, made = with_embedding(make)
        compare(case, made, stages=["dense_1"], micro_batches=2).check(TOLERANCE["float64"])


def test_a_loss_that_the_user_scales_is_refused() -> None:
    case, optimizer = problem(lambda: None), scaling(optimizers.SGD(0.1))
    optimizer.build([v for v in case.variables.values() if v.trainable])
    step = dapple.pipeline(
        lambda x, y: optimizer.scale_loss(case.loss_fn(x, y)), optimizer=optimizer, stages=2, micro_batches=2
    )
    with pytest.raises(CaptureError, match="scales the loss by LossScaleOptimizer's scale: return the loss as it is"):
        step(*batches()[0])


def test_checked_steps_let_gradients_overflow_but_no_loss() -> None:
    case, optimizer = problem(lambda: None), scaling(optimizers.SGD(0.1))
    step = dapple.pipeline(case.loss_fn, optimizer=optimizer, stages=2, micro_batches=2)
    step.check_numerics = True
    (x, y), *_ = batches((0,))
    step(x, y)
    assert float(optimizer.dynamic_scale.numpy()) == 32.0
    with pytest.raises(StepError, match="the loss is not finite"):
        step(x, y + np.inf)


def test_a_pipeline_verifies_with_gradients_as_the_optimizer_gets_them() -> None:
    case, optimizer = problem(lambda: None), scaling(optimizers.Adam(0.01, global_clipnorm=0.05))
    good, bad = batches((1,))[:2]
    options = {"optimizer": optimizer, "stages": ["dense_1"], "micro_batches": 3}
    for batch in (good, bad):
        report = dapple.verify(case.loss_fn, batch=batch, **options)
        assert report.ok, str(report)
    trained = [variable.value for variable in case.variables.values()]
    with tf.GradientTape() as tape:
        scaled = case.loss_fn(*good) * optimizer.dynamic_scale
    expected = tape.gradient(scaled, trained)
    _, gradients = dapple.pipeline(case.loss_fn, **options).run_exposed(*good)
    assert len(gradients) == len(expected)
    for wanted in expected:
        same = [found for found in gradients.values() if found.shape == wanted.shape]
        assert min(np.abs(found - wanted).max() for found in same) < 1e-10


@pytest.mark.parametrize("name", ["scale, everything", "averages, accumulation"])
def test_training_goes_on_from_a_checkpoint_under_another_plan(name: str, tmp_path: Path) -> None:
    make = {**OPTIMIZERS, **FINITE_OPTIMIZERS}[name]
    made = batches(OVERFLOWS if name in OPTIMIZERS else ())
    case = problem(make)
    expected = train_on_one_device(case, made)
    half = 3

    case, optimizer = problem(make), make()
    step = dapple.pipeline(case.loss_fn, optimizer=optimizer, stages=3, micro_batches=2, example_batch=made[0])
    for batch in made[:half]:
        step(*batch)
    dapple.Checkpoints(tmp_path, step).save(half)

    case, optimizer = problem(make), make()
    step = dapple.pipeline(case.loss_fn, optimizer=optimizer, stages=2, micro_batches=3, example_batch=made[0])
    checkpoints = dapple.Checkpoints(tmp_path, step)
    assert checkpoints.restore().steps == half
    losses = [float(step(*batch)) for batch in made[half:]]
    np.testing.assert_allclose(losses, expected.losses[half:], rtol=1e-12)
    for variable_name, variable in named_variables(case, optimizer).items():
        np.testing.assert_allclose(variable.numpy(), expected.values[variable_name], rtol=1e-12, atol=1e-14)
