"""The factor by which an optimizer scales the loss."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from dapple_tf.backend.stage_function import build_function
from dapple_tf.errors import CaptureError
from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.captured import Captured
from dapple_tf.staged_model import scales_loss, trace_loss_scale

W = tf.Variable(1.0, name="w")


def captured(dtype: str = "float32") -> Captured:
    return capture(lambda x: tf.cast(tf.reduce_mean(x * W), dtype), [tf.ones([4])])


def built(optimizer: Any) -> Any:
    optimizer.build([W])
    return optimizer


def factor(optimizer: Any, dtype: str = "float32") -> Any:
    variables = {variable.path: variable.value for variable in optimizer.variables}
    scale = trace_loss_scale(optimizer, captured(dtype), variables)
    handles = [variables[port.name].handle for port in scale.function.inputs]
    (result,) = build_function(scale.function, {}, dict(scale.library), whole=True)(*handles)
    return result.numpy()


@pytest.mark.parametrize(
    ("optimizer", "scales"),
    [
        (keras.optimizers.SGD(0.1), False),
        (keras.optimizers.SGD(0.1, loss_scale_factor=8.0), True),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), True),
        ("sgd", False),
    ],
)
def test_an_optimizer_scales_the_loss_or_not(optimizer: Any, scales: bool) -> None:
    assert scales_loss(optimizer, "float32") == scales


def test_the_factor_is_what_the_optimizer_says_now() -> None:
    assert factor(built(keras.optimizers.SGD(0.1, loss_scale_factor=8.0))) == 8
    dynamic = built(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0))
    assert factor(dynamic) == 4
    dynamic.dynamic_scale.assign(2.0)
    assert factor(dynamic) == 2


def test_the_factor_has_the_dtype_of_the_loss() -> None:
    dynamic = built(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**17))
    assert factor(dynamic, "float64").dtype == "float64"
    assert factor(dynamic, "float16") == float("inf")


def test_a_factor_of_what_is_no_variable_of_the_optimizer_is_refused() -> None:
    other = tf.Variable(3.0)

    class Scaling(keras.optimizers.SGD):  # type: ignore[misc]  # keras is not typed
        def scale_loss(self, loss: Any) -> Any:
            return loss * other

    with pytest.raises(CaptureError, match=r"Scaling\.scale_loss uses a tensor that is no variable of the optimizer"):
        factor(built(Scaling(0.1)))


@pytest.mark.parametrize(
    ("scale_loss", "message"),
    [
        (lambda self, loss: loss * loss, r"Scaling\.scale_loss returns something else than the loss times a factor"),
        (lambda self, loss: loss + tf.square(W), r"uses a tensor that is no variable of the optimizer: .* the loss"),
    ],
    ids=["a square", "a regulariser"],
)
def test_what_does_more_than_scale_is_refused(scale_loss: Any, message: str) -> None:
    optimizer = built(type("Scaling", (keras.optimizers.SGD,), {"scale_loss": scale_loss})(0.1))
    variables = {"w": W} | {variable.path: variable.value for variable in optimizer.variables}
    with pytest.raises(CaptureError, match=message):
        trace_loss_scale(optimizer, captured(), variables)
