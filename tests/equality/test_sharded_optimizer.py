"""Replicas that share the optimizer's slots out among them (``shard_optimizer``) train as one device does."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.checkpoint.checkpoints import Checkpoints
from dapple_tf.errors import BatchError, DappleWarning, PlanError
from dapple_tf.plans import Plan, StagePlan
from tests.equality.one_device import TOLERANCE, Problem, compare
from tests.equality.test_optimizers import CLASSES, DTYPES, OPTIONS, WIDTH, batches, problem
from tests.graph_passes.builders import refused

SHARDED: dict[str, Any] = {"micro_batches": 2, "shard_optimizer": True}


def compare_sharded(case: Problem, dtype: str = "float64", **options: Any) -> Any:
    comparison = compare(case, batches(), **{"replicas": [2], **SHARDED, **options})
    comparison.check(TOLERANCE[dtype])
    return comparison.step


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_equals_one_device(name: str) -> None:
    dtype = DTYPES.get(name, "float64")
    step = compare_sharded(problem(lambda: getattr(keras.optimizers, name)(0.01), dtype=dtype), dtype)
    updates = {node.name for node in step.graph.nodes if node.op == "update" and node.has("stage")}
    assert updates == {"stage0/update", "stage0/replica1/update"}


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "plain"])
def test_options_of_optimizers_equal_one_device(option: str) -> None:
    compare_sharded(problem(lambda: OPTIONS[option](keras.optimizers.Adam)), replicas=[2, 2], stages=["dense_1"])


def scaled() -> Any:
    inner = keras.optimizers.Adam(0.01, global_clipnorm=0.05, gradient_accumulation_steps=2)
    return keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2)


@pytest.mark.parametrize("replicas", [[2], [3], [1, 3]])
def test_a_scaled_loss_and_gradients_over_several_steps_equal_one_device(replicas: list[int]) -> None:
    compare_sharded(problem(scaled), replicas=replicas)


def looked_up(make_optimizer: Callable[[], Any]) -> Problem:
    """An embedding that the last stage uses too, so that its gradient is a sum over stages and replicas."""
    random = np.random.default_rng(0)
    table = tf.Variable(random.normal(size=(9, WIDTH)), name="table")
    weights = [tf.Variable(random.normal(size=(WIDTH, WIDTH)), name=f"w{i}") for i in range(2)]

    def loss_fn(x: Any, y: Any) -> Any:
        ids = tf.cast(tf.abs(x) * 3, tf.int32)
        with tf.name_scope("first"):
            h = tf.tanh(tf.reduce_sum(tf.gather(table, ids), 1) @ weights[0])
        with tf.name_scope("second"):
            h = tf.tanh(h @ weights[1]) + tf.reduce_sum(tf.gather(table, ids), 1)
            return tf.reduce_mean(tf.reduce_sum(tf.square(h - y), 1))

    return Problem(loss_fn, {"table": table, "w0": weights[0], "w1": weights[1]}, make_optimizer)


@pytest.mark.parametrize("option", ["plain", "clipnorm", "global_clipnorm"])
def test_a_sparse_gradient_of_a_tied_embedding_equals_one_device(option: str) -> None:
    case = looked_up(lambda: OPTIONS[option](keras.optimizers.Adam))
    compare_sharded(case, replicas=[2, 2], stages=["second"])


def test_sums_that_overlap_backward_equal_one_device() -> None:
    stage = StagePlan(0, 6, (0, 1))
    plan = Plan("m", "by hand", 7, 4, 2, "dapple-a", False, (stage,), overlap=True, shard_optimizer=True)
    comparison = compare(problem(lambda: keras.optimizers.Adam(0.01)), batches(), plan=plan)
    comparison.check(TOLERANCE["float64"])
    assert any(node.name == "stage0/replica1/reduce/bucket0" for node in comparison.step.graph.nodes)


# --- Where slots and weights are


def equal_layers() -> keras.Sequential:
    keras.utils.set_random_seed(3)
    made = [keras.layers.Dense(64, "tanh", use_bias=False, dtype="float64", name=f"dense_{i}") for i in range(4)]
    return keras.Sequential([keras.Input((64,), dtype="float64"), *made], name="equal")


def loss_of(model: Any) -> Callable[..., Any]:
    return lambda x, y: tf.reduce_mean(tf.square(model(x) - y))


def a_batch(size: int = 8) -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    return tf.constant(random.normal(size=(size, 64))), tf.constant(random.normal(size=(size, 64)))


def bytes_by_device(variables: list[Any]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for variable in variables:
        found[variable.value.device.rpartition(":")[2]] += variable.value.numpy().nbytes
    return dict(found)


def test_each_replica_has_half_of_the_slots_and_keeps_half_of_the_weights() -> None:
    model, optimizer = equal_layers(), keras.optimizers.Adam(0.01)
    step = dapple.pipeline(loss_of(model), optimizer=optimizer, replicas=[2], **SHARDED)
    step(*a_batch())
    matrix = 64 * 64 * 8
    assert bytes_by_device(model.weights) == {"0": 2 * matrix, "1": 2 * matrix}
    slots = [variable for variable in optimizer.variables if variable.value.shape.rank]
    assert bytes_by_device(slots) == {"0": 4 * matrix, "1": 4 * matrix}
    (memory,) = step.report.stages
    assert (memory.predicted.weights, memory.predicted.copies) == (2 * matrix, 2 * matrix)
    assert (memory.predicted.slots, memory.predicted.gradients) == (4 * matrix, 4 * matrix)


def test_forward_runs_use_the_weights_where_training_keeps_them() -> None:
    model = equal_layers()
    step = dapple.pipeline(loss_of(model), optimizer=keras.optimizers.SGD(0.1), replicas=[2], **SHARDED)
    x, y = a_batch()
    step(x, y)
    devices = [variable.value.device for variable in model.weights]
    assert float(step.forward(x, y)) == pytest.approx(float(loss_of(model)(x, y)), rel=1e-12)
    assert [variable.value.device for variable in model.weights] == devices
    step.release()
    assert len({variable.value.device for variable in model.weights}) == 1
    step(x, y)
    assert [variable.value.device for variable in model.weights] == devices


IN_TWO: Any = {"replicas": [2], "shard_optimizer": True}
IN_THREE: Any = {"replicas": [3], "shard_optimizer": True}


@pytest.mark.parametrize(
    ("first", "others"), [(IN_TWO, {"replicas": [1]}), (IN_TWO, IN_THREE), ({"replicas": [2]}, IN_TWO)]
)
def test_a_checkpoint_does_not_depend_on_the_shares(
    tmp_path: Path, first: dict[str, Any], others: dict[str, Any]
) -> None:
    def train(steps: int, restore: bool, **options: Any) -> tuple[Any, Any]:
        model = equal_layers()
        step = dapple.pipeline(
            loss_of(model), optimizer=keras.optimizers.Adam(0.01), micro_batches=2, example_batch=a_batch(), **options
        )
        saved = Checkpoints(tmp_path, step)
        if restore:
            saved.restore()
        for _ in range(steps):
            step(*a_batch())
        if not restore:
            saved.save(steps)
        return model, step

    train(2, False, **first)
    resumed, _ = train(1, True, **others)
    expected = equal_layers()
    optimizer = keras.optimizers.Adam(0.01)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = loss_of(expected)(*a_batch())
        optimizer.apply_gradients(zip(tape.gradient(loss, expected.weights), expected.weights, strict=True))
    for ours, theirs in zip(resumed.weights, expected.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-12, atol=1e-14)


# --- What is refused


def sharded_step(loss_fn: Callable[..., Any], **options: Any) -> Any:
    return dapple.pipeline(loss_fn, optimizer=keras.optimizers.Adam(0.01), **{**SHARDED, **options})


def test_without_replicas_there_is_nothing_to_share_out() -> None:
    step = sharded_step(loss_of(equal_layers()), stages=1)
    with pytest.warns(DappleWarning, match="shard_optimizer=True changes nothing: no stage of the plan has replicas"):
        step(*a_batch())


def test_asynchronous_windows_are_refused() -> None:
    with refused(PlanError, "shard_optimizer=True with mode='async'"):
        sharded_step(loss_of(equal_layers()), replicas=[2], micro_batches=None, mode="async")


def test_a_value_that_is_no_boolean_is_refused() -> None:
    with refused(PlanError, "shard_optimizer='yes': give True or False"):
        sharded_step(loss_of(equal_layers()), replicas=[2], shard_optimizer="yes")


def test_a_batch_with_fewer_samples_than_replicas_is_refused() -> None:
    step = sharded_step(loss_of(equal_layers()), replicas=[3])
    step(*a_batch())
    with refused(BatchError, "the batch has 2 samples, too few for the 3 replicas of a stage, over which"):
        step(*a_batch(2))


def test_a_trained_variable_that_forward_writes_is_refused() -> None:
    w = tf.Variable(np.eye(64), name="w")

    def loss_fn(x: Any, y: Any) -> Any:
        w.assign(w / tf.norm(w))
        return tf.reduce_mean(tf.square(x @ w - y))

    step = sharded_step(loss_fn, replicas=[2], inexact="allow")
    with refused(PlanError, "forward writes 'w' on all 2 replicas of stage 0, and the optimizer updates it"):
        step(*a_batch())


class Coupled(keras.optimizers.SGD):
    """Updates each variable by the sum of the first one, as it is then, which belongs to one replica."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        first = tf.reduce_sum(self._trainable_variables[0].value)
        self.assign_sub(variable, learning_rate * gradient * first)


@pytest.mark.parametrize("cut", [{}, {"replicas": [2, 2], "stages": ["dense_1"]}], ids=["one stage", "two stages"])
def test_an_optimizer_that_mixes_variables_equals_one_device(cut: dict[str, Any]) -> None:
    compare_sharded(problem(lambda: Coupled(0.1)), **cut)


class Looped(keras.optimizers.SGD):
    """Updates each variable and the first one in one loop, which can run on one replica only."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        first = self._trainable_variables[0]

        def body(i: Any) -> Any:
            self.assign_sub(variable, learning_rate * gradient)
            self.assign_sub(first, learning_rate * tf.reduce_sum(gradient) * tf.ones_like(first.value))
            return i + 1

        tf.while_loop(lambda i: i < 1, body, [0])


def test_an_optimizer_that_updates_variables_together_is_refused_with_the_reason() -> None:
    step = dapple.pipeline(loss_of(equal_layers()), optimizer=Looped(0.1), replicas=[2], **SHARDED)
    with pytest.raises(ValueError, match=re.escape("or leave shard_optimizer out")):
        step(*a_batch())
