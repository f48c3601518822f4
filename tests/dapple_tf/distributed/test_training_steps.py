"""Training steps as users write them, as a job of two ranks, beside one device."""

from __future__ import annotations

import pytest

from tests.processes import needs_horovod, run_ranks

pytestmark = [needs_horovod, pytest.mark.timeout(900)]

PROGRAM = "tests.dapple_tf.distributed.programs.training_steps"
QUICK = (
    "metrics_and_clipping",
    "two_optimizers",
    "finite_or_skipped",
    "gradients_returned",
    "sparse_gradients_clipped",
)


def test_training_steps_on_two_ranks_train_as_one_device() -> None:
    run_ranks(["-m", PROGRAM, "2", "1,1", "3", *QUICK], 2, timeout_seconds=400)


def test_training_steps_on_two_replicas_train_as_one_device() -> None:
    run_ranks(["-m", PROGRAM, "1", "2", "4", *QUICK, "running_loss", "unexpected_gradients"], 2, timeout_seconds=400)


def test_all_training_steps_on_two_ranks_train_as_one_device() -> None:
    run_ranks(["-m", PROGRAM, "2", "1,1", "3"], 2, timeout_seconds=800)


def test_a_step_that_takes_the_model_and_numbers_trains_as_one_device() -> None:
    run_ranks(["-m", "tests.dapple_tf.distributed.programs.python_arguments"], 2, timeout_seconds=200)
