"""batch_norm="sync": replicas of a stage normalise a micro-batch as plain Keras, called with all of it, does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import StepError
from dapple_tf.graph_passes.ir.names import nodes_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.plans import Plan, StagePlan
from tests.equality.one_device import TOLERANCE, Comparison, Problem, compare
from tests.equality.test_batch_norm import STEPS, WIDTH, dense, norm, padded, random, regression, sgd

LAYERS = keras.layers


def two_norms() -> Problem:
    return regression(dense("a"), norm("first"), dense("b"), norm("second"), dense("c"))


def check(
    problem: Problem, batches: Sequence[Any], *replicas: int, micro_batches: int = 1, **options: Any
) -> Comparison:
    """Assert that a pipeline trains ``problem`` as plain Keras that is called with one micro-batch after the other.

    With one micro-batch that is plain training.
    """
    if "plan" not in options:
        options |= {"stages": ["b"] if len(replicas) > 1 else 1, "replicas": list(replicas)}
    comparison = compare(
        problem, batches, in_turn=micro_batches, micro_batches=micro_batches, batch_norm="sync", **options
    )
    comparison.check(TOLERANCE["float64"])
    return comparison


# --- layouts, schedules, uneven rows


@pytest.mark.parametrize("replicas", [2, 3])
def test_data_parallel_training_equals_plain_training(replicas: int) -> None:
    check(two_norms(), random((10, 11)), replicas)


@pytest.mark.parametrize(
    ("replicas", "schedule"),
    [
        ((2, 2), "zb-h1"),
        *((replicas, name) for replicas in ((1, 2), (2, 1)) for name in ("gpipe", "dapple-a")),
        *((replicas, "dapple-b") for replicas in ((2,), (3,), (2, 3))),
    ],
)
def test_replicas_take_the_statistics_of_their_micro_batch(replicas: tuple[int, ...], schedule: str) -> None:
    check(two_norms(), random((13, 11)), *replicas, micro_batches=3, schedule=schedule)


@pytest.mark.parametrize("schedule", ["dapple-a", "zb-h1"])
def test_recomputation_keeps_what_replicas_joined(schedule: str) -> None:
    """It is stashed: backward joins gradients only."""
    found = check(two_norms(), random((9, 8)), 2, 2, micro_batches=2, recompute=True, schedule=schedule)
    graph = found.step.graph
    kinds = {(node.name.split("/")[-2], node.strings("kinds")) for node in nodes_of(graph, OpName.JOIN)}
    assert kinds == {("forward", ("moments",)), ("inputs" if schedule == "zb-h1" else "backward", ("sum",))}


@pytest.mark.parametrize("schedule", ["dapple-a", "zb-h1"])
def test_gradients_are_reduced_while_backward_runs(schedule: str) -> None:
    plan = Plan("m", "hand", 11, 4, 3, schedule, False, (StagePlan(0, 7, (0, 1)),), overlap=True)
    check(two_norms(), random((11, 11)), 2, micro_batches=3, plan=plan)


# --- models


def images() -> Problem:
    """Convolutions in two branches with a skip connection, and a batch norm layer behind each."""

    def conv(filters: int, name: str) -> keras.Layer:
        start = keras.initializers.GlorotUniform(4)
        options = {"padding": "same", "use_bias": False, "kernel_initializer": start}
        return LAYERS.Conv2D(filters, 3, name=name, dtype="float64", **options)

    def relu(x: Any) -> Any:
        return LAYERS.ReLU(dtype="float64")(x)

    x = entering = keras.Input((6, 6, 3), dtype="float64")
    x = relu(norm("norm_a")(conv(4, "a")(x)))
    branches = [norm(f"norm_{name}")(conv(4, name)(x)) for name in ("left", "right")]
    x = relu(LAYERS.Add(dtype="float64")([x, *branches]))
    x = LAYERS.GlobalAveragePooling2D(dtype="float64")(norm("norm_b")(conv(5, "b")(x)))
    x = LAYERS.Dense(WIDTH, kernel_initializer=keras.initializers.GlorotUniform(5), dtype="float64")(x)
    model = keras.Model(entering, x)

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean((y - model(x, training=True)) ** 2)

    return Problem.of_model(model, loss_fn, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5))


@pytest.mark.parametrize(("replicas", "micro_batches"), [((2,), 1), ((2, 2), 2)])
def test_a_convolutional_network(replicas: tuple[int, ...], micro_batches: int) -> None:
    found = check(images(), random((9, 7), (6, 6, 3)), *replicas, micro_batches=micro_batches)
    joins = [node for node in nodes_of(found.step.graph, OpName.JOIN) if "/replica0/mb0/forward/" in node.name]
    assert sorted(len(node.strings("kinds")) for node in joins) == [1, 1, 2]  # both branches join at once


@pytest.mark.parametrize("channels", [WIDTH, 1])
def test_a_mask_counts_what_it_keeps_of_the_micro_batch(channels: int) -> None:
    """Replicas keep very different numbers of steps."""
    start = keras.initializers.GlorotUniform(3)
    first = LAYERS.Dense(channels, "tanh", kernel_initializer=start, name="a", dtype="float64")
    problem = regression(LAYERS.Masking(dtype="float64"), first, norm("norm"), dense("b"), shape=(STEPS, WIDTH))
    check(problem, padded(2, (9, 8)), 3, micro_batches=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: regression(dense("a"), norm("norm", 0.9), LAYERS.ReLU(dtype="float64"), dense("b")),
        lambda: regression(
            dense("a"), LAYERS.BatchNormalization(renorm=True, momentum=0.5, dtype="float64"), dense("b")
        ),
    ],
)
def test_other_models(make: Callable[[], Problem]) -> None:
    check(make(), random((8, 10)), 2, 1, micro_batches=2)


def test_statistics_of_the_arguments_are_those_of_the_whole_batch() -> None:
    check(regression(norm("of_arguments"), dense("a"), norm("norm"), dense("b")), random((10, 8)), 3)


def test_a_layer_that_is_called_twice() -> None:
    first, layer, last = dense("a"), norm("norm"), dense("b")
    for part in (first, layer, last):
        part.build((None, WIDTH))

    def loss_fn(x: Any, y: Any) -> Any:
        one, other = (last(layer(first(view), training=True)) for view in (x, 2 * y))
        return tf.reduce_mean((one - other) ** 2)

    variables = {variable.path: variable for part in (first, layer, last) for variable in part.variables}
    check(Problem(loss_fn, variables, sgd), random((8, 10)), 2, micro_batches=2)


# --- steps


def pipeline(problem: Problem, **options: Any) -> Any:
    given = {"stages": ["b"], "replicas": [2, 1], "micro_batches": 2, **options}
    return dapple.pipeline(problem.loss_fn, optimizer=sgd(), batch_norm="sync", **given)


def plain_loss(problem: Problem, x: Any, y: Any) -> float:
    """The loss that one device has for two micro-batches of four."""
    return float(np.mean([problem.loss_fn(x[part], y[part]) for part in (slice(0, 4), slice(4, 8))]))


def test_a_failed_step_leaves_nothing_behind() -> None:
    """The error names the call that failed; the next step has the loss that one device has."""
    checked = LAYERS.Lambda(lambda x: tf.debugging.check_numerics(x, "not a number"), name="check", dtype="float64")
    problem = regression(dense("a"), norm("first"), checked, norm("second"), dense("b"))
    step = pipeline(problem)
    (x, y), (more, targets) = random((8, 8))
    wanted = plain_loss(problem, more, targets)
    before = {name: variable.numpy() for name, variable in problem.variables.items()}
    with pytest.raises(StepError, match=r"All variables are as they were .*stage 0, replica 0, micro-batch 1, forward"):
        step(tf.concat([x[:5], x[5:] * np.nan], 0), y)
    for name, variable in problem.variables.items():
        np.testing.assert_array_equal(variable.numpy(), before[name])
    np.testing.assert_allclose(float(step(more, targets)), wanted, rtol=1e-13)


def test_one_replica_runs_whole_calls() -> None:
    step = pipeline(two_norms(), replicas=[1, 1])
    step.build(*random((8,))[0])
    assert not nodes_of(step.graph, OpName.PART, OpName.JOIN)


def test_a_recorded_step_times_calls_and_is_rehearsed() -> None:
    problem = two_norms()
    step = pipeline(problem)
    (batch,) = random((8,))
    step.record(*batch)
    assert step.timeline.actions(0, 0) == step.timeline.actions(0, 1) == "0F0 0F1 0B0 0B1"
    assert "first run" not in str(step.report)


def test_forward_takes_the_statistics_of_the_micro_batch_too() -> None:
    problem = two_norms()
    ((x, y),) = random((8,))
    np.testing.assert_allclose(float(pipeline(problem).forward(x, y)), plain_loss(problem, x, y), rtol=1e-13)


def test_a_loss_head_takes_the_statistics_of_the_whole_batch() -> None:
    """It runs once, on the rows of all replicas, and has nothing to join."""
    first, layer = dense("a"), norm("norm")
    for part in (first, layer):
        part.build((None, WIDTH))

    def loss_fn(x: Any, y: Any) -> Any:
        h = first(x)
        similar = h @ tf.transpose(h)
        return tf.math.log(tf.reduce_mean(similar**2)) + tf.reduce_mean((layer(h, training=True) - y) ** 2)

    variables = {variable.path: variable for part in (first, layer) for variable in part.variables}
    comparison = compare(
        Problem(loss_fn, variables, sgd),
        random((9, 8)),
        stages=1,
        replicas=[2],
        micro_batches=1,
        batch_norm="sync",
        batch_loss=True,
    )
    comparison.check(TOLERANCE["float64"])
