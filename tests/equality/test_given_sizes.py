"""Micro-batches of given sizes: a step computes what one device computes (float64)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.graph_passes.ir.names import nodes_of
from dapple_tf.graph_passes.ir.ops import OpName
from tests.dapple_tf.distributed.programs.cases import dropped
from tests.equality.one_device import TOLERANCE, Comparison, Problem, compare
from tests.equality.small_models import WIDTH, chain, data, sgd, values, weights
from tests.equality.test_batch_loss import clip
from tests.equality.test_batch_loss import problem as combined
from tests.equality.test_batch_norm_sync import random, two_norms
from tests.equality.test_sparse_gradients import OPTIMIZERS, batches, keras_model


def check(problem: Problem, batches: Sequence[Any], **options: Any) -> Comparison:
    comparison = compare(problem, batches, **options)
    comparison.check(TOLERANCE["float64"])
    return comparison


def with_outputs(reduce: Callable[[Any], Any]) -> Problem:
    """A chain whose loss is ``reduce`` of the samples' losses; it also returns those, their mean and their number."""
    matrices = weights(4)

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ matrix)
        losses = tf.reduce_sum(tf.square(x - y), 1)
        aux = {"losses": losses, "mean": tf.reduce_mean(losses), "count": tf.reduce_sum(tf.ones_like(losses))}
        return reduce(losses), aux

    variables = {f"w{i}": matrix for i, matrix in enumerate(matrices)}
    return Problem(loss_fn, variables, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5))


# The last batch is cut in proportion, unless that would leave a replica without a sample (7 x 2 // 11 is 1).
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "straight": {"stages": 3, "micro_batches": [1, 3, 7], "schedule": "dapple-a"},
    "2:1, zb-h1": {"stages": ["layer2"], "replicas": [2, 1], "micro_batches": [2, 2, 7], "schedule": "zb-h1"},
    "2:3": {"stages": ["layer2"], "replicas": [2, 3], "micro_batches": [3, 8], "schedule": "gpipe"},
    "2 stages a device": {"stages": 4, "micro_batches": [1, 2, 2, 6], "schedule": "interleaved-1f1b:v=2"},
    "shares": {"stages": 2, "micro_batches": [0.2, 0.3, 0.5]},
}


def scaled_sum(losses: Any) -> Any:
    return tf.reduce_sum(losses) / 10


LOSSES: Mapping[str, Callable[[Any], Any]] = {"mean": tf.reduce_mean, "sum": scaled_sum}


@pytest.mark.parametrize(("name", "loss"), [(name, loss) for name in LAYOUTS for loss in LOSSES])
def test_loss_outputs_and_weights_equal_one_device(name: str, loss: str) -> None:
    comparison = check(with_outputs(LOSSES[loss]), [data(11), data(11, 2), data(7)], **LAYOUTS[name])
    assert {f"aux {i} of step {step}" for i in range(3) for step in (1, 2)} <= comparison.errors.keys()
    assert comparison.step.plan.sizes


def test_batches_that_keep_the_proportion_share_a_program() -> None:
    step = dapple.pipeline(chain(weights(3)), optimizer=sgd(), stages=2, micro_batches=[2, 2, 4])
    for size in (8, 16, 9, 4):  # 4 is 1, 1 and 2
        step(*data(size))
    assert len(step._compiled.programs) == 1
    step(*data(3))  # 3 x 2 // 8 is none: three micro-batches of one sample
    assert len(step._compiled.programs) == 2
    assert not any(node.has("sizes") for node in nodes_of(step.graph, OpName.SLICE))


def test_dropout_draws_the_rows_of_the_whole_batch() -> None:
    check(dropped(), [data(9), data(9, 2)], stages=["dense_1"], replicas=[2, 1], micro_batches=[2, 3, 4])


