"""What a rank reports to the others, and prints, when it ends: with a recording watchdog in place of the real one."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.distributed import exit_reporting, membership
from dapple_tf.distributed.exit_reporting import prints_error_in_full, report_failure, start_exit_reporting
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.process_exit import print_line
from dapple_tf.distributed.shared_errors import share_error
from dapple_tf.errors import CheckpointError, JobError, OutputError, PlanError, StepError
from dapple_tf.launcher.restart import REFUSED, VARIABLE, Start


@dataclass
class RecordingWatchdog:
    """A watchdog that keeps what is reported to it."""

    reports: list[tuple[Any, ...]] = field(default_factory=list)
    installed: int = 0

    @property
    def signals(self) -> RecordingWatchdog:
        return self

    def install(self) -> None:
        self.installed += 1

    def report_error(self, what: str, exit_code: int = 1) -> None:
        self.reports.append(("error", what, exit_code))

    def report_lost_ranks(self, what: str) -> None:
        self.reports.append(("lost ranks", what))


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingWatchdog]:
    """The watchdog of this process, as rank 1 of two."""
    made = RecordingWatchdog()
    monkeypatch.setattr(membership, "_job", Job(2, 1, 1, 2))
    monkeypatch.setattr(exit_reporting, "start_watchdog", lambda job: made)
    monkeypatch.setattr("os.register_at_fork", lambda **_: None)
    monkeypatch.setattr("atexit.register", lambda *_: None)
    hook = sys.excepthook
    job = membership.current()
    start_exit_reporting(job)
    yield made
    sys.excepthook = hook


def raise_uncaught(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


def test_starting_twice_starts_one_watchdog(watchdog: RecordingWatchdog) -> None:
    job, hook = membership.current(), sys.excepthook
    assert job.watchdog is watchdog
    start_exit_reporting(job)
    assert sys.excepthook is hook
    assert watchdog.installed == 1


def test_an_uncaught_error_is_printed_and_reported(
    watchdog: RecordingWatchdog, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_uncaught(KeyError("no such sample"))
    assert watchdog.reports == [("error", "raised KeyError: 'no such sample'", 1)]
    assert "KeyError: 'no such sample'" in capsys.readouterr().err


def test_an_error_that_another_rank_prints_is_one_line_here(
    watchdog: RecordingWatchdog, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_uncaught(share_error(PlanError("too few ranks"), 0))
    assert capsys.readouterr().err == "dapple: rank 1 ends: rank 0 prints the error (PlanError)\n"
    assert watchdog.reports == [("error", "raised PlanError: too few ranks", 1)]


def test_an_error_that_this_rank_prints_for_all_is_printed_in_full(watchdog: RecordingWatchdog) -> None:
    assert prints_error_in_full(share_error(PlanError("too few ranks"), 1))
    assert prints_error_in_full(PlanError("too few ranks"))


def test_ctrl_c_is_reported_without_a_traceback(
    watchdog: RecordingWatchdog, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_uncaught(KeyboardInterrupt())
    assert capsys.readouterr().err == "dapple: interrupted\n"
    assert watchdog.reports == [("error", "was interrupted (Ctrl-C)", 130)]


def test_the_other_ranks_end_with_the_exit_code_of_the_error(watchdog: RecordingWatchdog) -> None:
    report_failure(OutputError("t.gif: a timeline is saved as .png"), 2)
    assert watchdog.reports == [("error", "raised OutputError: t.gif: a timeline is saved as .png", 2)]


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("Horovod has been shut down", True),
        ("MPI_Allreduce failed", True),
        ("gloo: connection closed", True),
        ("lost the connection to rank 1: the other end has closed it", True),
        ("the loss is not finite", False),
    ],
)
def test_a_step_that_has_lost_the_other_ranks_waits_for_their_reports(
    watchdog: RecordingWatchdog, text: str, lost: bool
) -> None:
    report_failure(StepError(text))
    what = f"raised StepError: {text}"
    assert watchdog.reports == [("lost ranks", what) if lost else ("error", what, 1)]


def test_a_call_outside_of_a_step_that_has_lost_the_other_ranks_waits_too(watchdog: RecordingWatchdog) -> None:
    text = "Horovod has been shut down"
    report_failure(tf.errors.UnknownError(None, None, text))
    report_failure(ValueError(text))  # the user's own
    assert watchdog.reports == [
        ("lost ranks", f"raised UnknownError: {text}"),
        ("error", f"raised ValueError: {text}", 1),
    ]


def test_a_launcher_learns_by_the_exit_code_which_errors_would_come_again(
    watchdog: RecordingWatchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, Start(0).to_text())
    passing = [OSError("away"), StepError("no memory"), CheckpointError("the disk is full", lasts=False)]
    for error in passing:
        raise_uncaught(error)
    assert [code for _, _, code in watchdog.reports] == [1, 1, 1]
    for error in (PlanError("too few ranks"), CheckpointError("of another model"), JobError("rank 1", lasts=True)):
        with pytest.raises(SystemExit) as caught:
            raise_uncaught(pickle.loads(pickle.dumps(error)))  # as it comes from another rank
        assert caught.value.code == REFUSED
        assert watchdog.reports[-1][2] == REFUSED


def test_outside_of_a_job_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_job", None)
    report_failure(KeyError("no such sample"))
    assert prints_error_in_full(share_error(PlanError("too few ranks"), 0))


def test_a_line_about_a_name_that_is_not_utf_8_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    print_line(f"rank 1 has no file {os.fsdecode(b'caf' + bytes([0xE9]))}")
    assert capfd.readouterr().err == "dapple: rank 1 has no file caf\\udce9\n"
