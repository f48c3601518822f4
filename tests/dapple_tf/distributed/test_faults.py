"""What happens to a job when one of its ranks fails: all others end soon, and say who failed, and where."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import pytest

from tests.processes import MPIRUN, Launcher, Rank, RanksError, needs_horovod, run_ranks

pytestmark = needs_horovod

EXCHANGE = r"(exchange/\S+|update/barrier|none of step \d+)"
ENDED = r"\. All processes end; restart from the last checkpoint\.\n"


def run_until(
    what: str,
    victim: int,
    *,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    launcher: Launcher = MPIRUN,
) -> tuple[RanksError, float]:
    """How the job ended, and the seconds from what happened to the end of its launcher."""
    arguments = ["tests/dapple_tf/distributed/programs/fail.py", what, str(victim), str(ranks)]
    with pytest.raises(RanksError) as caught:
        run_ranks(arguments, ranks, environment=environment, launcher=launcher)
    end = time.time()
    assert caught.value.exit_code is not None, "it hung"
    assert not caught.value.left
    happened = re.search(r"^[\d.]+$", caught.value.ranks[victim].stdout, re.MULTILINE)
    return caught.value, end - float(happened[0]) if happened else 0.0


def stops(rank: Rank, me: int, other: int, what: str) -> None:
    """Assert that the rank has said, in one line and without a traceback, why it stops."""
    assert re.search(
        rf"^dapple: rank {me} \(stage {me}\) stops: rank {other} \(stage {other}\), (in|after) step \d+, {what}; the "
        rf"last exchange it completed, by its last report: {EXCHANGE}\. rank {me} \(stage {me}\) was (in|after) step "
        rf"\d+; the last exchange it completed: {EXCHANGE}{ENDED}",
        rank.stderr,
        re.MULTILINE,
    ), rank.stderr
    assert rank.stderr.count("stops: ") == 1
    assert "Traceback" not in rank.stderr


def test_a_killed_rank_is_named_by_all_others() -> None:
    error, seconds = run_until("SIGKILL", 1, ranks=3)
    for me in (0, 2):
        stops(error.ranks[me], me, 1, r"was killed or has crashed \(its connection closed\)")
    assert error.exit_code == 128 + 9
    assert seconds < 10


@pytest.mark.slow
def test_rank_0_may_be_the_one_that_is_killed() -> None:
    error, seconds = run_until("SIGKILL", 0)
    stops(error.ranks[1], 1, 0, r"was killed or has crashed \(its connection closed\)")
    assert seconds < 10


def test_a_rank_that_raises_between_steps_tells_the_others_its_error() -> None:
    error, seconds = run_until("raise", 1)
    assert error.ranks[1].stderr.count("Traceback") == 1
    assert "KeyError: 'no such sample'" in error.ranks[1].stderr
    stops(error.ranks[0], 0, 1, "raised KeyError: 'no such sample'")
    assert error.exit_code == 1
    assert seconds < 10


def test_a_rank_that_fails_in_a_step_tells_the_others_its_error() -> None:
    """Only the last stage looks at the loss; Horovod's ops of its step wait for what the failed op does not send."""
    error, _ = run_until("bad-data", 1)
    failed = "StepError: All variables are as they were before the step. The step failed: bad loss : Tensor had NaN"
    assert failed in error.ranks[1].stderr
    assert f"stops: rank 1 (stage 1), in step 6, raised {failed}" in error.ranks[0].stderr
    assert "Traceback" not in error.ranks[0].stderr


@pytest.mark.slow
def test_what_is_not_finite_is_named_by_all_ranks() -> None:
    error, seconds = run_until("not-finite", 0)
    for rank in error.ranks:
        assert re.search(
            r"StepError: All variables are as they were before the step. The step failed: (the loss|on stage \d the "
            r"gradient of variable 'w\d') is not finite : Tensor had NaN",
            rank.stderr,
        )
    assert seconds < 20


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_after_the_time_that_was_set() -> None:
    """To the others a process that stands still is one whose host is cut off."""
    error, seconds = run_until("SIGSTOP", 1, environment={"DAPPLE_TIMEOUT_SECONDS": "4"})
    stops(error.ranks[0], 0, 1, r"has not been heard of for 3\.\d s: its host is cut off, or the process hangs")
    assert seconds < 4 + 10


@pytest.mark.slow
def test_a_rank_that_ends_before_the_others_is_named() -> None:
    error, seconds = run_until("exit", 1)
    stops(error.ranks[0], 0, 1, r"has ended by itself \(its script is over, .* must take the same steps")
    assert "rank 1 (stage 1), after step 5, has ended" in error.ranks[0].stderr
    assert seconds < 10


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupt_of_one_rank_ends_all(victim: int) -> None:
    error, seconds = run_until("SIGINT", victim)
    other = 1 - victim
    stops(error.ranks[other], other, victim, r"was interrupted \(Ctrl-C\)")
    assert "dapple: interrupted\n" in error.ranks[victim].stderr
    assert "Traceback" not in error.ranks[victim].stderr
    assert error.exit_code == 130
    assert seconds < 10


@pytest.mark.slow
def test_ctrl_c_at_the_terminal_ends_all() -> None:
    """The terminal gives it to mpirun, which tells all ranks to end."""
    error, seconds = run_until("ctrl-c", 0)
    for rank in error.ranks:
        assert "Traceback" not in rank.stderr
    assert seconds < 10


@pytest.mark.slow
def test_a_job_that_ends_as_it_should_says_nothing() -> None:
    for rank in run_ranks(["tests/dapple_tf/distributed/programs/fail.py", "nothing", "0", "2"], 2):
        assert rank.stdout.endswith("done\n")
        assert "dapple: " not in rank.stderr
        assert "Traceback" not in rank.stderr
