"""Ranks that are called with different batches, or make different calls, end soon, and say which rank did what."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from dapple_tf.distributed.call_order_check import CallComparison, RankCall
from tests.dapple_tf.distributed.failing_jobs import assert_ended
from tests.processes import RanksError, needs_horovod, run_ranks

# --- the comparison itself


def call(what: str, number: int = 1) -> RankCall:
    return RankCall(number, what, " of float32[4]")


def comparison(size: int) -> tuple[CallComparison, list[str]]:
    """A comparison, and the differences that it reports."""
    reported: list[str] = []
    return CallComparison(size, reported.append), reported


def test_equal_calls_do_not_differ_in_whichever_order_they_arrive() -> None:
    calls, reported = comparison(2)
    for arrival in [(1, call("a", 1)), (1, call("b", 2)), (0, call("a", 1)), (0, call("b", 2))]:
        calls.compare(*arrival)
    assert not reported


def test_details_are_not_compared() -> None:
    calls, reported = comparison(2)
    calls.compare(0, RankCall(1, "a", " of float32[4]"))
    calls.compare(1, RankCall(1, "a", " of float64[4]"))
    assert not reported


def test_the_first_rank_that_differs_is_found_before_all_have_called() -> None:
    calls, reported = comparison(4)
    calls.compare(2, call("run step 3"))
    calls.compare(0, call("save"))
    assert reported == ["rank 0 is about to save of float32[4], rank 2 is about to run step 3 of float32[4]"]


def test_ranks_that_make_the_same_call_are_named_together() -> None:
    calls, reported = comparison(4)
    for rank in (0, 3):
        calls.compare(rank, call("run step 3"))
    calls.compare(1, call("save"))
    (text,) = reported
    assert text.startswith("ranks [0, 3] are about to run step 3 of float32[4], rank 1 is about to save")


def test_a_call_that_others_have_not_made_is_unanswered() -> None:
    calls, reported = comparison(3)
    for rank in range(3):
        calls.compare(rank, call("a", 1))
    assert calls.conclude()
    assert not reported
    for rank in (0, 2):
        calls.compare(rank, call("b", 2))
    calls.compare(0, call("c", 3))
    assert not calls.conclude()
    assert reported == ["ranks [0, 2] are about to b of float32[4], and rank 1 is not"]


# --- jobs

EQUAL = "run step 11 with 16 samples (program 1) of float64[4], float64[4]"
OTHER = "run step 11 with 8 samples (program 1) of float64[4], float64[4]"


def run_until_they_differ(name: str, stages: int, replicas: int, *folder: str) -> RanksError:
    """Return how the job ended: within seconds, and not by the watchdog's timeout."""
    program = "tests.dapple_tf.distributed.programs.different_calls"
    with pytest.raises(RanksError) as caught:
        run_ranks(["-m", program, name, str(stages), str(replicas), *folder], stages * replicas)
    end = time.time()
    assert_ended(caught.value)
    printed = re.match(r"[\d.]+$", caught.value.ranks[0].stdout, re.MULTILINE)
    assert printed is not None
    assert end - float(printed[0]) < 15
    return caught.value


@needs_horovod
@pytest.mark.parametrize(
    ("name", "stages", "what"),
    [
        # One rank would trace while the other runs a step: each waits for data that the other does not send.
        ("other dtype", 2, "trace the model for 16 samples of float32[4], float32[4]"),
        # Replicas would sum gradients of different batches, and not notice.
        ("fewer samples", 1, OTHER),
        ("forward", 2, "run forward after step 10 with 16 samples (program 2) of float64[4], float64[4]"),
        ("other step", 2, "run step 11 with 16 samples (program 2) of float64[4], float64[4]"),
        ("gather", 2, "gather the variables"),
        ("check numerics", 1, "build another program (check) for 16 samples of float64[4], float64[4]"),
    ],
)
def test_all_ranks_end_and_say_which_rank_made_which_call(name: str, stages: int, what: str) -> None:
    error = run_until_they_differ(name, stages, 2 // stages)
    assert error.exit_code == 1
    for number, rank in enumerate(error.ranks):
        text = f"because the ranks make different calls: rank 0 is about to {EQUAL}, rank 1 is about to {what}. Every"
        assert text in rank.stderr
        assert f"dapple: rank {number} " in rank.stderr
        assert rank.stderr.count("stops ") == 1


@needs_horovod
def test_variables_trained_on_different_batches_are_not_saved(tmp_path: Path) -> None:
    """Even if the ranks save before the watchdog has found the difference."""
    error = run_until_they_differ("fewer samples, then save", 1, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    for rank in error.ranks:
        text = f"because the ranks make different calls: rank 0 is about to {OTHER}, rank 1 is about to {EQUAL}."
        assert text in rank.stderr
    first, last = error.ranks
    assert "JobError: the ranks differ in their batches or calls until now: rank 0 has " in first.stderr
    assert "Traceback" not in last.stderr
