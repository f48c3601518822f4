"""Stage functions that XLA compiles train as plain Keras does; those that it cannot compile are named, with reasons."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import DappleWarning
from dapple_tf.runtime.step import PipelinedStep

pytestmark = pytest.mark.usefixtures("float64")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(11, 6))
IDS = RANDOM.integers(0, 9, size=(11, 6))
Y = RANDOM.normal(size=(11, 1))
SIZES = (11, 5, 11)

Loss = Callable[..., Any]


def dense(*between: keras.Layer) -> keras.Model:
    first = [keras.layers.Dense(5, "tanh", name=f"dense_{i}") for i in range(2)]
    last = [keras.layers.Dense(5, "tanh", name="dense_2"), keras.layers.Dense(1, name="last")]
    return keras.Sequential([keras.Input([6]), *first, *between, *last], name="model")


def recurrent() -> keras.Model:
    layers = [
        keras.layers.Embedding(9, 4, mask_zero=True, name="embedding"),
        keras.layers.LSTM(5, return_sequences=True, name="lstm"),
        keras.layers.GRU(3, name="gru"),
        keras.layers.Dense(1, name="last"),
    ]
    return keras.Sequential([keras.Input([6], dtype="int64"), *layers], name="model")


def convolutional() -> keras.Model:
    layers = [
        keras.layers.Reshape([6, 1]),
        keras.layers.Conv1D(4, 3, padding="same", activation="relu", name="conv"),
        keras.layers.LayerNormalization(name="norm"),
        keras.layers.MaxPooling1D(2, name="pool"),
        keras.layers.Flatten(),
        keras.layers.Dense(1, name="last"),
    ]
    return keras.Sequential([keras.Input([6]), *layers], name="model")


def mean_square(model: keras.Model) -> Loss:
    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

    return loss_fn


def train(
    make: Callable[[], keras.Model], x: Any, step_of: Callable[..., Any], loss_of: Any = mean_square
) -> list[Any]:
    """Return the losses of batches of several sizes, and the variables after them."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model, optimizer = make(), keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    step = step_of(model, optimizer, loss_of(model))
    losses = [step(x[:size], Y[:size]) for size in SIZES]
    variables = sorted([*model.variables, *optimizer.variables], key=lambda variable: variable.path)
    return [np.asarray(value) for value in (*losses, *variables)]


def plain(model: keras.Model, optimizer: Any, loss_fn: Loss) -> Loss:
    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(x, y)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step


class Pipelined:
    """Makes a step; ``step`` is the one made last."""

    step: PipelinedStep

    def __init__(self, **options: Any) -> None:
        self._options: dict[str, Any] = {"stages": 2, "micro_batches": 3, **options}

    def __call__(self, model: keras.Model, optimizer: Any, loss_fn: Loss) -> PipelinedStep:
        self.step = dapple.pipeline(loss_fn, optimizer=optimizer, **self._options)
        return self.step


def compiled_functions(step: PipelinedStep) -> set[str]:
    """Return the names of the stage functions that run by XLA in the step's graph."""
    bodies = {f.signature.name: f for f in step.graph_def.library.function}

    def is_compiled(name: str) -> bool:
        inner = [node.attr["f"].func.name for node in bodies[name].node_def if node.op.endswith("PartitionedCall")]
        return bool(bodies[name].attr["_XlaMustCompile"].b) or any(map(is_compiled, inner))

    calls = [node for node in step.graph_def.node if node.op.endswith("PartitionedCall")]
    paths = [node.name.rpartition("/")[0] for node in calls if is_compiled(node.attr["f"].func.name)]
    return {re.sub(r"replica\d+/(mb\d+/)?", "", path) for path in paths}


def check_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)


ALL = {f"stage{stage}/{call}" for stage in range(2) for call in ("forward", "backward", "update")}
HALVES = {f"stage{stage}/{call}" for stage in range(2) for call in ("inputs", "weights")}
SPLIT = HALVES | {name for name in ALL if "backward" not in name}
MIXED = "0F0 0F1 0I0 0B1 0W0; 1F0 1B0 1F1 1I1 1W1"


@pytest.mark.parametrize(
    ("options", "functions"),
    [
        ({}, ALL),
        ({"replicas": [2, 1], "micro_batches": 2, "schedule": "gpipe"}, ALL),
        ({"schedule": "zb-h1", "recompute": True}, SPLIT),
        ({"replicas": [1, 2], "micro_batches": 2, "schedule": "zb-h1"}, SPLIT),
        ({"micro_batches": 2, "schedule": MIXED}, ALL | SPLIT),
        ({"batch_loss": True, "schedule": "gpipe"}, ALL | {"stage1/loss_head"}),
    ],
)
def test_all_stage_functions_are_compiled_and_train_as_one_device(options: Any, functions: set[str]) -> None:
    loss_of = root_mean_square if "batch_loss" in options else mean_square
    pipelined = Pipelined(jit_compile=True, **options)
    found = train(dense, X, pipelined, loss_of)
    assert compiled_functions(pipelined.step) == functions
    check_equal(found, train(dense, X, plain, loss_of))


