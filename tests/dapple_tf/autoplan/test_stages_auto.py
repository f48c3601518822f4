"""``stages="auto"``: a plan from a profile taken now, and the cluster at hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.autoplan.measured_problem import count_slots, usable_devices
from dapple_tf.errors import DappleWarning, PlanError
from dapple_tf.timeline.recording import BY_PROFILE, BY_TIMES
from profiler.cluster import Link
from profiler.presets import config
from tests.equality.small_models import chain, data, sgd, values, weights


@pytest.fixture(autouse=True)
def busy_machines_are_no_failure() -> Iterator[None]:
    """The tiny models here measure badly, which is not what these tests are about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the layers of", DappleWarning)
        yield


def test_it_trains_as_one_device_does() -> None:
    matrices, batch = weights(4), data(16)
    with tf.GradientTape() as tape:
        loss = chain(matrices)(*batch)
    rate = float(np.float32(0.1))  # as Keras keeps it
    wanted = [
        matrix - rate * gradient for matrix, gradient in zip(matrices, tape.gradient(loss, matrices), strict=True)
    ]
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), micro_batches=4)
    np.testing.assert_allclose(step(*batch), loss, rtol=1e-12)
    np.testing.assert_allclose(values(matrices), wanted, rtol=1e-12)
    assert step.plan.planner == "best"
    assert (step.plan.global_batch_size, step.plan.micro_batches) == (16, 4)
    assert step.plan.predicted is not None
    assert step.plan.predicted["step_seconds"] > 0


def test_a_batch_that_the_micro_batches_do_not_divide() -> None:
    matrices, batch = weights(3), data(11)
    loss = chain(matrices)(*batch)
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), micro_batches=4)
    np.testing.assert_allclose(step(*batch), loss, rtol=1e-12)
    assert (step.plan.global_batch_size, step.plan.micro_batches) == (11, 4)


def test_a_recorded_step_stands_beside_the_one_simulated_for_the_plan() -> None:
    step = dapple.pipeline(chain(weights(4)), optimizer=sgd(), micro_batches=4)
    step.record(*data(16))
    recording = step.recording
    assert recording.predicted is not None
    assert recording.predicted.source == BY_PROFILE
    assert step.plan.predicted is not None
    assert recording.predicted.timeline.seconds == recording.planned_seconds == step.plan.predicted["step_seconds"]
    step.record(*data(3))  # as many micro-batches as samples: that is not what was simulated
    assert step.recording.predicted is not None
    assert step.recording.predicted.source == BY_TIMES
    assert len(step.recording.predicted.timeline.events) == len(step.timeline.events)
    step.record(*data(12))  # as many micro-batches, but smaller ones
    assert step.recording.predicted is not None
    assert step.recording.predicted.source == BY_TIMES
    assert step.recording.planned_seconds is None


def test_what_draws_random_numbers_is_not_replicated() -> None:
    matrices, batch = weights(4), data(16)

    def dropped(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return chain(matrices)(tf.nn.dropout(x, 0.5), y)

    step = dapple.pipeline(dropped, optimizer=sgd(), micro_batches=2, example_batch=batch, cluster=config("a", 4))
    assert set(step.plan.replicas) == {1}


def test_a_cluster_of_one_device_gives_one_stage() -> None:
    step = dapple.pipeline(
        chain(weights(3)), optimizer=sgd(), micro_batches=2, example_batch=data(8), cluster=config("a", 1)
    )
    assert [stage.devices for stage in step.plan.stages] == [(0,)]


def test_a_model_too_large_for_the_cluster() -> None:
    small = replace(config("a", 2), device_memory=100.0)
    with pytest.raises(PlanError, match=r"does not fit 2 devices of 100 B: .* needs .* and lacks"):
        dapple.pipeline(chain(weights(3)), optimizer=sgd(), micro_batches=2, example_batch=data(8), cluster=small)


def test_usable_devices_are_no_more_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    assert [usable_devices(n) for n in (1, 3, 8)] == [1, 3, 3]


@pytest.mark.parametrize(
    ("make", "slots"),
    [(keras.optimizers.Adam, 2), (keras.optimizers.SGD, 0), (lambda: keras.optimizers.SGD(0.1, momentum=0.9), 1)],
)
def test_slots_are_counted(make: type[keras.optimizers.Optimizer], slots: int) -> None:
    optimizer, trained = make(), weights(3)
    assert count_slots(optimizer, trained) == 2, "before it is built nobody knows"
    optimizer.build(trained)
    assert count_slots(optimizer, trained) == slots


def test_given_stages_get_their_schedule_from_a_cluster() -> None:
    """Over a link of 1 kB/s transfers take longer than any computing.

    A micro-batch is under way for four of them, and policy A has three in flight, too few to keep the link busy.
    """
    slow = replace(config("c", 3), inter_server=Link(bandwidth=1e3, latency=0.0))
    matrices, batch = weights(4), data(16)
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), stages=3, micro_batches=8, cluster=slow)
    loss = chain(matrices)(*batch)
    np.testing.assert_allclose(step(*batch), loss, rtol=1e-12)
    assert step.choice is not None
    assert step.plan.schedule == step.choice.schedule == "dapple-b"
    assert step.choice.acr > 10
    assert (step.plan.planner, len(step.plan.stages), step.plan.micro_batches) == ("requested", 3, 8)


