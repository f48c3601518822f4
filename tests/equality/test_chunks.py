"""Several stages on one device: a step computes what one device computes, in the order of the schedule (float64)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.checkpoint.checkpoints import Checkpoints
from dapple_tf.errors import PlanError, ScheduleError
from dapple_tf.plan import Plan
from graph_passes.schedules.policies import build_schedule, worker_map_of
from tests.equality.one_device import Problem, compare
from tests.equality.small_models import chain, data, sgd, values, weights

V_SHAPED = "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1; 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1"
MIXED = "0F0 2F0 2B0 2W0 0B0 0W0; 1F0 3F0 4F0 4B0 4W0 3B0 3W0 1B0 1W0"  # any map, backward in two parts
STARTS = ["layer1", "layer2", "layer3", "layer4", "layer5"]


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def clipped() -> Any:
    return keras.optimizers.AdamW(0.01, global_clipnorm=0.1)


def built(schedule: str) -> Any:
    """A step of four stages, which has its plan."""
    options: dict[str, Any] = {"stages": STARTS[:3], "micro_batches": 2, "example_batch": data(6)}
    return dapple.pipeline(chain(weights(4)), optimizer=sgd(), schedule=schedule, **options)


def problem(layers: int, make_optimizer: Callable[[], Any] = adam) -> Problem:
    matrices = weights(layers)
    return Problem(chain(matrices), {f"w{i}": matrix for i, matrix in enumerate(matrices)}, make_optimizer)


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "replicas"),
    [
        ("interleaved-1f1b:v=2", 4, 4, (1, 1)),
        ("interleaved-1f1b:v=3", 6, 5, (1, 1)),
        ("looped-bfs:v=2", 4, 3, (2, 1)),
        ("interleaved-1f1b:v=2", 4, 3, (2, 2)),
        ("interleaved-1f1b:v=3", 3, 2, (1,)),
        (V_SHAPED, 4, 2, (1, 2)),
        (MIXED, 5, 1, (1, 1)),
    ],
)
def test_a_step_equals_one_device(schedule: str, stages: int, micro_batches: int, replicas: tuple[int, ...]) -> None:
    comparison = compare(
        problem(6),
        [data(11), data(11, 2), data(7)],
        stages=STARTS[: stages - 1],
        micro_batches=micro_batches,
        schedule=schedule,
        replicas=replicas,
    )
    comparison.check(1e-12)
    plan = comparison.step.plan
    assert plan.worker_map == worker_map_of(schedule, stages)
    assert [plan.stages[chunks[0]].replicas for chunks in plan.worker_map.chunks] == list(replicas)


@pytest.mark.parametrize("options", [{"recompute": True}, {"recompute": ["layer1", "layer4"]}, {"inexact": "allow"}])
def test_options_of_a_step_work_with_several_stages_a_device(options: dict[str, Any]) -> None:
    compare(
        problem(6, clipped),
        [data(8), data(8, 2)],
        stages=STARTS[:3],
        micro_batches=4,
        schedule="interleaved-1f1b",
        **options,
    ).check(1e-12)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b:v=2", "looped-bfs:v=2", V_SHAPED])
def test_devices_run_the_stages_in_the_order_of_the_schedule(schedule: str) -> None:
    micro_batches = 2
    step = dapple.pipeline(
        chain(weights(4)), optimizer=sgd(), stages=STARTS[:3], micro_batches=micro_batches, schedule=schedule
    )
    for _ in range(2):  # the first step may wait for things to be made ready
        step.record(*data(6))
    events = step.timeline.events
    for device, actions in zip(
        step.timeline.step.devices, build_schedule(schedule, 4, micro_batches).workers, strict=True
    ):
        assert tuple(event.action for event in events if event.device == device) == actions


def test_forward_evaluates_on_the_devices_of_training() -> None:
    matrices = weights(4)
    loss_fn = chain(matrices)
    step = dapple.pipeline(
        loss_fn, optimizer=sgd(), stages=STARTS[:3], micro_batches=3, schedule="interleaved-1f1b", example_batch=data(6)
    )
    places = [matrix.device for matrix in matrices]
    np.testing.assert_allclose(float(step.forward(*data(7))), float(loss_fn(*data(7))), rtol=1e-12)
    assert [matrix.device for matrix in matrices] == places
    assert places[0] == places[2] != places[1] == places[3]


@pytest.mark.parametrize("stages", [STARTS[:3], 4])
def test_forward_before_the_first_step_shares_devices_as_training_will(stages: Any) -> None:
    loss_fn = chain(weights(4))
    step = dapple.pipeline(
        loss_fn, optimizer=sgd(), stages=stages, micro_batches=2, schedule="interleaved-1f1b", devices=[0, 1]
    )
    np.testing.assert_allclose(float(step.forward(*data(7))), float(loss_fn(*data(7))), rtol=1e-12)
    step(*data(7))
    assert step.plan.worker_map.chunks == ((0, 2), (1, 3))


def test_a_plan_of_one_stage_per_worker_cannot_share_devices() -> None:
    step = dapple.pipeline(
        chain(weights(4)), optimizer=sgd(), stages=STARTS[:1], micro_batches=2, schedule="gpipe", example_batch=data(6)
    )
    shared = tuple(dataclasses.replace(stage, devices=(0,)) for stage in step.plan.stages)
    plan = dataclasses.replace(step.plan, stages=shared)
    with pytest.raises(PlanError, match="device 0 is in stage 0 and in stage 1: a device can be in only one stage, or"):
        dapple.pipeline(chain(weights(4)), optimizer=sgd(), plan=plan)(*data(6))


@pytest.mark.parametrize("option", ["stages", "micro_batches"])
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", V_SHAPED])
def test_stages_and_micro_batches_must_be_given(option: str, schedule: str) -> None:
    options: dict[str, Any] = {"stages": 4, "micro_batches": 2, option: "auto"}
    with pytest.raises(PlanError, match=f"{option}='auto' with schedule .*, which runs several stages on a device"):
        dapple.pipeline(chain(weights(4)), optimizer=sgd(), schedule=schedule, **options)


def test_a_checkpoint_of_several_stages_a_device_resumes_with_another_number(tmp_path: Path) -> None:
    losses, final = [], []
    for stages, schedule in ((STARTS[:3], "interleaved-1f1b"), (STARTS[:1], "dapple-a")):
        matrices = weights(4)
        step = dapple.pipeline(
            chain(matrices), optimizer=keras.optimizers.Adam(0.01), stages=stages, micro_batches=2, schedule=schedule
        )
        step.build(*data(6))
        if not losses:
            step(*data(6))
            Checkpoints(tmp_path, step).save(1)
        else:
            Checkpoints(tmp_path, step).restore()
        losses.append(float(step(*data(6, 2))))
        final.append(values(matrices))
    np.testing.assert_allclose(*losses, rtol=1e-12)
    for first, second in zip(*final, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-12)


def test_a_saved_plan_trains_again(tmp_path: Path) -> None:
    step = built("interleaved-1f1b")
    step.plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.worker_map.chunks == ((0, 2), (1, 3))
    compare(problem(4), [data(6)], plan=plan).check(1e-12)


def test_stages_that_do_not_fit_the_schedule_are_refused_before_tracing() -> None:
    traced = []

    def loss_fn(x: Any, y: Any) -> Any:
        traced.append(1)
        return tf.reduce_mean(x - y)

    with pytest.raises(ScheduleError, match="interleaved-1f1b has no option D"):
        dapple.pipeline(loss_fn, optimizer=sgd(), stages=3, micro_batches=2, schedule="interleaved-1f1b:D=2")
    assert not traced


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"stages": STARTS[:2]}, ScheduleError, "gives each worker 2 stages, but there are 3 in all"),
        (
            {"stages": STARTS[:3], "replicas": [1, 1, 1, 1]},
            PlanError,
            "names 4 workers for the 4 stages, but there are 2",
        ),
        (
            {"stages": STARTS[:3], "replicas": [5, 5]},
            PlanError,
            "4 stages with replicas .* need 10 devices",
        ),
    ],
)
def test_a_request_that_does_not_fit_is_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    step = dapple.pipeline(chain(weights(4)), optimizer=sgd(), micro_batches=2, schedule="interleaved-1f1b", **options)
    with pytest.raises(error, match=said):
        step(*data(12))


def test_a_plan_whose_devices_do_not_share_stages_as_its_schedule_says_is_refused() -> None:
    step = built("dapple-a")
    plan = dataclasses.replace(step.plan, schedule="interleaved-1f1b")
    with pytest.raises(
        PlanError, match=r"runs stages \[0, 2\] on one worker, but stage 0 is on devices \[0\] and stage 2"
    ):
        dapple.pipeline(chain(weights(4)), optimizer=sgd(), plan=plan)(*data(6))
