"""Mixed precision equals one device: layers compute in 16 bits, weights are float32, the loss is scaled dynamically."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from tests.equality.one_device import Problem, compare, named_variables

WIDTH, STEPS = 8, 10
TOLERANCE = {"mixed_float16": 5e-3, "mixed_bfloat16": 5e-2}  # of weights after all steps: each rounding is 2^-11, 2^-8
LAYOUTS: dict[str, dict[str, Any]] = {
    "S = 1, M = 4": {"stages": 1, "micro_batches": 4},
    "S = 2, M = 4": {"stages": ["dense_1"], "micro_batches": 4},
    "S = 2, M = 2, 1:2": {"stages": ["dense_1"], "micro_batches": 2, "replicas": [1, 2]},
    "S = 3, M = 3, recompute": {"stages": ["dense_1", "dense_2"], "micro_batches": 3, "recompute": True},
}


# The scale doubles every step until gradients overflow, and around that from then on.
def sgd() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), 2.0**13, 1)


def adam() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, global_clipnorm=1.0), 2.0**13, 1)


def problem(policy: str, make_optimizer: Callable[[], Any], loss_dtype: str = "float32") -> Problem:
    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Dense(WIDTH, "tanh", dtype=policy, name="dense_0"),
        keras.layers.LayerNormalization(dtype=policy, name="norm"),
        keras.layers.Dense(WIDTH, "tanh", dtype=policy, name="dense_1"),
        keras.layers.Dense(2, dtype=policy, name="dense_2"),
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(tf.cast(model(x), loss_dtype) - tf.cast(y, loss_dtype)))

    return Problem.of_model(model, loss_fn, make_optimizer)


def batches(size: int = 12) -> list[Any]:
    random = np.random.default_rng(0)
    shapes = ((size, WIDTH), (size, 2))
    return [tuple(tf.constant(random.normal(size=shape), tf.float32) for shape in shapes) for _ in range(STEPS)]


@pytest.mark.parametrize(
    ("policy", "make_optimizer", "layout"),
    [(policy, make, layout) for policy in TOLERANCE for make in (sgd, adam) for layout in LAYOUTS],
)
def test_mixed_precision_equals_one_device(policy: str, make_optimizer: Callable[[], Any], layout: str) -> None:
    comparison = compare(problem(policy, make_optimizer), batches(), **LAYOUTS[layout])
    state = ("dynamic_scale", "step_counter", "iteration")
    exact = {what: error for what, error in comparison.errors.items() if any(word in what for word in state)}
    assert len(exact) == 4  # the outer optimizer counts too
    assert set(exact.values()) == {0.0}
    values = {what: error for what, error in comparison.errors.items() if what.startswith("value of sequential")}
    assert max(values.values()) <= TOLERANCE[policy], values


def test_a_loss_in_float16_is_scaled_by_what_float16_holds() -> None:
    """It doubles every step; from 2^16 on it is infinite in float16, and one device skips the step."""
    comparison = compare(problem("mixed_float16", sgd, "float16"), batches(), **LAYOUTS["S = 2, M = 4"])
    assert comparison.errors["value of slot dynamic_scale"] == 0.0


@pytest.mark.parametrize("options", [{"micro_batches": 4}, {"micro_batches": 1, "replicas": [4]}])
def test_a_sum_over_the_batch_overflows_as_on_one_device(options: dict[str, Any]) -> None:
    """The kernel's gradient is 2 x scale over the batch of 8: no part of it overflows float16, the sum of 2^17 does."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((1,)), dense])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**16)

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(tf.cast(model(x), tf.float32) - y))

    step = dapple.pipeline(loss_fn, optimizer=optimizer, stages=1, **options)
    ones = tf.ones([8, 1])
    scales = []
    for _ in range(3):
        step(ones, ones)
        scales.append(float(optimizer.dynamic_scale.numpy()))
    assert scales == [2.0**15, 2.0**14, 2.0**14]  # 2 x 2^15 is more than 65504 too
    assert int(optimizer.iterations.numpy()) == 1
    case = Problem.of_model(model, loss_fn, lambda: optimizer)
    assert named_variables(case, optimizer)["slot dynamic_scale"].numpy() == 2.0**14
