"""``dapple.verify`` of a training step compares it with a call of the function itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from tests.equality.training_steps import CASES, average_of_batch_norm, batches_of, mse, values_of

pytestmark = pytest.mark.usefixtures("float64")


def test_a_training_step_is_equal_and_all_variables_keep_their_values() -> None:
    name = "metrics_and_clipping"
    step, objects = CASES[name]()
    before = values_of(objects[:1])
    report = dapple.verify(step, batch=batches_of(name)[0], stages=2, micro_batches=3)
    assert report.ok, report
    assert {d.kind for d in report.differences} == {"aux", "variable"}
    assert all(np.array_equal(a, b) for a, b in zip(before, values_of(objects[:1]), strict=True))


def test_a_step_that_counts_its_traces_differs_and_the_report_names_the_variable() -> None:
    weight, traces = tf.Variable(np.ones((4, 1)), name="weight"), []

    def train_step(x: Any, y: Any) -> Any:
        traces.append(1)
        with tf.GradientTape() as tape:
            loss = mse(y, x @ weight)
        weight.assign_sub(float(len(traces)) * tape.gradient(loss, weight))
        return loss

    report = dapple.verify(train_step, batch=batches_of("own_sgd")[0], stages=1, micro_batches=2)
    assert not report.ok
    assert "variable 'weight'" in str(report)


@pytest.mark.filterwarnings("ignore:train_step does not train as on one device", "ignore:layer .* seems to hold most")
@pytest.mark.parametrize("batch_norm", ["micro-batch", "deferred"])
def test_batch_norm_in_a_training_step_takes_the_micro_batches_one_after_the_other(batch_norm: Any) -> None:
    train_step, _ = average_of_batch_norm()
    batch = batches_of("own_sgd")[0]
    report = dapple.verify(train_step, batch=batch, stages=2, micro_batches=3, batch_norm=batch_norm)
    assert report.ok, str(report)
    assert not report.plain.ok


def test_batch_norm_on_one_micro_batch_is_that_of_one_device() -> None:
    train_step, _ = average_of_batch_norm()
    report = dapple.verify(train_step, batch=batches_of("own_sgd")[0], stages=1, micro_batches=1)
    assert report.plain.ok, str(report)
