"""Programs of a pipeline in one process."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from dapple_tf.backend.build_times import BuildTimes
from dapple_tf.backend.program import Program
from dapple_tf.compiler import PlannedModel, StepVariant
from dapple_tf.errors import PlanError
from dapple_tf.frontend.capture import capture
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.plans import Plan
from dapple_tf.runtime.compile_step import LocalTarget
from dapple_tf.staged_model import StagedModel, stage_model
from tests.dapple_tf.backend.builders import DEVICES
from tests.dapple_tf.builders import X, chain, make_plan


@pytest.fixture(scope="module")
def model() -> StagedModel:
    """Two dense layers, each a stage."""
    _, loss = chain(2)
    captured = capture(loss, (X,))
    layers = find_layers(captured.graph)
    assert [layer.name for layer in layers.layers] == ["net/d0", "net/d1", "Square", "Mean"]
    return stage_model(captured, layers, [1], keras.optimizers.SGD(0.1))


def plan_of(micro_batches: int, devices: tuple[int, int] = (0, 1)) -> Plan:
    return make_plan((0, 0, (devices[0],)), (1, 3, (devices[1],)), micro_batches=micro_batches)


def build(target: LocalTarget, model: StagedModel, plan: Plan) -> Program:
    return target.build(PlannedModel(model, plan, len(X)), StepVariant.PLAIN, BuildTimes())


def test_a_program_trains_on_the_devices_of_the_plan(model: StagedModel) -> None:
    target = LocalTarget(DEVICES, DEVICES[0])
    program = build(target, model, plan_of(2, (2, 1)))
    losses = [float(program.run([tf.constant(X)])[0]) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
    assert [variable.device for variable in model.model_variables.values()] == [DEVICES[2]] * 2 + [DEVICES[1]] * 2


def test_programs_of_one_target_share_their_buffers(model: StagedModel) -> None:
    target = LocalTarget(DEVICES, DEVICES[0])
    programs = [build(target, model, plan_of(m)) for m in (2, 4)]
    handles = [{id(outside) for outside, _ in program.function.graph.captures} for program in programs]
    owned = {id(variable.handle) for variable in model.variables.values()}
    assert handles[0] == handles[1]
    assert len(handles[0] - owned) == 1 + 4  # the updating flag, and a sum for each kernel and bias


def test_a_plan_for_more_devices_is_refused(model: StagedModel) -> None:
    target = LocalTarget(DEVICES[:2], DEVICES[0])
    with pytest.raises(
        PlanError,
        match=r"the plan uses devices 0,2, but there are only 2, from 0: make more with dapple\.init",
    ):
        build(target, model, plan_of(2, (0, 2)))


def test_work_on_all_ranks_is_work_of_this_process() -> None:
    assert LocalTarget(DEVICES, DEVICES[0]).run_on_all(lambda: 7) == 7
