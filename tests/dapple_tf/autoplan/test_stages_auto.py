"""``stages="auto"``: a plan from a profile measured now, for the cluster at hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import DappleWarning, PlanError
from dapple_tf.plans import Plan, StagePlan
from dapple_tf.profiler.cluster import Cluster, Link, Server, config
from dapple_tf.timeline.recording import BY_PROFILE, BY_TIMES
from tests.equality.small_models import chain, data, sgd, values, weights


def test_an_automatic_plan_trains_as_one_device_does() -> None:
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
    assert step.plan.predicted["step_seconds"] > 0


def test_micro_batches_need_not_divide_the_batch() -> None:
    matrices, batch = weights(3), data(11)
    loss = chain(matrices)(*batch)
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), micro_batches=4)
    np.testing.assert_allclose(step(*batch), loss, rtol=1e-12)
    assert (step.plan.global_batch_size, step.plan.micro_batches) == (11, 4)


def test_a_recorded_step_is_shown_with_the_one_simulated_for_the_plan() -> None:
    step = dapple.pipeline(chain(weights(4)), optimizer=sgd(), micro_batches=4)
    step.record(*data(16))
    recording = step.recording
    assert recording.predicted.source == BY_PROFILE
    assert recording.predicted.timeline.seconds == recording.planned_seconds == step.plan.predicted["step_seconds"]
    step.record(*data(3))  # as many micro-batches as samples: that is not what was simulated
    assert step.recording.predicted.source == BY_TIMES
    assert len(step.recording.predicted.timeline.events) == len(step.timeline.events)
    step.record(*data(12))  # as many micro-batches, but smaller ones
    assert step.recording.predicted.source == BY_TIMES
    assert step.recording.planned_seconds is None


def test_stages_that_draw_random_numbers_are_not_replicated() -> None:
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


def test_a_model_too_large_for_the_cluster_is_an_error() -> None:
    small = replace(config("a", 2), device_memory=100.0)
    with pytest.raises(PlanError, match=r"does not fit 2 devices of 100 B: .* needs .* and lacks"):
        dapple.pipeline(chain(weights(3)), optimizer=sgd(), micro_batches=2, example_batch=data(8), cluster=small)


def test_recomputed_layers_are_in_the_automatic_plan() -> None:
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


def test_one_stage_is_chosen_with_the_reason_and_what_two_would_take() -> None:
    """A transfer or an AllReduce waits for 10 s, so nothing is worth a second device."""
    slow = Link(1e9, 10.0)
    cluster = Cluster((Server("a", 1), Server("b", 1)), 1e9, slow, slow)
    with pytest.warns(
        DappleWarning,
        match=r"the plan is one device, at 0\.\d{3} s per step: 2 stages would take \d+\.\d{3} s, .* as long: waiting",
    ):
        step = dapple.pipeline(chain(weights(4)), optimizer=sgd(), cluster=cluster, example_batch=data(16))
    assert len(step.plan.stages) == 1


def test_m_is_chosen_with_the_stages_where_it_is_not_given() -> None:
    """On one device every further micro-batch only costs calls; 8 is the number for given stages."""
    step = dapple.pipeline(chain(weights(4)), optimizer=sgd(), cluster=config("b", 1), example_batch=data(64))
    assert step.plan.micro_batches == 1
    fixed = dapple.pipeline(chain(weights(4)), optimizer=sgd(), stages=1, example_batch=data(64))
    assert fixed.plan.micro_batches == 8


def test_an_elastic_step_is_planned_anew_for_the_devices_that_there_are() -> None:
    matrices, batch = weights(3), data(16)
    stages = StagePlan(0, 4, tuple(range(8))), StagePlan(5, 9, tuple(range(8, 16)))
    many = Plan("net", "given", 16, 16, 1, "dapple-a", recompute=False, stages=stages)
    loss = chain(matrices)(*batch)
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), plan=many, elastic=True, cluster=config("a", 4))
    np.testing.assert_allclose(step(*batch), loss, rtol=1e-12)
    assert step.plan.device_count <= 8
    assert step.plan.micro_batches == 1


def test_an_elastic_step_keeps_a_plan_that_fits() -> None:
    step = dapple.pipeline(chain(weights(4)), optimizer=sgd(), stages=2, replicas=[2, 1], elastic=True)
    step(*data(16))
    assert (step.plan.planner, step.plan.replicas) == ("requested", (2, 1))
