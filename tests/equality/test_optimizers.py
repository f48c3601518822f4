"""Every optimizer of keras.optimizers equals one device: two stages, three steps, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import PlanError
from tests.equality.one_device import TOLERANCE, Problem, as_tf, compare, relative_error, train_on_one_device

WIDTH = 6
optimizers = keras.optimizers

# Not optimizers to train with: the base class, and those that wrap or hold others (tested by themselves).
NO_OPTIMIZERS = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}
CLASSES = sorted(
    name
    for name, found in vars(optimizers).items()
    if isinstance(found, type) and issubclass(found, optimizers.Optimizer) and name not in NO_OPTIMIZERS
)

DTYPES = {"Muon": "float32"}  # Keras's own has float32 constants, which float64 weights cannot take

OPTIONS: dict[str, Callable[[type], Any]] = {
    "plain": lambda make: make(0.01),
    "schedule": lambda make: make(optimizers.schedules.CosineDecay(0.02, 5, warmup_steps=2, warmup_target=0.05)),
    "weight_decay": lambda make: make(0.01, weight_decay=0.1),
    "clipnorm": lambda make: make(0.01, clipnorm=0.05),
    "clipvalue": lambda make: make(0.01, clipvalue=0.01),
    "global_clipnorm": lambda make: make(0.01, global_clipnorm=0.05),
    "ema": lambda make: make(0.01, use_ema=True, ema_momentum=0.9),
}


def problem(make_optimizer: Callable[[], Any], constraint: Any = None, dtype: str = "float64") -> Problem:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((WIDTH,), dtype=dtype)])
    for i in range(3):
        model.add(keras.layers.Dense(WIDTH, "tanh", dtype=dtype, kernel_constraint=constraint, name=f"dense_{i}"))

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.reduce_sum(tf.square(model(x) - tf.cast(y, dtype)), 1))

    return Problem.of_model(model, loss_fn, make_optimizer)


def batches(count: int = 3, size: int = 7) -> list[Any]:
    random = np.random.default_rng(0)
    return [tuple(tf.constant(random.normal(size=(size, WIDTH))) for _ in range(2)) for _ in range(count)]


def check(case: Problem, made: list[Any], dtype: str = "float64") -> None:
    comparison = compare(case, batches(), stages=["dense_1"], micro_batches=2)
    assert len(comparison.step.plan.stages) == 2
    comparison.check(TOLERANCE[dtype])
    assert [int(optimizer.iterations.numpy()) for optimizer in made] == [3, 3]


def recorded(make: Callable[[], Any]) -> tuple[Callable[[], Any], list[Any]]:
    """Return ``make``, and the list of the optimizers that it creates: the one device's and the pipeline's."""
    made: list[Any] = []

    def make_and_record() -> Any:
        made.append(make())
        return made[-1]

    return make_and_record, made


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_equals_one_device(name: str) -> None:
    make, made = recorded(lambda: getattr(optimizers, name)(0.01))
    dtype = DTYPES.get(name, "float64")
    check(problem(make, dtype=dtype), made, dtype)


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in ("SGD", "Adam") for option in OPTIONS if option != "plain"]
)
def test_options_of_optimizers_equal_one_device(name: str, option: str) -> None:
    make, made = recorded(lambda: OPTIONS[option](getattr(optimizers, name)))
    check(problem(make), made)


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "plain"])
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in ("SGD", "Adam")])
def test_all_options_of_all_optimizers_equal_one_device(name: str, option: str) -> None:
    make, made = recorded(lambda: OPTIONS[option](getattr(optimizers, name)))
    dtype = DTYPES.get(name, "float64")
    check(problem(make, dtype=dtype), made, dtype)


@pytest.mark.parametrize("kind", ["amsgrad", "momentum", "centered"])
def test_variants_equal_one_device(kind: str) -> None:
    variants: dict[str, Callable[[], Any]] = {
        "momentum": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True),
        "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
        "centered": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    }
    make, made = recorded(variants[kind])
    check(problem(make), made)


def test_the_limits_of_clipping_change_the_updates() -> None:
    """With the limits used above the clipped updates differ from the plain ones, so the comparisons can fail."""
    ends = []
    for option in ("plain", "clipnorm", "clipvalue", "global_clipnorm"):
        case = problem(lambda option=option: OPTIONS[option](optimizers.SGD))
        train_on_one_device(case, batches(1))
        ends.append(np.concatenate([as_tf(v).numpy().ravel() for v in case.variables.values()]))
    for i, first in enumerate(ends):
        for second in ends[:i]:
            assert relative_error(first, second) > 1e-6


def test_constraints_of_layers_are_applied() -> None:
    make, made = recorded(lambda: optimizers.SGD(0.5))
    case = problem(make, keras.constraints.MaxNorm(0.3))
    check(case, made)
    kernels = [v.numpy() for name, v in case.variables.items() if name.endswith("kernel")]
    assert len(kernels) == 3
    for kernel in kernels:
        assert np.linalg.norm(kernel, axis=0).max() <= 0.3 + 1e-6


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_a_loss_that_reads_its_optimizers_variables_equals_one_device(name: str) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(getattr(optimizers, name)(0.01))
        made[-1].build(model.trainable_variables)
        return made[-1]

    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(WIDTH, "tanh", dtype="float64", name=f"dense_{i}") for i in range(3)]
    model = keras.Sequential([keras.Input((WIDTH,), dtype="float64"), *layers])

    def loss_fn(x: Any, y: Any) -> Any:
        optimizer = made[-1]
        decay = tf.cast(optimizer.learning_rate, tf.float64) * tf.reduce_sum(tf.square(layers[0].kernel))
        return tf.reduce_mean(tf.square(model(x) - y)) * tf.cast(optimizer.iterations + 1, tf.float64) + decay

    case = Problem.of_model(model, loss_fn, make)
    check(case, made)


def test_an_object_that_is_no_keras_optimizer_is_refused() -> None:
    case = problem(lambda: None)
    with pytest.raises(PlanError, match=r"object, not a keras\.optimizers\.Optimizer"):
        dapple.pipeline(case.loss_fn, optimizer=object(), stages=2, micro_batches=2)(*batches(1)[0])
