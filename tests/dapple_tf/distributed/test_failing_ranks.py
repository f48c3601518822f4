"""When a rank fails, all others end soon, and say which rank failed, where and why."""

from __future__ import annotations

import re

import pytest

from tests.dapple_tf.distributed.failing_jobs import assert_stopped, run_until_failure
from tests.dapple_tf.distributed.native.peers import needs_library
from tests.processes import HOROVODRUN, needs_horovod, run_ranks

pytestmark = needs_horovod

KILLED = r"was killed or has crashed \(its connection closed\)"


def test_a_rank_that_fails_in_a_step_reports_its_error_to_the_others() -> None:
    """Only the last stage checks the loss; its Horovod ops wait for data that the failed op does not send."""
    error, _ = run_until_failure("bad data", 1)
    failed = "StepError: All variables are as they were before the step. The step failed: bad loss : Tensor had NaN"
    assert failed in error.ranks[1].stderr
    assert error.ranks[1].stderr.count("Traceback (most recent call last)") >= 1
    assert f"stops: rank 1 (stage 1), in step 6, raised {failed}" in error.ranks[0].stderr
    assert "Traceback" not in error.ranks[0].stderr


@needs_library
def test_a_rank_that_fails_in_a_loop_names_the_micro_batch() -> None:
    error, _ = run_until_failure("bad micro-batch", 1)
    failed = r"The step failed: bad loss : Tensor had NaN.*stage1/replica0/mb13/forward"
    for rank in error.ranks:
        assert re.search(failed, rank.stderr, re.DOTALL)


def test_a_rank_that_fails_in_a_window_says_that_variables_have_changed() -> None:
    error, seconds = run_until_failure("bad minibatch", 1)
    failed = (
        "StepError: SOME VARIABLES HAVE CHANGED, by the minibatches of the window before the one that failed: go back "
        "to the last checkpoint. The step failed: bad loss : Tensor had NaN"
    )
    assert failed in error.ranks[1].stderr
    assert f"stops: rank 1 (stage 1), in step 6, raised {failed}" in error.ranks[0].stderr
    assert "Traceback" not in error.ranks[0].stderr
    assert seconds < 20


def test_a_killed_rank_is_named_by_all_others() -> None:
    error, seconds = run_until_failure("SIGKILL", 1, ranks=3)
    for number in (0, 2):
        assert_stopped(error.ranks[number], number, 1, KILLED)
    assert error.exit_code == 128 + 9
    assert seconds < 10


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.always), 3])
def test_a_rank_that_is_killed_in_a_sum_is_named_by_all_others(ranks: int) -> None:
    error, seconds = run_until_failure("in a sum", 1, ranks=ranks, environment={"DAPPLE_EXCHANGE": "native"})
    for number in {0, ranks - 1} - {1}:
        assert_stopped(error.ranks[number], number, 1, KILLED, replicas=True)
    assert error.exit_code == 128 + 9
    assert seconds < 15  # two of which rank 0 waits before it comes to the sum


def test_a_killed_rank_is_named_where_tensors_travel_by_horovod() -> None:
    error, seconds = run_until_failure("SIGKILL", 1, environment={"DAPPLE_EXCHANGE": "horovod"})
    assert_stopped(error.ranks[0], 0, 1, KILLED)
    assert seconds < 10


def test_rank_0_may_be_the_one_that_is_killed() -> None:
    error, seconds = run_until_failure("SIGKILL", 0)
    assert_stopped(error.ranks[1], 1, 0, KILLED)
    assert seconds < 10


def test_a_killed_rank_of_horovodrun_is_named_by_the_others() -> None:
    error, seconds = run_until_failure("SIGKILL", 1, launcher=HOROVODRUN)
    assert_stopped(error.ranks[0], 0, 1, KILLED)
    assert error.exit_code == 1
    assert seconds < 15


def test_a_rank_that_raises_between_steps_reports_its_error_to_the_others() -> None:
    error, seconds = run_until_failure("raise", 1)
    assert error.ranks[1].stderr.count("Traceback") == 1
    assert "KeyError: 'no such sample'" in error.ranks[1].stderr
    assert_stopped(error.ranks[0], 0, 1, "raised KeyError: 'no such sample'")
    assert error.exit_code == 1
    assert seconds < 10


def test_all_ranks_name_the_value_that_is_not_finite() -> None:
    error, seconds = run_until_failure("not finite", 0)
    for rank in error.ranks:
        assert re.search(
            r"StepError: All variables are as they were before the step. The step failed: (the loss|on stage \d the "
            r"gradient of variable 'w\d') is not finite : Tensor had NaN",
            rank.stderr,
        )
    assert seconds < 20


def test_a_rank_that_hangs_is_declared_failed_after_the_timeout() -> None:
    """The others cannot distinguish a process that is stopped from one whose host is cut off."""
    error, seconds = run_until_failure("SIGSTOP", 1, environment={"DAPPLE_TIMEOUT_SECONDS": "4"})
    what = r"has sent nothing for 3\.\d s: its host is cut off from the network, or the process hangs"
    assert_stopped(error.ranks[0], 0, 1, what)
    assert seconds < 4 + 10


def test_a_rank_that_exits_before_the_others_is_named() -> None:
    error, seconds = run_until_failure("exit", 1)
    assert_stopped(error.ranks[0], 0, 1, r"has exited \(its script ended, .* must make the same calls")
    call = (
        r"rank 0 is about to run step 6 with \d+ samples .*, and rank 1 is not, and all ranks must make the same calls"
    )
    assert re.search(call, error.ranks[0].stderr)
    assert "rank 1 (stage 1), after step 5, has exited" in error.ranks[0].stderr
    assert seconds < 10


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupt_of_one_rank_ends_all(interrupted: int) -> None:
    error, seconds = run_until_failure("SIGINT", interrupted)
    other = 1 - interrupted
    assert_stopped(error.ranks[other], other, interrupted, r"was interrupted \(Ctrl-C\)")
    assert "dapple: interrupted\n" in error.ranks[interrupted].stderr
    assert "Traceback" not in error.ranks[interrupted].stderr
    assert error.exit_code == 130
    assert seconds < 10


def test_ctrl_c_at_the_terminal_ends_all() -> None:
    """The terminal sends it to mpirun, which terminates all ranks."""
    error, seconds = run_until_failure("Ctrl-C", 0)
    for rank in error.ranks:
        assert "Traceback" not in rank.stderr
    assert seconds < 10


def test_a_job_without_a_failure_prints_nothing_about_its_end() -> None:
    for rank in run_ranks(["-m", "tests.dapple_tf.distributed.programs.failing_rank", "none", "0", "2"], 2):
        assert rank.stdout.endswith("done\n")
        assert "dapple: " not in rank.stderr
        assert "Traceback" not in rank.stderr
