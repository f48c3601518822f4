"""Steps of many micro-batches, whose steady state is a loop, compute what one device computes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from tests.equality.one_device import Problem, compare
from tests.equality.small_models import chain, data, weights

STAGES = ["layer1", "layer2"]
M = 28  # enough micro-batches that the graph is made from those of a few (see graph_passes/passes/lengthen.py)


def problem(layers: int = 3) -> Problem:
    matrices = weights(layers)
    named = {f"w{i}": matrix for i, matrix in enumerate(matrices)}
    return Problem(chain(matrices), named, lambda: keras.optimizers.Adam(0.01))


def runs_a_loop(step: Any) -> bool:
    function = step._compiled_last().program.function
    return any(op.type in ("While", "StatelessWhile") for op in function.graph.get_operations())


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "dapple-a"},
        {"schedule": "dapple-b"},
        {"schedule": "K=5,3,1"},
        {"schedule": "zb-h1"},
        {"replicas": (1, 2, 1)},
        {"replicas": (2, 1, 3)},
        {"recompute": True},
        {"micro_batches": [*[2, 3, 4] * 8, 18]},
        {"shard_optimizer": True, "replicas": (2, 1, 2)},
    ],
    ids=str,
)
def test_a_loop_equals_one_device(options: dict[str, Any]) -> None:
    comparison = compare(
        problem(),
        [data(90), data(84, 2), data(90, 3)],
        **{"stages": STAGES, "micro_batches": M, **options},
    )
    comparison.check(1e-12)
    assert runs_a_loop(comparison.step)


def test_stages_that_take_turns_on_devices() -> None:
    comparison = compare(
        problem(8),
        [data(67), data(61, 2)],
        stages=[f"layer{i}" for i in range(1, 8)],
        micro_batches=64,
        schedule="interleaved-1f1b:v=2",
        devices=[f"CPU:{i}" for i in range(4)],
    )
    comparison.check(1e-12)
    assert runs_a_loop(comparison.step)


def test_the_calls_of_a_loop_run_in_the_order_of_the_schedule() -> None:
    """A recorded step is a loop too."""
    loss_fn = chain(weights(3))
    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=["layer1"], micro_batches=M)
    step.record(*data(67))
    events = sorted(step.timeline.events, key=lambda event: event.start)
    for stage, actions in enumerate(step.plan.build_schedule().stages):
        assert [event.action for event in events if event.action.stage == stage] == list(actions)
    assert runs_a_loop(step)


def test_forwards_that_all_precede_the_backwards_are_no_loop() -> None:
    comparison = compare(problem(), [data(67)], stages=STAGES, micro_batches=M, schedule="gpipe")
    comparison.check(1e-12)
    assert not runs_a_loop(comparison.step)


def test_rows_and_means_are_collected_from_all_iterations() -> None:
    matrices = weights(3)

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ matrix)
        errors = tf.reduce_sum(tf.square(x - y), 1)
        return tf.reduce_mean(errors), {"rows": x, "error": tf.reduce_mean(errors), "norms": tf.norm(x, axis=1)}

    named = {f"w{i}": matrix for i, matrix in enumerate(matrices)}
    found = Problem(loss_fn, named, lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    comparison = compare(found, [data(67), data(61, 2)], stages=STAGES, micro_batches=M)
    comparison.check(1e-12)
    assert runs_a_loop(comparison.step)


def test_rows_of_an_embedding_are_collected() -> None:
    table = tf.Variable(np.random.default_rng(0).normal(size=(9, 4)), name="table")
    head = tf.Variable(np.random.default_rng(1).normal(size=(4, 1)), name="head")

    def loss_fn(ids: Any, y: Any) -> Any:
        with tf.name_scope("embed"):
            x = tf.reduce_sum(tf.gather(table, ids), 1)
        with tf.name_scope("head"):
            return tf.reduce_mean(tf.square(x @ head - y))

    random = np.random.default_rng(2)
    batch = tf.constant(random.integers(0, 9, size=(50, 3))), tf.constant(random.normal(size=(50, 1)))
    found = Problem(loss_fn, {"table": table, "head": head}, lambda: keras.optimizers.Adam(0.01))
    comparison = compare(found, [batch, batch], stages=["head"], micro_batches=M)
    comparison.check(1e-12)
    assert runs_a_loop(comparison.step)


def test_a_counter_counts_once_a_step() -> None:
    matrices = weights(3)
    calls = tf.Variable(0, name="calls", trainable=False)

    def loss_fn(x: Any, y: Any) -> Any:
        calls.assign_add(1)
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ matrix)
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    named = {**{f"w{i}": matrix for i, matrix in enumerate(matrices)}, "calls": calls}
    found = Problem(loss_fn, named, lambda: keras.optimizers.SGD(0.1))
    comparison = compare(found, [data(60), data(60, 2)], stages=STAGES, micro_batches=M)
    comparison.check(1e-12)


def test_dropout_draws_the_rows_of_each_micro_batch() -> None:
    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Dense(8, activation="tanh", dtype="float64"),
        keras.layers.Dropout(0.3, seed=5, dtype="float64"),
        keras.layers.Dense(8, activation="tanh", dtype="float64"),
        keras.layers.Dropout(0.2, seed=6, dtype="float64"),
        keras.layers.Dense(1, dtype="float64"),
    ]
    model = keras.Sequential([keras.Input((4,), dtype="float64"), *layers])

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(model(x, training=True) - y[:, :1]))

    found = Problem.of_model(model, loss_fn, lambda: keras.optimizers.Adam(0.01))
    comparison = compare(found, [data(67), data(60, 2)], stages=2, micro_batches=M)
    comparison.check(1e-12)
    assert runs_a_loop(comparison.step)


def test_a_failure_names_its_micro_batch() -> None:
    matrix = weights(1)[0]

    def loss_fn(x: Any, y: Any) -> Any:
        hidden = tf.debugging.check_numerics(tf.exp(x) @ matrix, "too large")
        return tf.reduce_mean(tf.square(tf.tanh(hidden) - y))

    x, y = data(2 * M)
    bad = tf.tensor_scatter_nd_update(x, [[2 * 13 + 1, 0]], tf.constant([1e3], tf.float64))
    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=1, micro_batches=M)
    before = matrix.numpy()
    with pytest.raises(dapple.errors.StepError, match=r"(?s)All variables are as they were.*micro-batch 13.*too large"):
        step(bad, y)
    np.testing.assert_array_equal(matrix.numpy(), before)
    assert np.isfinite(float(step(x, y)))
