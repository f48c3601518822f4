"""``dapple.verify`` on real models: it says "equal" where the step equals a plain training step, and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import DappleWarning, StepError
from tests.dapple_tf.verification.models import (
    Model,
    dense_layers,
    embeddings,
    numbers,
    repeated_ids,
    train_one_step,
    values,
)

EQUAL, DIFFERS = ": equal to one device\n", ": DIFFERS from one device\n"
IN_TURN = ": NOT equal to plain training, but equal to the same micro-batches one after the other\n"


TWO_STAGES: Mapping[str, Any] = {"stages": ["net/last"], "micro_batches": 4, "schedule": "dapple-a"}


def report_of(loss_fn: Any, batch: Any, optimizer: Any = None, **options: Any) -> Any:
    options = {**TWO_STAGES, **options}
    return dapple.verify(loss_fn, optimizer=optimizer or keras.optimizers.Adam(0.1), batch=batch, **options)


def normalised() -> Model:
    return dense_layers(keras.layers.BatchNormalization(name="norm", dtype="float64"))


@pytest.mark.parametrize(("jit_compile", "replicas"), [(None, None), (False, None), (True, [2, 1])])
def test_an_exact_step_is_equal_to_one_device(jit_compile: bool | None, replicas: Any) -> None:
    _, loss_fn = dense_layers()
    loss_fn = loss_fn if jit_compile is None else tf.function(loss_fn, jit_compile=jit_compile)
    report = report_of(loss_fn, numbers(9), replicas=replicas)
    assert EQUAL in str(report)
    assert report.ok
    assert report.in_turn is None
    assert report.exactness
    assert 0 < max(report.max_loss_error, report.max_gradient_error, report.max_variable_error) < 1e-12
    kinds = {difference.kind for difference in report.differences}
    assert kinds == {"loss", "gradient", "variable"}


@pytest.mark.parametrize(
    ("optimizer", "jit_compile"),
    [
        (lambda: keras.optimizers.SGD(0.1), None),
        (lambda: keras.optimizers.Adam(0.1), None),
        (lambda: keras.optimizers.Adam(0.1), True),
        (lambda: keras.optimizers.SGD(0.1, clipnorm=0.01), None),
    ],
)
def test_the_verdict_on_an_embedding_is_that_of_a_plain_training_loop(
    optimizer: Callable[[], Any], jit_compile: bool | None
) -> None:
    """Ids repeat, so Keras does other things to the sparse gradient than to a dense one."""
    batch = repeated_ids()
    model, loss_fn = embeddings()
    train_one_step(model, loss_fn, optimizer(), batch)
    wanted = values(model)
    model, loss_fn = embeddings()
    dapple.pipeline(loss_fn, optimizer=optimizer(), **TWO_STAGES)(*batch)
    is_equal = all(
        np.allclose(found, value, rtol=0, atol=1e-12 * np.abs(value).max())
        for found, value in zip(values(model), wanted, strict=True)
    )
    model, loss_fn = embeddings()
    loss_fn = loss_fn if jit_compile is None else tf.function(loss_fn, jit_compile=True)
    named = pytest.warns(DappleWarning, match="its input slices net/table") if jit_compile else contextlib.nullcontext()
    with named:
        report = report_of(loss_fn, batch, optimizer())
    assert report.ok == is_equal, str(report)
    assert report.max_gradient_error < 1e-12
    if not is_equal:
        assert DIFFERS in str(report)
        assert "first to diverge: variable 'net/table/embeddings', error " in str(report)


def test_aux_outputs_are_compared() -> None:
    _, loss_fn = dense_layers()

    def with_aux(batch: Any) -> Any:
        return loss_fn(batch["x"], batch["y"]), {"mean": tf.reduce_mean(batch["x"]), "rows": batch["x"]}

    x, y = numbers()
    report = report_of(with_aux, ({"x": x, "y": y},))
    assert [(d.name, d.ok) for d in report.differences if d.kind == "aux"] == [("0", True), ("1", True)]


def test_variables_have_their_old_values_afterwards() -> None:
    model, loss_fn = normalised()
    adam = keras.optimizers.Adam(0.1)
    train_one_step(model, loss_fn, adam, numbers())
    before = values(model, adam)
    report_of(loss_fn, numbers(), adam)
    for found, value in zip(values(model, adam), before, strict=True):
        np.testing.assert_array_equal(found, value)


def test_variables_have_their_old_values_after_an_error() -> None:
    model, loss_fn = dense_layers()

    def failing(x: Any, y: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(x), tf.constant(-1e9, x.dtype))]):
            return loss_fn(x, y)

    before = values(model)
    with pytest.raises(StepError, match="assertion failed"):
        report_of(failing, numbers())
    for found, value in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(found, value)


def test_the_loss_is_called_once_on_one_device() -> None:
    _, loss_fn = dense_layers()
    calls: list[int] = []

    def counted(x: Any, y: Any) -> Any:
        calls.append(len(x) if x.shape[0] else 0)
        return loss_fn(x, y)

    assert report_of(counted, numbers(8)).ok
    assert calls == [0, 8]  # the pipeline traces it for any number of samples


# --- exceptions


def test_batch_norm_in_training_mode_shows_both_comparisons() -> None:
    _, loss_fn = normalised()
    report = report_of(loss_fn, numbers())
    assert report.ok
    assert not report.plain.ok
    assert report.plain.errors["gradient"] > 1e-3
    assert report.max_gradient_error < 1e-12
    text = str(report)
    assert IN_TURN in text
    assert "equal to one device" not in text
    plain, in_turn = (
        text.index(f"compared with {other}:\n")
        for other in ("plain training, the whole batch at once", "the same micro-batches one after the other")
    )
    assert "first to diverge: loss 'loss', error " in text[plain:in_turn]
    assert "because of " in text[plain:in_turn]
    assert "norm" in text[plain:in_turn]
    assert "first to diverge" not in text[in_turn:]


def test_batch_norm_in_one_micro_batch_is_plain_training() -> None:
    _, loss_fn = normalised()
    assert EQUAL in str(report_of(loss_fn, numbers(), micro_batches=1))


def test_batch_norm_in_inference_mode_is_no_exception() -> None:
    _, loss_fn = dense_layers(keras.layers.BatchNormalization(name="norm", dtype="float64"), training=False)
    report = report_of(loss_fn, numbers())
    assert EQUAL in str(report)
    assert report.in_turn is None


@pytest.mark.parametrize("replicas", [[1, 2], [2, 2]])
def test_each_replica_of_batch_norm_has_its_own_samples_and_statistics(replicas: list[int]) -> None:
    _, loss_fn = normalised()
    report = report_of(loss_fn, numbers(9), replicas=replicas, stages=["net/norm"], micro_batches=2)
    assert report.ok, str(report)
    assert ": NOT equal to plain training, but equal to plain training whose batch norm alone takes " in str(report)
    assert report.max_gradient_error < 1e-12
    assert not report.plain.ok


@pytest.mark.parametrize("replicas", [[1, 1], [1, 2]])
def test_deferred_batch_norm_is_compared_with_statistics_of_the_whole_batch(replicas: list[int]) -> None:
    _, loss_fn = normalised()
    options = {"replicas": replicas, "stages": ["net/norm"], "micro_batches": 2}
    report = report_of(loss_fn, numbers(9), batch_norm="deferred", **options)
    assert report.ok, str(report)
    assert ": NOT equal to plain training, but equal to plain training whose batch norm alone takes " in str(report)
    assert "its moving statistics are those of the whole batch" in str(report)
    assert report.max_variable_error < 1e-12


def test_batch_norm_over_replicas_is_compared_with_the_micro_batches_in_turn() -> None:
    _, loss_fn = normalised()
    options = {"replicas": [1, 2], "stages": ["net/norm"], "batch_norm": "sync"}
    report = report_of(loss_fn, numbers(9), micro_batches=2, **options)
    assert report.ok, str(report)
    assert ": NOT equal to plain training, but equal to the same micro-batches one after the other" in str(report)
    assert report_of(loss_fn, numbers(9), micro_batches=1, **options).plain.ok


def test_batch_norm_over_replicas_and_dropout_of_the_whole_batch() -> None:
    """Only batch norm takes the micro-batches by themselves."""
    drop = keras.layers.Dropout(0.5, seed=1, dtype="float64")
    _, loss_fn = dense_layers(keras.layers.BatchNormalization(name="norm", dtype="float64"), drop)
    report = report_of(loss_fn, numbers(9), replicas=[1, 2], stages=["net/norm"], micro_batches=2, batch_norm="sync")
    assert report.ok, str(report)
    assert "equal to plain training whose batch norm alone takes" in str(report)


def test_draws_that_no_variable_repeats_differ_from_everything() -> None:
    """No two runs draw the same numbers, not even those of one device."""
    _, loss_fn = dense_layers()

    def noisy(x: Any, y: Any) -> Any:
        return loss_fn(x + tf.raw_ops.RandomStandardNormal(shape=tf.shape(x), dtype=x.dtype), y)

    report = report_of(noisy, numbers())
    assert not report.ok
    assert DIFFERS in str(report)
    assert "equal to one device" not in str(report)


def test_dropout_is_equal_to_plain_training_or_to_the_micro_batches_in_turn() -> None:
    _, loss_fn = dense_layers(keras.layers.Dropout(0.5, seed=1, dtype="float64"))
    report = report_of(loss_fn, numbers())
    assert report.ok
    assert (EQUAL in str(report)) == report.plain.ok


# --- NaN


def test_a_loss_that_is_nan_on_one_device_too_is_no_failure() -> None:
    _, loss_fn = dense_layers()
    x, y = numbers()
    x = tf.tensor_scatter_nd_update(x, [[3, 0]], [float("nan")])
    report = report_of(loss_fn, (x, y))
    assert report.ok
    assert EQUAL in str(report)
    expected = "NaN or infinite in loss 'loss', and in 16 more tensors: one device has it too, in the same entries"
    assert expected in str(report)


def test_a_gradient_that_is_infinite_on_one_device_too_leaves_the_others_compared() -> None:
    """The slope of the root at zero is infinite: one entry of one gradient."""
    scale = tf.Variable([0.0, 1.0], dtype=tf.float64, name="scale")
    _, loss_fn = dense_layers()
    report = report_of(
        lambda x, y: loss_fn(x * tf.sqrt(scale)[1], y) + tf.reduce_mean(x[:, 0]) * tf.sqrt(scale)[0],
        numbers(),
        keras.optimizers.SGD(0.1),
    )
    assert report.ok, str(report)
    assert "NaN or infinite in gradient 'scale', and in 1 more tensor: one device has it too" in str(report)
    assert report.max_gradient_error > 0
