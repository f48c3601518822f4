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
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.plans import Plan
from dapple_tf.profiler.cluster import config
from tests.equality.one_device import Problem, compare
from tests.equality.small_models import chain, data, sgd, values, weights

V_SHAPED = "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1; 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1"
SPLIT = "0F0 2F0 2I0 2W0 0I0 0W0; 1F0 3F0 4F0 4I0 4W0 3I0 3W0 1I0 1W0"  # any map, backward in two parts
# A V: a device runs a forward and another micro-batch's backward one after the other, and delays weight gradients.
MIXED = "0F0 0F1 3F0 3I0 3F1 3B1 0I0 3W0 0B1 0W0; 1F0 1F1 2F0 2F1 2B0 2I1 1B0 2W1 1I1 1W1"
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
        (SPLIT, 5, 1, (1, 1)),
        (MIXED, 4, 2, (1, 2)),
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
    assert plan.worker_map == ScheduleSpec.parse(schedule).worker_map(stages)
    assert [plan.stages[chunks[0]].replicas for chunks in plan.worker_map.stages_of] == list(replicas)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "options"),
    [
        ("interleaved-1f1b", 4, {"recompute": True}),
        ("interleaved-1f1b", 4, {"recompute": ["layer1", "layer4"]}),
        ("interleaved-1f1b", 4, {"inexact": "allow"}),
        (MIXED, 2, {"recompute": True}),
        (MIXED, 2, {"recompute": ["layer1", "layer4"]}),
        (MIXED, 2, {"inexact": "allow", "replicas": [2, 2]}),
    ],
)
def test_options_of_a_step_work_with_several_stages_a_device(
    schedule: str, micro_batches: int, options: dict[str, Any]
) -> None:
    batches = [data(8), data(8, 2)]
    compare(
        problem(6, clipped),
        batches,
        stages=STARTS[:3],
        micro_batches=micro_batches,
        schedule=schedule,
        **options,
    ).check(1e-12)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b:v=2", "looped-bfs:v=2", V_SHAPED, MIXED])
def test_devices_run_the_stages_in_the_order_of_the_schedule(schedule: str) -> None:
    micro_batches = 2
    step = dapple.pipeline(
        chain(weights(4)), optimizer=sgd(), stages=STARTS[:3], micro_batches=micro_batches, schedule=schedule
    )
    for _ in range(2):  # the first step may wait for things to be made ready
        step.record(*data(6))
    events = step.timeline.events
    for device, actions in zip(
        step.timeline.step.devices, ScheduleSpec.parse(schedule).build(4, micro_batches).workers, strict=True
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
    assert step.plan.worker_map.stages_of == ((0, 2), (1, 3))


def test_a_plan_of_one_stage_per_worker_cannot_share_devices() -> None:
    step = dapple.pipeline(
        chain(weights(4)), optimizer=sgd(), stages=STARTS[:1], micro_batches=2, schedule="gpipe", example_batch=data(6)
    )
    shared = tuple(dataclasses.replace(stage, devices=(0,)) for stage in step.plan.stages)
    plan = dataclasses.replace(step.plan, stages=shared)
    with pytest.raises(PlanError, match="device 0 is in stage 0 and in stage 1: a device can be in only one stage, or"):
        dapple.pipeline(chain(weights(4)), optimizer=sgd(), plan=plan)(*data(6))


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ({"schedule": "interleaved-1f1b", "cluster": config("a", 2)}, None),
        ({"schedule": V_SHAPED, "cluster": config("a", 2), "micro_batches": 2}, ((0, 3), (1, 2))),
        ({"schedule": "interleaved-1f1b:v=3", "replicas": [2, 2]}, ((0, 2, 4), (1, 3, 5))),
        ({"schedule": V_SHAPED, "replicas": [1, 2], "micro_batches": 2}, ((0, 3), (1, 2))),
        ({"schedule": "looped-bfs", "stages": STARTS[:3], "micro_batches": "auto"}, ((0, 2), (1, 3))),
    ],
)
def test_stages_and_micro_batches_may_be_chosen(options: dict[str, Any], workers: Any) -> None:
    comparison = compare(problem(8), [data(8), data(8, 2)], **{"stages": "auto", "micro_batches": 4, **options})
    comparison.check(1e-12)
    plan = comparison.step.plan
    assert plan.schedule == options["schedule"]
    assert len(plan.stages) > plan.worker_map.workers
    assert plan.worker_map.stages_of == (workers or plan.spec.worker_map(len(plan.stages)).stages_of)


def test_an_automatic_schedule_may_run_several_stages_a_device() -> None:
    """Eight equal layers, two devices and two micro-batches of one sample: interleaved stages idle half as long."""
    comparison = compare(problem(8), [data(2), data(2, 2)], stages="auto", micro_batches=2, cluster=config("a", 2))
    comparison.check(1e-12)
    step = comparison.step
    assert step.choice.schedule == step.plan.schedule
    assert step.choice.seconds[step.plan.schedule] == pytest.approx(step.plan.predicted["step_seconds"], rel=1e-9)
    assert step.plan.worker_map.stages_of == step.plan.spec.worker_map(len(step.plan.stages)).stages_of


def test_samples_of_models_that_draw_numbers_stay_on_one_device_a_stage() -> None:
    matrices = weights(6)

    def dropped(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return chain(matrices)(tf.nn.dropout(x, 0.5), y)

    step = dapple.pipeline(
        dropped,
        optimizer=sgd(),
        micro_batches=2,
        schedule="interleaved-1f1b",
        example_batch=data(16),
        cluster=config("a", 4),
    )
    assert set(step.plan.replicas) == {1}
    assert step.plan.worker_map.is_chunked


def test_forward_before_the_first_step_needs_no_plan_of_stages_that_share_devices() -> None:
    loss_fn = chain(weights(4))
    step = dapple.pipeline(
        loss_fn, optimizer=sgd(), stages="auto", micro_batches=2, schedule="interleaved-1f1b", cluster=config("a", 2)
    )
    np.testing.assert_allclose(float(step.forward(*data(7))), float(loss_fn(*data(7))), rtol=1e-12)


def test_more_stages_per_device_than_the_model_can_be_cut_into_are_refused_before_profiling() -> None:
    step = dapple.pipeline(chain(weights(2)), optimizer=sgd(), micro_batches=2, schedule="interleaved-1f1b:v=64")
    with pytest.raises(
        PlanError, match=r"interleaved-1f1b:v=64' needs at least 64 stages, but .* can be cut into \d+:"
    ):
        step(*data(6))


def test_micro_batches_that_no_memory_fits_are_refused() -> None:
    small = dataclasses.replace(config("a", 2), device_memory=700.0)
    with pytest.raises(PlanError, match="under which devices run several stages, keeps more in flight than fits"):
        dapple.pipeline(
            chain(weights(4)),
            optimizer=sgd(),
            stages=STARTS[:3],
            micro_batches="auto",
            schedule="interleaved-1f1b",
            example_batch=data(8),
            cluster=small,
        )


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
    assert plan.worker_map.stages_of == ((0, 2), (1, 3))
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
            "names 4 workers for 4 stages, but there are 2",
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