def test_what_is_recomputed_is_in_the_automatic_plan() -> None:
    options = {"micro_batches": 2, "example_batch": data(8), "cluster": config("a", 2)}
    step = dapple.pipeline(chain(weights(4)), optimizer=sgd(), recompute=True, **options)
    assert step.plan.recompute is True
    assert step.plan.predicted is not None
    step = dapple.pipeline(chain(weights(4)), optimizer=sgd(), recompute=["layer1"], **options)
    assert [step.layer_names[i] for i in step.plan.recomputed] == ["layer1/matmul", "layer1/Tanh"]
    assert step.plan.predicted is None  # it was planned without
    step = dapple.pipeline(chain(weights(4)), optimizer=sgd(), stages=2, recompute=[True, False], **options)
    assert step.plan.recompute == tuple(range(step.plan.starts[0]))
    assert step.plan.predicted is not None


def test_the_number_of_micro_batches_is_left_to_the_simulator() -> None:
    matrices, batch = weights(4), data(12)
    loss = chain(matrices)(*batch)
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), stages=2, replicas=[2, 1], micro_batches="auto")
    np.testing.assert_allclose(step(*batch), loss, rtol=1e-12)
    assert step.choice is not None
    assert step.plan.micro_batches == step.choice.micro_batches
    assert step.plan.micro_batches in (1, 2, 3, 4, 6)  # divides 12 samples, and leaves each replica one
    assert step.plan.micro_batch_size * step.plan.micro_batches == 12


def test_a_memory_that_no_schedule_fits() -> None:
    small = replace(config("a", 2), device_memory=700.0)
    with pytest.raises(PlanError, match=r"no schedule fits: with M = 2 .* stage . needs .* and lacks"):
        dapple.pipeline(
            chain(weights(4)), optimizer=sgd(), stages=2, micro_batches=2, example_batch=data(8), cluster=small
        )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"schedule": "K=3,2,1"}, r"'K=3,2,1' is for 3 stages, but the cluster has 2 devices"),
        ({"schedule": "0F0 0F1 0B0 0B1", "micro_batches": 4}, "for 1 stages x 2 micro-batches, but there are 1 x 4"),
        (
            {"schedule": "K=1,2", "stages": 2, "micro_batches": "auto", "cluster": config("a", 2)},
            "the schedule deadlocks",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_before_the_model_is_timed(asked: dict[str, Any], message: str) -> None:
    traced: list[None] = []
    loss_fn = chain(weights(3))

    def counted(x: Any, y: Any) -> Any:
        traced.append(None)
        return loss_fn(x, y)

    options = {"micro_batches": 2, "cluster": config("a", 2), **asked}
    with pytest.raises(ValueError, match=message):
        dapple.pipeline(counted, optimizer=sgd(), example_batch=data(8), **options)
    assert len(traced) == 1  # timing traces it again
