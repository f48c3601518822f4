"""The failure detector decides from what it is told, at times that the tests choose: no sockets, threads or waiting."""

from __future__ import annotations

import math

import pytest

from dapple_tf.distributed.failure_detector import Failure, FailureDetector
from dapple_tf.distributed.messages import FailureReport
from dapple_tf.distributed.progress import RankStatus

SILENCE = 10.0


def detector_of(rank: int = 1, size: int = 3) -> FailureDetector:
    """The detector of a rank, made at time 100; rank 0 is connected to all others, they to rank 0."""
    connected = range(1, size) if rank == 0 else [0]
    return FailureDetector(rank, size, connected, SILENCE, 100.0)


def status(step: int = 3, collective_calls: int = 5) -> RankStatus:
    return RankStatus(stages=(2,), step=step, collective_calls=collective_calls)


def report(rank: int, what: str = "raised KeyError: 'x'", wait: float = 0.4, *, raised: bool = True) -> FailureReport:
    return FailureReport(rank, status(), what, wait, 1, raised)


def failure_of(detector: FailureDetector) -> Failure:
    assert detector.failure is not None
    return detector.failure


def test_no_failure_is_known_at_first() -> None:
    detector = detector_of()
    detector.check(100.0, waiting_in=None)
    assert detector.failure is None
    assert detector.deadline == math.inf
    assert not detector.may_leave


# --- silence


def test_a_silent_rank_has_failed_after_the_time_set() -> None:
    detector = detector_of()
    detector.note_status(0, status())
    detector.check(100.0 + SILENCE, waiting_in=None)
    assert detector.failure is None
    detector.check(100.0 + SILENCE + 0.1, waiting_in=None)
    failure = failure_of(detector)
    assert (failure.rank, failure.deadline, failure.exit_code, failure.status) == (0, 110.1, 1, status())
    assert failure.what == "has sent nothing for 10.1 s: its host is cut off from the network, or the process hangs"


def test_any_data_from_a_rank_ends_its_silence() -> None:
    detector = detector_of()
    detector.note_received(0, 105.0)
    detector.check(114.0, waiting_in=None)
    assert detector.failure is None


def test_ranks_without_a_connection_to_this_one_are_not_expected_to_send() -> None:
    detector = detector_of()
    detector.note_received(0, 150.0)
    detector.check(150.0, waiting_in=None)
    assert detector.failure is None  # of rank 2 only rank 0 hears


def test_after_a_pause_of_this_process_others_were_not_silent() -> None:
    detector = detector_of()
    detector.note_pause(60.0)
    detector.check(165.0, waiting_in=None)
    assert detector.failure is None
    detector.check(171.0, waiting_in=None)
    assert failure_of(detector).rank == 0


# --- closed connections


def test_a_closed_connection_means_that_the_process_is_gone() -> None:
    detector = detector_of(rank=0)
    detector.note_disconnect(2, "", 101.0)
    failure = failure_of(detector)
    assert (failure.rank, failure.deadline) == (2, 101.0)
    assert failure.what == "was killed or has crashed (its connection closed)"


def test_what_the_connection_says_of_the_failure_is_reported() -> None:
    detector = detector_of()
    detector.note_disconnect(0, "cannot be reached (No route to host)", 101.0)
    assert failure_of(detector).what == "cannot be reached (No route to host)"


def test_a_rank_that_has_left_may_close_its_connection() -> None:
    detector = detector_of(rank=0)
    detector.note_leave(1, status())
    detector.note_disconnect(1, "", 101.0)
    detector.note_received(2, 199.0)
    detector.check(200.0, waiting_in=None)
    assert detector.failure is None


def test_a_reported_error_is_not_replaced_by_the_closed_connection_that_follows() -> None:
    detector = detector_of()
    detector.note_report(report(0), 101.0)
    detector.note_disconnect(0, "", 101.1)
    assert failure_of(detector).what == "raised KeyError: 'x'"


# --- reports of other ranks


def test_a_report_ends_this_rank_after_the_time_it_asks_for() -> None:
    detector = detector_of()
    detector.note_report(FailureReport(2, status(), "was interrupted (Ctrl-C)", 0.4, 130), 101.0)
    assert failure_of(detector) == Failure(2, "was interrupted (Ctrl-C)", 101.4, 130, status())


@pytest.mark.parametrize(("second_wait", "counts"), [(0.2, 0), (0.3, 2), (0.4, 2)])
def test_of_two_failures_the_one_with_the_earlier_deadline_counts(second_wait: float, counts: int) -> None:
    detector = detector_of()
    detector.note_report(report(2, wait=0.3), 101.0)
    detector.note_report(report(0, wait=second_wait), 101.0)
    assert failure_of(detector).rank == counts


