"""Steps that check their loss and gradients: values that are not finite are named, and no variable changes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import StepError
from tests.equality.small_models import chain, data, sgd, values, weights


@pytest.mark.parametrize(
    ("replicas", "bad"),
    [
        ([2, 1], np.nan),
        ([2, 1], np.inf),
        ([1, 1], np.nan),
        ([1, 1], np.inf),
    ],
)
def test_data_that_is_not_finite_is_reported_and_changes_no_variable(replicas: list[int], bad: float) -> None:
    matrices = weights(4)
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), stages=2, replicas=replicas, micro_batches=3)
    step.check_numerics = True
    x, y = data(12)
    step(x, y)
    before = values(matrices)
    named = r"(stage \d, .*on stage \d the gradient of variable 'w\d'|the loss) is not finite : Tensor had (NaN|Inf)"
    with pytest.raises(StepError, match=f"(?s)All variables are as they were before the step.*{named}"):
        step(x, tf.concat([y[:-1], y[-1:] * bad], 0))
    np.testing.assert_array_equal(values(matrices), before)
    step(x, y)
    assert not np.array_equal(values(matrices), before)


@pytest.mark.parametrize(
    ("options", "place"),
    [({"stages": 2}, "stage 1, replica 0"), ({"stages": 2, "replicas": [1, 2]}, "stage 1, replica 1")],
)
def test_a_loss_that_is_not_finite_is_named_with_its_stage_and_micro_batch(options: Any, place: str) -> None:
    step = dapple.pipeline(chain(weights(4)), optimizer=sgd(), micro_batches=3, **options)
    step.check_numerics = True
    x, y = data(12)
    said = f"The step failed: {place}, micro-batch 1, forward: the loss is not finite : Tensor had NaN values$"
    with pytest.raises(StepError, match=said):
        step(x, tf.concat([y[:7], y[7:8] * np.nan, y[8:]], 0))


def test_a_gradient_that_is_not_finite_is_named_with_its_stage() -> None:
    """The loss is 0; the root's gradient at 0 is not finite."""
    matrices = weights(2)

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("layer0"):
            x = x @ matrices[0]
        with tf.name_scope("layer1"):
            return tf.reduce_mean(tf.reduce_sum(tf.sqrt(tf.square(0.0 * (x @ matrices[1]))), 1))

    step = dapple.pipeline(loss_fn, optimizer=sgd(), stages=2, micro_batches=2)
    step.check_numerics = True
    named = re.escape("on stage ") + r"(0 the gradient of variable 'w0'|1 the gradient of variable 'w1') is not finite"
    with pytest.raises(StepError, match=named):
        step(*data(4))


def test_without_the_check_nan_spreads_to_the_weights() -> None:
    matrices = weights(2)
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), stages=2, micro_batches=2)
    x, y = data(4)
    assert np.isnan(float(step(x, y * np.nan)))
    assert np.isnan(matrices[0].numpy()).all()