def root_mean_square(model: keras.Model) -> Loss:
    def loss_fn(x: Any, y: Any) -> Any:
        return tf.sqrt(tf.reduce_mean(tf.square(model(x, training=True) - y)))

    return loss_fn


def told_by(told: Any) -> str:
    """Return the one warning."""
    (warning,) = [w for w in told if issubclass(w.category, DappleWarning)]
    return str(warning.message)


def test_a_convolution_is_compiled() -> None:
    pipelined = Pipelined(jit_compile=True)
    found = train(convolutional, X, pipelined)
    assert compiled_functions(pipelined.step) == ALL
    check_equal(found, train(convolutional, X, plain))


def test_a_loop_that_keeps_values_for_its_gradient_runs_without_xla() -> None:
    pipelined = Pipelined(jit_compile=True)
    with pytest.warns(DappleWarning) as told:
        found = train(recurrent, IDS, pipelined)
    assert re.search(r"stage1/forward: its stash .* is a list of tensors", told_by(told))
    assert {"stage0/update", "stage1/update"} <= compiled_functions(pipelined.step) < ALL
    check_equal(found, train(recurrent, IDS, plain))


def test_a_stage_that_draws_runs_without_xla_and_one_warning_says_so() -> None:
    def make() -> keras.Model:
        return dense(keras.layers.Dropout(0.4, name="dropout"))

    pipelined = Pipelined(jit_compile=True)
    with pytest.warns(DappleWarning) as told:
        found = train(make, X, pipelined)
    assert "XLA compiles 5 of the 7 stage functions of loss_fn" in told_by(told)
    assert "stage1/forward: it draws random numbers (StatelessRandomUniformV2)" in told_by(told)
    assert compiled_functions(pipelined.step) == ALL - {"stage1/forward"}
    check_equal(found, train(make, X, plain))


@tf.custom_gradient
def through_python(x: Any) -> Any:
    """Return x, by an op that XLA does not have."""
    result = tf.numpy_function(lambda value: value, [x], x.dtype)
    result.set_shape(x.shape)
    return result, lambda gradient: gradient


def with_python(model: keras.Model) -> Loss:
    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(model(x, training=True) - through_python(y)))

    return loss_fn


def selecting(model: keras.Model) -> Loss:
    def loss_fn(x: Any, y: Any) -> Any:
        rows = tf.unique(tf.range(tf.shape(x)[1]))[0]
        return tf.reduce_mean(tf.square(model(tf.gather(x, rows, axis=1), training=True) - y))

    return loss_fn


@pytest.mark.parametrize(
    ("loss_of", "reasons"),
    [
        (with_python, ["stage1/forward: XLA has no op PyFunc"]),
        (
            selecting,
            [
                "stage0/forward: it has the op Unique, whose result has a length that depends on data",
                "stage0/backward: its input stash %GatherV2:0, of shape [4, ?], has lengths that are not known",
            ],
        ),
    ],
)
def test_what_xla_cannot_compile_is_named(loss_of: Any, reasons: list[str]) -> None:
    pipelined = Pipelined(jit_compile=True, inexact="allow")  # nothing is known of Python code
    with pytest.warns(DappleWarning) as told:
        found = train(dense, X, pipelined, loss_of)
    for reason in reasons:
        assert reason in told_by(told)
        assert reason.partition(":")[0] not in compiled_functions(pipelined.step)
    other = "stage0" if reasons[0].startswith("stage1") else "stage1"
    assert {name for name in ALL if name.startswith(other)} <= compiled_functions(pipelined.step)
    check_equal(found, train(dense, X, plain, loss_of))


@pytest.mark.parametrize(("jit_compile", "functions"), [(None, ALL), (False, set())])
def test_the_option_follows_the_loss_unless_it_says_otherwise(jit_compile: bool | None, functions: set[str]) -> None:
    def compiled_loss(model: keras.Model) -> Any:
        return tf.function(mean_square(model), jit_compile=True)

    pipelined = Pipelined(jit_compile=jit_compile)
    found = train(dense, X, pipelined, compiled_loss)
    assert compiled_functions(pipelined.step) == functions
    check_equal(found, train(dense, X, plain))


def test_a_call_of_a_compiled_function_is_compiled_in_any_stage() -> None:
    def loss_of(model: keras.Model) -> Any:
        end = tf.function(lambda hidden, y: tf.reduce_mean(tf.square(model.layers[-1](hidden) - y)), jit_compile=True)

        def loss_fn(x: Any, y: Any) -> Any:
            for layer in model.layers[:-1]:
                x = layer(x)
            return end(x, y)

        return loss_fn

    for options in ({}, {"jit_compile": True}):
        check_equal(train(dense, X, Pipelined(**options), loss_of), train(dense, X, plain))


def test_forward_is_compiled_too() -> None:
    model = dense()
    step = dapple.pipeline(
        mean_square(model), optimizer=keras.optimizers.SGD(0.1), stages=2, micro_batches=2, jit_compile=True
    )
    np.testing.assert_allclose(step.forward(X, Y), mean_square(model)(X, Y), rtol=1e-12)