def test_a_rank_that_others_declare_failed_ends_itself() -> None:
    detector = detector_of()
    detector.note_report(report(1, "has sent nothing for 10.1 s", wait=0.0, raised=False), 101.0)
    failure = failure_of(detector)
    assert failure.rank == 1
    assert failure.what == "was declared failed by the other ranks: it has sent nothing for 10.1 s"


# --- ranks that leave too early


def test_a_rank_that_left_is_missing_in_a_call_that_waits_for_it() -> None:
    detector = detector_of()
    detector.note_leave(2, status(collective_calls=5))
    detector.check(101.0, waiting_in=None)
    detector.check(101.0, waiting_in=5)  # which rank 2 has still made
    assert detector.failure is None
    detector.check(102.0, waiting_in=6)
    failure = failure_of(detector)
    assert (failure.rank, failure.deadline) == (2, 102.0)
    ended = "has exited (its script ended, or called sys.exit) while other ranks wait for it"
    assert failure.what == f"{ended}: all ranks must make the same calls"
    detector = detector_of()
    detector.note_leave(2, status(collective_calls=5))
    detector.check(102.0, waiting_in=6, missing="rank 0 is about to save, and rank 2 is not")
    what = f"{ended}: rank 0 is about to save, and rank 2 is not, and all ranks must make the same calls"
    assert failure_of(detector).what == what


# --- calls that differ


def test_different_calls_replace_any_failure_and_are_replaced_by_none() -> None:
    detector = detector_of()
    detector.note_report(report(2, wait=3.0), 101.0)
    detector.note_different_calls("rank 0 is about to save", 101.0, 0.4)
    detector.note_report(report(0, wait=0.0), 101.0)
    failure = failure_of(detector)
    assert (failure.rank, failure.what, failure.deadline) == (None, "rank 0 is about to save", 101.4)


def test_different_calls_do_not_postpone_the_end() -> None:
    detector = detector_of()
    detector.note_report(report(2, wait=0.1), 101.0)
    detector.note_different_calls("rank 0 is about to save", 101.0, 0.4)
    assert failure_of(detector).deadline == 101.1


# --- failures of this rank


def test_after_an_error_of_its_own_a_rank_looks_for_no_other_failure() -> None:
    detector = detector_of()
    detector.note_report(report(2), 101.0)
    detector.note_own_error()
    detector.note_report(report(0), 101.0)
    detector.note_different_calls("rank 0 is about to save", 101.0, 0.4)
    detector.check(200.0, waiting_in=9)
    assert detector.failure is None


def test_a_withdrawn_failure_does_not_end_the_process() -> None:
    detector = detector_of()
    detector.fail(1, "was interrupted (Ctrl-C)", status(), 101.0, 5.0, 130)
    detector.withdraw()
    assert detector.deadline == math.inf


# --- when a rank may leave


def test_a_rank_may_leave_once_all_have_left_and_agree() -> None:
    detector = detector_of()
    detector.note_leave(0, status())
    assert not detector.others_left
    detector.note_leave(2, status())
    assert detector.others_left
    assert not detector.may_leave
    detector.agreed = True
    assert detector.may_leave


def test_a_process_ends_once_horovod_has_ended_on_all_ranks() -> None:
    detector = detector_of(rank=0)
    detector.note_finished(1)
    assert not detector.others_finished
    detector.note_disconnect(2, "", 101.0)
    assert detector.others_finished


def test_a_rank_that_has_left_and_falls_silent_before_its_connection_closes_has_failed() -> None:
    """Horovod's end waits for all ranks: a rank that was stopped after it had left hung the job."""
    detector = detector_of()
    for rank in (0, 2):
        detector.note_leave(rank, status())
    detector.agreed = True
    detector.check(1000.0, waiting_in=None)
    assert detector.failure is not None
    assert detector.failure.rank == 0
    assert "has sent nothing for" in detector.failure.what


def test_a_rank_that_must_end_for_a_failure_may_not_leave() -> None:
    detector = detector_of()
    detector.agreed = True
    detector.note_different_calls("rank 0 is about to save", 101.0, 0.4)
    assert not detector.may_leave


def test_rank_0_is_needed_until_it_has_told_that_all_agree() -> None:
    detector = detector_of()
    detector.note_leave(0, status())
    detector.note_disconnect(0, "", 101.0)
    assert detector.failure is not None
    assert detector.failure.rank == 0
    detector = detector_of()
    detector.note_leave(0, status())
    detector.agreed = True
    detector.note_disconnect(0, "", 101.0)
    assert detector.failure is None


def test_after_an_error_a_rank_may_leave_once_the_connected_ranks_have_reported_or_are_gone() -> None:
    detector = detector_of(rank=0)
    detector.note_own_error()
    detector.note_leave(1, status())
    assert not detector.may_leave
    detector.note_report(report(1), 101.0)
    assert not detector.may_leave
    detector.note_disconnect(2, "", 101.0)
    assert detector.may_leave
