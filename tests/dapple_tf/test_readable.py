"""The rank and the size of a job, what a step and a plan print, and a call of init that comes too late."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.plans import Plan, StagePlan
from tests.processes import run_python


@pytest.mark.parametrize(
    ("variables", "rank", "size"),
    [
        ({}, 0, 1),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 2, 4),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "1"}, 1, 2),
    ],
)
def test_the_rank_and_the_size_of_the_job_are_those_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: int, size: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (dapple.rank(), dapple.size()) == (rank, size)


def test_a_step_and_its_plan_are_readable() -> None:
    layers = [keras.layers.Dense(4, name="first"), keras.layers.Dense(1, name="last")]
    model = keras.Sequential([keras.Input([3]), *layers], name="net")

    def loss_of_squares(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x) - y))

    step = dapple.pipeline(loss_of_squares, optimizer="sgd", stages=["last"], micro_batches=2, schedule="gpipe")
    assert repr(step) == "<PipelinedStep of loss_of_squares: no plan before the first batch>"
    step(np.ones([4, 3], np.float32), np.ones([4, 1], np.float32))
    head = "2 micro-batches of 2 samples, schedule gpipe"
    assert repr(step).startswith("<PipelinedStep of loss_of_squares: plan straight, layers 1:")
    assert repr(step.plan).startswith("<plan straight, layers 1:")
    assert head in repr(step.plan)
    first, *stages = str(step.plan).splitlines()
    assert first == f"2 stages, {head}"
    assert stages[0] == "  stage 0, device 0: layers 0 to 0"
    lines = step.summary().splitlines()
    assert lines[:2] == [first, "  stage 0, device 0: net/first .. net/first"]
    assert any("K x stash" in line for line in lines)


def test_an_init_that_comes_too_late_says_so() -> None:
    code = "import tensorflow as tf, dapple_tf as dapple; tf.constant(1); dapple.init()"
    done = run_python("-c", code)
    wanted = (
        "DappleWarning: dapple.init() came too late to make 8 devices: TensorFlow has started with 1. Call it before"
    )
    assert f"<string>:1: {wanted}" in done.stderr


def test_files_of_the_users_named_like_our_folders_do_not_hide_them(tmp_path: Path) -> None:
    for name in ("profiler", "graph_passes"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file')")
    code = "import dapple_tf; dapple_tf.Profile; dapple_tf.Plan; print('imported')"
    assert run_python("-c", code, folder=tmp_path).stdout == "imported\n"


def test_a_plan_with_a_schedule_that_is_none_can_be_shown() -> None:
    plan = Plan("net", "test", 4, 2, 2, "zigzag", False, (StagePlan(0, 1, (0,)),))
    assert repr(plan) == "<plan one device, layers 2, 2 micro-batches of 2 samples, schedule 'zigzag'>"
