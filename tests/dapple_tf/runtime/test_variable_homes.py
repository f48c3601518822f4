"""``step.release()`` brings variables back: functions of one device run, and training goes on unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.runtime.step import PipelinedStep

pytestmark = pytest.mark.usefixtures("float64")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 6))
Y = RANDOM.normal(size=(8, 1))


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(5, "tanh", name=f"dense_{i}") for i in range(3)]
    layers.append(keras.layers.Dense(1, name="last"))
    model = keras.Sequential([keras.Input([6], dtype="float64"), *layers], name="model")
    model.compile("sgd", "mse", jit_compile=True)  # for predict
    return model


def make_step(model: keras.Model, **options: Any) -> PipelinedStep:
    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

    step: PipelinedStep = dapple.pipeline(
        loss_fn, optimizer=keras.optimizers.Adam(0.01), **{"stages": 3, "micro_batches": 4, **options}
    )
    return step


def places(step: PipelinedStep) -> set[str]:
    """Return the numbers of the devices that hold variables."""
    return {variable.device.rpartition(":")[2] for variable in step.variables.values()}


@pytest.fixture
def model_and_step() -> Any:
    model = make_model()
    return model, make_step(model)


def test_what_runs_on_one_device_runs_between_steps_of_training(tmp_path: Path) -> None:
    model, twin = make_model(), make_model()
    step, unreleased = make_step(model), make_step(twin)
    compiled = tf.function(lambda x: model(x, training=False), jit_compile=True)
    for turn in range(3):
        assert step(X, Y).numpy() == unreleased(X, Y).numpy()
        assert places(step) == {"0", "1", "2"}
        step.release()
        assert places(step) == {"0"}
        expected = twin(X, training=False)
        np.testing.assert_allclose(compiled(X), expected, rtol=1e-12)
        np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=1e-12)
        if turn == 1:
            model.export(tmp_path / "exported", verbose=False)
            loaded = tf.saved_model.load(tmp_path / "exported")
            np.testing.assert_allclose(loaded.serve(X), expected, rtol=1e-12)
        step.release()  # nothing is left to do
    for name, value in unreleased.variables.items():
        np.testing.assert_array_equal(step.variables[name], value)


def test_all_that_runs_over_the_pipeline_brings_variables_to_their_stages(model_and_step: Any) -> None:
    model, step = model_and_step
    forward = step.forward_of(lambda x, y: tf.reduce_mean(tf.square(model(x, training=False) - y)))
    step.release()  # before the first batch there is nothing to do
    for run in (step.forward, forward, step.record, step.run_exposed, forward):
        run(X, Y)
        assert {"0", "1", "2"} == {v.value.device.rpartition(":")[2] for v in model.variables}
        step.release()
        assert {"0"} == {v.value.device.rpartition(":")[2] for v in model.variables}


def test_another_program_is_built_while_variables_are_released() -> None:
    model, twin = make_model(), make_model()
    step, unreleased = make_step(model), make_step(twin)
    for samples in (8, 3, 8, 3):
        assert step(X[:samples], Y[:samples]).numpy() == unreleased(X[:samples], Y[:samples]).numpy()
        assert places(step) == {"0", "1", "2"}
        step.release()
        assert places(step) == {"0"}


def test_verify_leaves_variables_where_they_were(model_and_step: Any) -> None:
    model, step = model_and_step
    step(X, Y)
    before = {name: variable.device for name, variable in step.variables.items()}

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

    assert dapple.verify(loss_fn, optimizer=keras.optimizers.SGD(0.1), batch=(X, Y), stages=2, micro_batches=2).ok
    assert before == {name: variable.device for name, variable in step.variables.items()}
    step(X, Y)
