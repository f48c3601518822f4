"""Watchdogs of three ranks in one process, connected by socket pairs: no launcher and no Horovod."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from dapple_tf.distributed.exit_reporting import start_watchdog
from dapple_tf.distributed.links import Link
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.messages import LeaveMessage
from dapple_tf.distributed.process_exit import describe_failure, describe_resumption
from dapple_tf.distributed.progress import Progress, RankStatus
from dapple_tf.distributed.watchdog import Watchdog
from dapple_tf.errors import JobError
from dapple_tf.launcher.restart import VARIABLE, Start
from tests.processes import needs_horovod, run_python

KILLED = "was killed or has crashed (its connection closed)"


@dataclass
class Ranks:
    """Ranks 0 to 2, each on a stage of its own; ``ends`` gets (rank, exit code) of each process that would end."""

    watchdogs: list[Watchdog]
    progress: list[Progress]
    sockets: dict[tuple[int, int], socket.socket]
    ends: queue.Queue[tuple[int, int]]

    def ended(self, count: int) -> dict[int, int]:
        """Exit codes of the next ``count`` ranks that end, by rank."""
        return dict(self.ends.get(timeout=30) for _ in range(count))


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks whose timeout is the fixture's parameter, or 60 seconds: longer than a thread of a busy machine waits."""
    made = make_ranks(timeout=getattr(request, "param", 60))
    yield made
    for connection in made.sockets.values():
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    for watchdog in made.watchdogs:
        watchdog.leave()
        watchdog.close()


def make_ranks(timeout: float) -> Ranks:
    sockets: dict[tuple[int, int], socket.socket] = {}
    for rank in (1, 2):
        sockets[0, rank], sockets[rank, 0] = socket.socketpair()
    ends: queue.Queue[tuple[int, int]] = queue.Queue()
    progress = [Progress(stages=(rank,), step=7, collective_calls=9, completed_collective_calls=9) for rank in range(3)]
    watchdogs = []
    for rank in range(3):

        def end(exit_code: int, rank: int = rank) -> None:
            for (mine, _), connection in sockets.items():
                if mine == rank:  # as when the process has ended
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
            ends.put((rank, exit_code))

        links = [Link(other, connection) for (mine, other), connection in sockets.items() if mine == rank]
        watchdogs.append(Watchdog(rank, 3, links, progress[rank], timeout, end, lambda: None))
    for watchdog in watchdogs:
        watchdog.start()
    return Ranks(watchdogs, progress, sockets, ends)


