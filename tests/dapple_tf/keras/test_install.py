"""Models that cannot be pipelined are refused with what to do; ``compile`` and ``restore`` take a pipeline off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import BatchError, PlanError, UsageError
from tests.dapple_tf.keras import models
from tests.dapple_tf.keras.models import CLASSES, X, Y


def test_a_model_must_be_a_compiled_keras_model() -> None:
    model = keras.Sequential([keras.Input([6]), keras.layers.Dense(1)], name="net")
    with pytest.raises(UsageError, match=r"net has no optimizer: call model.compile"):
        dapple.keras.pipeline(model)
    with pytest.raises(UsageError, match=r"model is a function, not a keras.Model"):
        dapple.keras.pipeline(lambda x: x)  # type: ignore[arg-type]  # no model: that is the test
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(PlanError, match="run_eagerly=True, but a pipeline is a graph"):
        dapple.keras.pipeline(model)


def test_a_model_of_a_distribution_strategy_is_refused() -> None:
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = models.sequential()
    with pytest.raises(PlanError, match=r"tf.distribute strategy: make it without"):
        dapple.keras.pipeline(model)


@pytest.mark.parametrize(("options", "compiled"), [({}, True), ({"jit_compile": False}, False)])
def test_a_model_compiled_with_xla_runs_by_xla_over_a_pipeline(options: Any, compiled: bool) -> None:
    results = []
    for pipelined in (False, True):
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        model = models.classifier(metrics=["accuracy"], jit_compile=True)
        if pipelined:
            step = dapple.keras.pipeline(model, stages=2, micro_batches=3, **options)
        history = model.fit(X, CLASSES, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        results.append([history["loss"], history["accuracy"], model.evaluate(X, CLASSES, verbose=0), model.predict(X)])
        if pipelined:
            must = [f.attr["_XlaMustCompile"].b for f in step.graph_def.library.function]
            assert any(must) == compiled
            dapple.keras.restore(model)
            results.append([*results[-1][:3], model.predict(X)])
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)


def test_a_step_is_recorded_with_a_dictionary_and_says_so() -> None:
    step = dapple.keras.pipeline(models.sequential(), stages=2, micro_batches=2)
    for batch, given in [((X, Y), "2 arguments"), (((X, Y),), "a tuple")]:
        with pytest.raises(BatchError, match=rf"step\.record\({{'x': x, 'y': y}}\), not {given}"):
            step.record(*batch)
    step.record({"x": X, "y": Y})
    assert step.timeline.step_seconds > 0


def test_options_are_those_of_dapple_pipeline() -> None:
    with pytest.raises(PlanError, match="stages='two'"):
        dapple.keras.pipeline(models.sequential(), stages="two")
    with pytest.raises(TypeError, match="takes no optimizer: the model trains with that"):
        dapple.keras.pipeline(models.sequential(), optimizer="sgd")  # type: ignore[call-arg]  # it takes none
    with pytest.raises(TypeError, match="micro_batch"):
        dapple.keras.pipeline(models.sequential(), micro_batch=4)


def test_a_batch_needs_inputs() -> None:
    model = models.sequential()
    dapple.keras.pipeline(model, stages=2)
    with pytest.raises(BatchError, match="the batch has no inputs"):
        model.train_on_batch({}, Y)


def test_compiling_again_takes_the_pipeline_off() -> None:
    model = models.sequential()
    dapple.keras.pipeline(model, stages=2)
    model.compile("sgd", "mse")
    with pytest.raises(UsageError, match=r"net was compiled again .* call dapple.keras.pipeline"):
        model.fit(X, Y, verbose=0)
    step = dapple.keras.pipeline(model, stages=2, micro_batches=2, example_batch=(X, Y))
    assert len(step.plan.stages) == 2
    assert model.fit(X, Y, verbose=0).history["loss"][0] > 0


@pytest.mark.parametrize("batch", [X, 5])
def test_an_example_batch_that_is_no_tuple_is_refused(batch: Any) -> None:
    with pytest.raises(BatchError, match=rf"example_batch is a {type(batch).__name__}: give a tuple \(x, y\)"):
        dapple.keras.pipeline(models.sequential(), stages=2, example_batch=batch)


def test_only_a_model_with_a_pipeline_is_restored() -> None:
    with pytest.raises(UsageError, match="int has no pipeline"):
        dapple.keras.restore(5)


CHANGES: dict[str, Callable[[keras.Model], Any]] = {
    "net/dense_1.trainable": lambda model: setattr(model.layers[0], "trainable", False),
    "net/dense_1.activation": lambda model: setattr(model.layers[0], "activation", keras.activations.relu),
    "optimizer.clipnorm": lambda model: setattr(model.optimizer, "clipnorm", 0.1),
    "optimizer.learning_rate": lambda model: setattr(
        model.optimizer, "learning_rate", keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    ),
}


def test_a_change_of_a_scaled_optimizer_after_the_step_was_built_is_refused() -> None:
    model = models.sequential(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    dapple.keras.pipeline(model, stages=2, micro_batches=2, example_batch=(X, Y))
    model.optimizer.inner_optimizer.clipnorm = 0.1
    with pytest.raises(UsageError, match=r"inner_optimizer\.clipnorm was changed after .* example_batch"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_after_the_step_was_built_for_an_example_is_refused(name: str) -> None:
    model = models.sequential()
    dapple.keras.pipeline(model, stages=2, micro_batches=2, example_batch=(X, Y))
    CHANGES[name](model)
    with pytest.raises(UsageError, match=rf"{name.split('.')[1]} was changed after .* example_batch"):
        model.fit(X, Y, verbose=0)


def test_a_learning_rate_that_changes_after_the_step_was_built_is_used() -> None:
    model = models.sequential()
    dapple.keras.pipeline(model, stages=2, micro_batches=2, example_batch=(X, Y))
    before = [variable.numpy() for variable in model.trainable_variables]
    model.optimizer.learning_rate = 0.0
    model.fit(X, Y, verbose=0)
    for variable, value in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_restored_model_trains_on_as_keras_does() -> None:
    results = []
    for pipelined in (False, True):
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        model = models.sequential(metrics=["mae"])
        if pipelined:
            dapple.keras.pipeline(model, stages=2, micro_batches=3)
        first = model.train_on_batch(X, Y)
        if pipelined:
            dapple.keras.restore(model)
            assert "make_train_function" not in vars(model)
            assert {variable.value.device.rpartition(":")[2] for variable in model.variables} == {"0"}
        results.append([first, model.train_on_batch(X, Y), model.test_on_batch(X, Y)])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-9)
    with pytest.raises(UsageError, match="net has no pipeline"):
        dapple.keras.restore(model)