def test_sparse_gradients_equal_plain_keras() -> None:
    problem = keras_model(OPTIMIZERS["global_clipnorm"])
    options = {"stages": ["dense_0"], "replicas": [2, 1], "micro_batches": [2, 4, 3], "schedule": "zb-h1"}
    check(problem, batches(9, 9, 5), **options)


def test_a_loss_of_all_samples_equals_plain_training() -> None:
    problem = combined(clip, towers=2, temperature=True)
    check(problem, [data(9), data(9, 2), data(5)], stages=3, micro_batches=[1, 3, 5], batch_loss=True)


@pytest.mark.parametrize("batch_norm", ["sync", "micro-batch"])
def test_batch_norm_normalises_micro_batches_of_the_given_sizes(batch_norm: str) -> None:
    """One device that runs these micro-batches in turn; without replicas both modes are alike."""
    replicas = [2, 2] if batch_norm == "sync" else [1, 1]
    cut = {"in_turn": (3, 4, 6), "micro_batches": [3, 4, 6]}
    comparison = check(two_norms(), random((13, 13)), stages=["b"], replicas=replicas, batch_norm=batch_norm, **cut)
    assert comparison.step.exactness.reasons


@pytest.mark.parametrize("batch_norm", ["deferred", "micro-batch"])
def test_batch_norm_is_verified_on_pieces_of_the_given_sizes(batch_norm: str) -> None:
    """The other comparison of the report divides plain Keras's batch norm as the pipeline does."""
    problem = two_norms()
    report = dapple.verify(
        problem.loss_fn,
        optimizer=problem.make_optimizer(),
        batch=random((13,))[0],
        stages=["b"],
        replicas=[2, 1],
        micro_batches=[2, 4, 7],
        batch_norm=batch_norm,
    )
    assert report.ok
    assert not report.plain.ok
    assert report.in_turn is not None
    assert max(report.in_turn.errors.values()) <= TOLERANCE["float64"]


def test_a_plan_with_sizes_trains_as_the_request_that_made_it() -> None:
    found = []
    for options in ({"stages": 2, "micro_batches": [2, 6]}, {}):
        matrices = weights(3)
        if not options:
            options = {"plan": found[0][0]}
        step = dapple.pipeline(chain(matrices), optimizer=sgd(), **options)
        step(*data(8))
        found.append((dataclasses.replace(step.plan, predicted=None), values(matrices)))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_a_recorded_step_is_predicted_from_the_times_of_each_size() -> None:
    step = dapple.pipeline(chain(weights(3)), optimizer=sgd(), stages=2, micro_batches=[2, 6], schedule="dapple-a")
    step.record(*data(8))
    measured, predicted = step.timeline, step.recording.predicted
    seconds = [{str(e.action): e.end - e.start for e in found.events} for found in (measured, predicted.timeline)]
    assert seconds[0] == pytest.approx(seconds[1])  # each size has one micro-batch, whose time is its median


def test_evaluation_before_training_takes_batches_of_any_size() -> None:
    keras.utils.set_random_seed(3)
    dense = [keras.layers.Dense(WIDTH, "tanh", dtype="float64", name=f"d{i}") for i in range(3)]
    model = keras.Sequential([keras.Input((WIDTH,), dtype="float64"), *dense])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = (tensor.numpy() for tensor in data(13))
    plain = model.evaluate(x, y, batch_size=8, verbose=0)
    before = model.get_weights()
    model.fit(x, y, batch_size=8, shuffle=False, epochs=2, verbose=0)
    trained = model.get_weights()
    model.set_weights(before)
    dapple.keras.pipeline(model, stages=2, micro_batches=[1, 2, 5])
    assert model.evaluate(x, y, batch_size=8, verbose=0) == pytest.approx(plain, rel=1e-6)  # float32
    model.fit(x, y, batch_size=8, shuffle=False, epochs=2, verbose=0)
    for found, wanted in zip(model.get_weights(), trained, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert model.predict(x[:3], verbose=0).shape == (3, WIDTH)