def wait_until(happened: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until a function returns True; fail after some seconds."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)  # the threads of the watchdogs make it happen


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ranks wait longer for the reports of others before they end: for a test that must report in this time."""
    monkeypatch.setattr("dapple_tf.distributed.watchdog._CAUSE_SECONDS", 3.0)


def line_of(capfd: pytest.CaptureFixture[str], rank: int) -> str:
    """The line that the rank has printed."""
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith(f"dapple: rank {rank} ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("ranks", [200], indirect=True)
def test_ranks_without_failures_print_nothing_and_leave_together(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each waits for the last one."""
    leave_in_turn(ranks)
    assert ranks.ends.empty()
    assert "dapple" not in capfd.readouterr().err


@needs_horovod
def test_threads_that_end_horovod_at_the_same_time_do_not_block_each_other() -> None:
    """Horovod's own shutdown blocks forever where two threads call it: the thread of a failed step and the main one.

    It runs in a process of its own, since Horovod cannot start a second time.
    """
    program = (
        "import threading; import horovod.tensorflow as hvd; from dapple_tf.distributed.watchdog import end_horovod\n"
        "hvd.init(); threads = [threading.Thread(target=end_horovod) for _ in range(3)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "assert not hvd.is_initialized()\n"
    )
    run_python("-c", program)


def leave_in_turn(ranks: Ranks) -> None:
    """Let ranks 0 and 1 leave, and then rank 2."""
    leaving = [threading.Thread(target=watchdog.leave) for watchdog in ranks.watchdogs]
    for thread in leaving[:2]:
        thread.start()
    leaving[0].join(0.5)
    assert leaving[0].is_alive()
    leaving[2].start()
    for thread in leaving:
        thread.join(100)  # not at the timeout, but when the last one leaves
        assert not thread.is_alive()


def leave_together(ranks: Ranks) -> None:
    """Let all ranks leave without a failure, so that none waits for the others until its timeout."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(Watchdog.leave, ranks.watchdogs))
    assert ranks.ends.empty()


@pytest.mark.parametrize(("victim", "survivor", "other"), [(1, 0, 2), (1, 2, 0), (0, 1, 2)])
def test_a_closed_connection_ends_all_ranks(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], victim: int, survivor: int, other: int
) -> None:
    ranks.progress[victim].step = 12
    heartbeats = [ranks.watchdogs[rank]._detector._peers[victim] for rank, other in ranks.sockets if other == victim]
    wait_until(lambda: all(peer.status.step == 12 for peer in heartbeats))
    for (mine, _), connection in ranks.sockets.items():
        if mine == victim:
            connection.shutdown(socket.SHUT_WR)
    ends = ranks.ended(3)  # the rank that is gone here loses the others, too
    assert ends[survivor] == ends[other] == 1
    assert line_of(capfd, survivor) == (
        f"dapple: rank {survivor} (stage {survivor}) stops: rank {victim} (stage {victim}), after step 12, {KILLED}; "
        f"the last exchange it completed, by its last report: none. rank {survivor} (stage {survivor}) was after step "
        f"7; the last exchange it completed: none. All processes end; {describe_resumption('')}."
    )


def test_a_rank_that_sends_nothing_ends_all_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 has a connection, but sends no heartbeats."""
    mine, theirs = socket.socketpair()
    ends: queue.Queue[int] = queue.Queue()
    watchdog = Watchdog(0, 2, [Link(1, mine)], Progress(), 1.0, ends.put)
    watchdog.start()
    assert ends.get(timeout=30) == 1
    said = r"rank 1, before its first step, has sent nothing for \d\.\d s: its host is cut off"
    assert re.search(said, line_of(capfd, 0))
    theirs.close()
    watchdog.leave()
    watchdog.close()


def test_the_error_of_one_rank_is_printed_by_all_others(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    """Also if its connection closes right afterwards; rank 0 passes the error on to rank 2."""
    ranks.watchdogs[1].report_error("raised KeyError: 'sample'")
    ranks.sockets[1, 0].shutdown(socket.SHUT_WR)
    assert ranks.ended(2) == {0: 1, 2: 1}
    assert "rank 1 (stage 1), after step 7, raised KeyError: 'sample';" in line_of(capfd, 2)


@pytest.mark.usefixtures("patience")
def test_ranks_that_all_raise_print_nothing_about_others(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        ranks.watchdogs[rank].report_error("raised PlanError: too few")
    for watchdog in ranks.watchdogs:  # none waits for the others
        watchdog.leave()
    assert ranks.ends.empty()
    assert "dapple" not in capfd.readouterr().err


def test_a_long_error_is_shortened_for_the_other_ranks(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    ranks.watchdogs[0].report_error("x" * 1_000_000)
    assert ranks.ended(2) == {1: 1, 2: 1}
    assert "x" * 2000 + " ...;" in line_of(capfd, 1)


def test_a_rank_that_has_left_is_named_by_who_waits_for_it(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    leaving = threading.Thread(target=ranks.watchdogs[1].leave)
    leaving.start()
    with ranks.progress[2].collective_call():
        ends = ranks.ended(3)
    assert ends == {0: 1, 1: 1, 2: 1}
    leaving.join()
    assert "rank 1 (stage 1), after step 7, has exited" in line_of(capfd, 2)


def test_the_call_that_a_rank_which_has_left_does_not_make_is_named(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    """For example, ``step.gather()`` on rank 0 only."""
    leaving = [threading.Thread(target=watchdog.leave) for watchdog in ranks.watchdogs[1:]]
    ranks.progress[0].announce_call("gather the variables")
    with ranks.progress[0].collective_call():
        for thread in leaving:
            thread.start()
        assert ranks.ended(3) == {0: 1, 1: 1, 2: 1}
    for thread in leaving:
        thread.join()
    said = "rank 0 is about to gather the variables, and ranks [1, 2] are not, and all ranks must make the same calls"
    assert said in line_of(capfd, 0)


def test_a_rank_may_leave_while_others_finish_the_same_step(ranks: Ranks) -> None:
    ranks.progress[2].completed_collective_calls = 8  # it is still in the call that rank 1 has completed
    leaving = threading.Thread(target=ranks.watchdogs[1].leave)
    leaving.start()
    threading.Event().wait(0.6)
    assert ranks.ends.empty()
    leave_all(ranks, 0, 2)
    leaving.join(30)
    assert ranks.ends.empty()


def leave_all(ranks: Ranks, *numbers: int) -> None:
    """These ranks leave together; they have 30 s."""
    leaving = [threading.Thread(target=ranks.watchdogs[number].leave, daemon=True) for number in numbers]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(30)
        assert not thread.is_alive()


def announce(ranks: Ranks, *what: str) -> None:
    """Rank 0 makes the first call of ``what``, rank 1 the second, rank 2 the third."""
    for progress, text in zip(ranks.progress, what, strict=True):
        progress.announce_call(text, " of this kind")


def test_ranks_that_make_the_same_calls_go_on_whichever_is_first(ranks: Ranks) -> None:
    """Rank 1 is ahead, rank 2 behind; calls are compared by their number, not by their order of arrival."""
    for number in (1, 2, 3):
        ranks.progress[1].announce_call(f"step {number}")
    ranks.progress[0].announce_call("step 1")
    threading.Event().wait(0.5)
    for number in (1, 2, 3):
        ranks.progress[2].announce_call(f"step {number}")
    for number in (2, 3):
        ranks.progress[0].announce_call(f"step {number}")
    announce(ranks, "to save", "to save", "to save")
    threading.Event().wait(1)
    assert ranks.ends.empty()


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_a_rank_waits_for_the_others_for_as_long_as_they_live(ranks: Ranks) -> None:
    """Longer than the timeout, which is 4 s: whether all agree is not known before."""
    leaving = threading.Thread(target=ranks.watchdogs[1].leave)
    leaving.start()
    leaving.join(5)
    assert leaving.is_alive()
    leave_all(ranks, 0, 2)
    leaving.join(30)
    assert not leaving.is_alive()
    assert ranks.ends.empty()


def test_a_rank_that_falls_silent_when_all_have_agreed_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """It was stopped after Horovod had ended on all ranks: the others ended well, and the launcher waited for it."""
    mine, theirs = socket.socketpair()
    ends: queue.Queue[int] = queue.Queue()
    watchdog = Watchdog(0, 2, [Link(1, mine)], Progress(), 1.0, ends.put)
    silent = Watchdog(1, 2, [Link(0, theirs)], Progress(stages=(1,)), 1.0)
    silent._transport.send(LeaveMessage(1, silent._progress.status()))
    watchdog.start()
    watchdog.leave()
    assert ends.get(timeout=30) == 1
    said = r"rank 1 \(stage 1\), before its first step, has sent nothing for \d\.\d s"
    assert re.search(said, line_of(capfd, 0))
    for one in (watchdog, silent):
        one.close()


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_whose_last_calls_differ_do_not_end_well(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], odd: int
) -> None:
    """They leave right after the calls; their processes once ended before the difference was reported."""
    announce(ranks, "run step 8", "run step 8", "run step 8")
    announce(ranks, *("run step 9 with 6 samples" if rank == odd else "run step 9" for rank in range(3)))
    leave_all(ranks, 0, 1, 2)
    assert ranks.ended(3) == {0: 1, 1: 1, 2: 1}
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert f"rank {odd} is about to run step 9 with 6 samples" in line


@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_do_not_end_well_where_one_has_made_a_call_more(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], odd: int
) -> None:
    announce(ranks, "run step 8", "run step 8", "run step 8")
    ranks.progress[odd].announce_call("save")
    leave_all(ranks, 0, 1, 2)
    assert ranks.ended(3) == {0: 1, 1: 1, 2: 1}
    others = [rank for rank in range(3) if rank != odd]
    assert f"rank {odd} is about to save, and ranks {others} are not. Every" in capfd.readouterr().err


def test_a_rank_whose_rank_0_ends_without_a_verdict_does_not_end_well(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    leaving = [threading.Thread(target=ranks.watchdogs[rank].leave, daemon=True) for rank in (1, 2)]
    for thread in leaving:
        thread.start()
    wait_until(lambda: ranks.watchdogs[0]._detector.others_left)
    ranks.watchdogs[0]._transport.send(LeaveMessage(0, ranks.progress[0].status()))
    threading.Event().wait(0.3)
    assert ranks.ends.empty()
    for other in (1, 2):
        ranks.sockets[0, other].shutdown(socket.SHUT_WR)
    assert ranks.ended(2) == {1: 1, 2: 1}
    assert KILLED in capfd.readouterr().err


@pytest.mark.usefixtures("patience")
def test_ranks_that_make_different_calls_end_and_all_say_who_called_what(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also the ranks that agree with rank 0, and raise nothing."""
    announce(ranks, "run step 8", "run step 8", "run step 8")
    announce(ranks, "run step 9 with 6 samples", "run step 9 with 8 samples", "run step 9 with 6 samples")
    assert ranks.ended(3) == {0: 1, 1: 1, 2: 1}
    assert sorted(capfd.readouterr().err.splitlines()) == [
        f"dapple: rank {me} (stage {me}) stops after step 7, because the ranks make different calls: ranks [0, 2] are "
        "about to run step 9 with 6 samples of this kind, rank 1 is about to run step 9 with 8 samples of this kind. "
        "Every rank must be called with the same batches, and make the same calls in the same order. The last exchange "
        f"it completed: none. All processes end; {describe_resumption('')}."
        for me in range(3)
    ]


@pytest.mark.usefixtures("patience")
def test_different_calls_are_printed_beside_the_error_that_they_cause(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 raises and ends by itself; the others hear of that before they notice the difference."""
    ranks.watchdogs[1].report_error("raised StepError: Incompatible shapes")
    announce(ranks, "run step 8", "save", "run step 8")
    assert ranks.ended(2) == {0: 1, 2: 1}
    lines = sorted(capfd.readouterr().err.splitlines())
    assert [line[:14] for line in lines] == [f"dapple: rank {rank}" for rank in range(3)]
    for line in lines:
        assert "stops after step 7, because the ranks make different calls: rank" in line
        # Printed as soon as two ranks have called, whichever these are.
        assert "rank 1 is about to save of this kind" in line
        assert re.search(r"(ranks \[0, 2\] are|rank [02] is) about to run step 8 of this kind", line)


@pytest.mark.usefixtures("patience")
def test_different_calls_are_printed_though_a_rank_is_gone_by_then(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    announce(ranks, "run step 8", "save", "run step 8")
    detectors = [watchdog._detector for watchdog in ranks.watchdogs]
    wait_until(lambda: all(known.failure is not None and "ranks [0, 2]" in known.failure.what for known in detectors))
    ranks.sockets[1, 0].shutdown(socket.SHUT_WR)
    assert ranks.ended(3).keys() == {0, 1, 2}
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert "because the ranks make different calls: ranks [0, 2] are about to run step 8" in line


@pytest.mark.parametrize("saved", ["", "step 6 is saved as run/checkpoint-6.safetensors"])
def test_a_rank_that_ends_itself_says_what_is_saved_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, saved: str
) -> None:
    """Under a launcher that starts jobs again, the launcher says how."""
    monkeypatch.setattr("sys.orig_argv", ["python", "fit.py"])
    status = RankStatus((1,), 7)
    what = saved or "dapple has saved no checkpoint of this job"
    said = describe_failure(1, status, 1, status, "was terminated (SIGTERM)", saved)
    assert said.endswith(f". All processes end; {what}; start the job again with ranks that run python fit.py.")
    monkeypatch.setenv(VARIABLE, Start(0).to_text())
    assert describe_failure(1, status, 1, status, "was terminated", saved).endswith(f". All processes end; {what}.")


def test_a_signal_counts_only_while_the_watchdog_handles_it(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    """The thread receives the signal's number in any case; the installed handler decides."""
    watchdog = ranks.watchdogs[1]
    watchdog.signals.wake(signal.SIGTERM)
    threading.Event().wait(0.8)
    assert ranks.ends.empty()
    before = signal.signal(signal.SIGTERM, watchdog.signals.on_terminate)
    try:
        watchdog.signals.wake(signal.SIGTERM)
        assert ranks.ended(3)[1] in (1, 128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "rank 1 (stage 1), after step 7, was terminated (SIGTERM)" in line_of(capfd, 2)


def take_steps(watchdog: Watchdog, barrier: threading.Barrier) -> int:
    """Take steps which, like those of a job, no rank completes before all have begun them; return the last one."""
    for step in range(1, 30_000):
        barrier.wait(30)
        time.sleep(0.001)  # so that the steps last longer than any test waits for a signal
        if watchdog.agree_to_stop(step):
            return step
    return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("signalled", [(0,), (2,), (0, 1, 2)], ids=str)
def test_a_signal_stops_all_ranks_after_the_same_step(
    ranks: Ranks, number: signal.Signals, signalled: tuple[int, ...]
) -> None:
    told: list[tuple[int, str]] = []
    barrier = threading.Barrier(3)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for rank, watchdog in enumerate(ranks.watchdogs):
            watchdog.allow_stops(lambda what, rank=rank: told.append((rank, what)))
        running = [pool.submit(take_steps, watchdog, barrier) for watchdog in ranks.watchdogs]
        for rank in signalled:
            watchdog = ranks.watchdogs[rank]
            handler = watchdog.signals.on_interrupt if number == signal.SIGINT else watchdog.signals.on_terminate
            before = signal.signal(number, handler)
            try:
                watchdog.signals.wake(number)
                wait_until(lambda: bool(told))
                threading.Event().wait(0.1)  # for the signals of further ranks, which change nothing
            finally:
                signal.signal(number, before)
        stopped = [one.result(60) for one in running]
    assert stopped[0] > 0
    assert len(set(stopped)) == 1
    assert len(told) == 1  # whose signal comes first depends on the threads
    assert told[0] in [(0, f"rank {rank} (stage {rank}), after step 7, got {number.name}") for rank in signalled]
    leave_together(ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_ends_all_ranks_at_once(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """The main threads take no step; a second SIGUSR1 is a SIGTERM."""
    for watchdog in ranks.watchdogs:
        watchdog.allow_stops(lambda _: None)
    handler = ranks.watchdogs[1].signals.on_terminate
    before = {one: signal.signal(one, handler) for one in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        ranks.watchdogs[1].signals.wake(number)
        threading.Event().wait(0.8)
        assert ranks.ends.empty()
        ranks.watchdogs[1].signals.wake(signal.SIGTERM)
        assert ranks.ended(3).keys() == {0, 1, 2}
    finally:
        for one, usual in before.items():
            signal.signal(one, usual)
    assert "rank 1 (stage 1), after step 7, was terminated (SIGTERM)" in line_of(capfd, 2)


def test_sigusr1_is_sigterm_where_no_stop_is_allowed(ranks: Ranks) -> None:
    """The user may have a handler of SIGTERM, which ``dapple launch`` must not keep from running."""
    seen = threading.Event()
    receiver = ranks.watchdogs[1].signals
    before = {
        number: signal.signal(number, handler)
        for number, handler in ((signal.SIGTERM, lambda *_: seen.set()), (signal.SIGUSR1, receiver.on_terminate))
    }
    try:
        receiver.wake(signal.SIGUSR1)
        assert seen.wait(30)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    leave_together(ranks)


class Alone(Job):
    """A job whose rank 0 needs no other ranks to decide."""

    def broadcast(self, value: object, *_: object) -> object:
        return value


@pytest.mark.usefixtures("patience")
def test_a_rank_that_still_runs_after_its_error_is_ended_with_a_message(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapple_tf.distributed.watchdog._OWN_EXIT_SECONDS", 0.3)
    for watchdog in ranks.watchdogs:
        watchdog.report_error("raised StepError: the loss is not finite")
    assert ranks.ended(3) == {0: 1, 1: 1, 2: 1}
    assert line_of(capfd, 1).startswith("dapple: rank 1 (stage 1) is ended: it still runs 0.3 s after the error above")


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_the_timeout_must_be_a_number_of_seconds(text: str) -> None:
    with pytest.raises(JobError, match=f"DAPPLE_TIMEOUT_SECONDS='{text}': give a number of seconds, 1 or more"):
        start_watchdog(Alone(2, 0, 0, 2), {"DAPPLE_TIMEOUT_SECONDS": text})
