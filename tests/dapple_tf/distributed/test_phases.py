"""Training steps of several phases, as a job of two ranks, beside one device."""

from __future__ import annotations

import pytest

from tests.processes import needs_horovod, run_ranks

pytestmark = [needs_horovod, pytest.mark.timeout(900)]

PROGRAM = "tests.dapple_tf.distributed.programs.phases"


def test_phases_on_two_ranks_train_as_one_device() -> None:
    run_ranks(["-m", PROGRAM, "2", "1,1", "3", "gan", "sam", "pcgrad"], 2, timeout_seconds=400)


def test_phases_on_two_replicas_train_as_one_device() -> None:
    run_ranks(["-m", PROGRAM, "1", "2", "4", "gan", "sam", "pcgrad"], 2, timeout_seconds=400)


def test_all_steps_on_two_ranks_train_as_one_device() -> None:
    run_ranks(["-m", PROGRAM, "2", "1,1", "3"], 2, timeout_seconds=800)
