"""The watch of ranks over each other, without Horovod: three watches in one process, linked by sockets."""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dapple_tf.distributed.links import Link
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.progress import Progress, Standing
from dapple_tf.distributed.watchdog import Watch, start_watch
from dapple_tf.errors import JobError

KILLED = "was killed or has crashed (its connection closed)"


@dataclass
class Ranks:
    """Ranks 0 to 2, each on a stage of its own; ``ends`` gets (rank, exit code) of each process that would end."""

    watches: list[Watch]
    progress: list[Progress]
    sockets: dict[tuple[int, int], socket.socket]
    ends: queue.Queue[tuple[int, int]]

    def ended(self, count: int) -> dict[int, int]:
        """Exit codes of the next ``count`` ranks that end, by rank."""
        return dict(self.ends.get(timeout=5) for _ in range(count))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = make_ranks(timeout=2)
    yield made
    for connection in made.sockets.values():
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    for watch in made.watches:
        watch.leave()
        watch.close()


def make_ranks(timeout: float) -> Ranks:
    sockets: dict[tuple[int, int], socket.socket] = {}
    for rank in (1, 2):
        sockets[0, rank], sockets[rank, 0] = socket.socketpair()
    ends: queue.Queue[tuple[int, int]] = queue.Queue()
    progress = [Progress(stage=rank, step=7, meetings=9, met=9) for rank in range(3)]
    watches = []
    for rank in range(3):

        def end(exit_code: int, rank: int = rank) -> None:
            for (mine, _), connection in sockets.items():
                if mine == rank:  # as when the process has ended
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
            ends.put((rank, exit_code))

        links = [Link(other, connection) for (mine, other), connection in sockets.items() if mine == rank]
        watches.append(Watch(Job(3, rank, rank, 3), links, progress[rank], timeout, end))
    for watch in watches:
        watch.start()
    return Ranks(watches, progress, sockets, ends)


def told(capfd: pytest.CaptureFixture[str], rank: int) -> str:
    """What the rank has said."""
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith(f"dapple: rank {rank} ")]
    assert len(lines) == 1
    return lines[0]


def test_silence_about_those_that_do_as_they_should(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    """They leave one after the other, each waiting for the last."""
    leaving = [threading.Thread(target=watch.leave) for watch in ranks.watches]
    for thread in leaving[:2]:
        thread.start()
    leaving[0].join(0.5)
    assert leaving[0].is_alive()
    leaving[2].start()
    for thread in leaving:
        thread.join(1.5)
        assert not thread.is_alive()
    assert ranks.ends.empty()
    assert "dapple" not in capfd.readouterr().err


@pytest.mark.parametrize(("victim", "survivor", "other"), [(1, 0, 2), (1, 2, 0), (0, 1, 2)])
def test_a_closed_connection_ends_all(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], victim: int, survivor: int, other: int
) -> None:
    ranks.progress[victim].step = 12
    threading.Event().wait(0.5)  # for it to be told
    for (mine, _), connection in ranks.sockets.items():
        if mine == victim:
            connection.shutdown(socket.SHUT_WR)
    ends = ranks.ended(3)  # what is dead here misses the others, too
    assert ends[survivor] == ends[other] == 1
    assert told(capfd, survivor) == (
        f"dapple: rank {survivor} (stage {survivor}) stops: rank {victim} (stage {victim}), after step 12, {KILLED}; "
        f"the last exchange it completed, by its last report: none. rank {survivor} (stage {survivor}) was after step "
        "7; the last exchange it completed: none. All processes end; restart from the last checkpoint."
    )


def test_silence_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 2 is there, but its watch does not run."""
    mine, theirs = socket.socketpair()
    ends: queue.Queue[int] = queue.Queue()
    watch = Watch(Job(2, 0, 0, 2), [Link(1, mine)], Progress(), 1.0, ends.put)
    watch.start()
    assert ends.get(timeout=5) == 1
    assert "rank 1, before its first step, has not been heard of for 0.8 s: its host is cut off" in told(capfd, 0)
    theirs.close()
    watch.leave()
    watch.close()


def test_the_error_of_a_rank_reaches_all(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    """Also when its connection closes right afterwards, and rank 0 is told what goes to rank 2."""
    ranks.watches[1].report("raised KeyError: 'sample'")
    ranks.sockets[1, 0].shutdown(socket.SHUT_WR)
    assert ranks.ended(2) == {0: 1, 2: 1}
    assert "rank 1 (stage 1), after step 7, raised KeyError: 'sample';" in told(capfd, 2)


def test_a_rank_that_raises_itself_does_not_speak_of_others(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        ranks.watches[rank].report("raised PlanError: too few")
    for watch in ranks.watches:  # nobody waits for the others
        watch.leave()
    assert ranks.ends.empty()
    assert "dapple" not in capfd.readouterr().err


def test_only_so_much_of_an_error_travels(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    ranks.watches[0].report("x" * 1_000_000)
    assert ranks.ended(2) == {1: 1, 2: 1}
    assert "x" * 2000 + " ...;" in told(capfd, 1)


def test_a_rank_that_has_left_is_missed_by_who_waits_for_it(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    leaving = threading.Thread(target=ranks.watches[1].leave)
    leaving.start()
    with ranks.progress[2].meeting():
        ends = ranks.ended(3)
    assert ends == {0: 1, 1: 1, 2: 1}
    leaving.join()
    assert "rank 1 (stage 1), after step 7, has ended by itself" in told(capfd, 2)


def test_a_rank_may_end_while_others_finish_the_same_step(ranks: Ranks) -> None:
    ranks.progress[2].met = 8  # it is still in the meeting that rank 1 has left
    leaving = threading.Thread(target=ranks.watches[1].leave)
    leaving.start()
    threading.Event().wait(0.6)
    assert ranks.ends.empty()
    leaving.join()


def begin(ranks: Ranks, *what: str) -> None:
    """Rank 0 begins the first of ``what``, rank 1 the second, rank 2 the third."""
    for progress, text in zip(ranks.progress, what, strict=True):
        progress.begin(text, " of this kind")


def test_ranks_that_begin_the_same_go_on_whoever_is_first(ranks: Ranks) -> None:
    """Rank 1 is ahead by some, rank 2 behind; equal texts at other places are no matter."""
    for number in (1, 2, 3):
        ranks.progress[1].begin(f"step {number}")
    ranks.progress[0].begin("step 1")
    threading.Event().wait(0.5)
    for number in (1, 2, 3):
        ranks.progress[2].begin(f"step {number}")
    for number in (2, 3):
        ranks.progress[0].begin(f"step {number}")
    begin(ranks, "to save", "to save", "to save")
    threading.Event().wait(1)
    assert ranks.ends.empty()


@pytest.mark.parametrize("me", [0, 1, 2])
def test_ranks_that_begin_something_else_are_told_apart_by_all(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], me: int
) -> None:
    """Also by those that do not differ, and raise nothing."""
    begin(ranks, "run step 8", "run step 8", "run step 8")
    begin(ranks, "run step 9 with 6 samples", "run step 9 with 8 samples", "run step 9 with 6 samples")
    assert ranks.ended(3) == {0: 1, 1: 1, 2: 1}
    assert told(capfd, me) == (
        f"dapple: rank {me} (stage {me}) stops after step 7, because the ranks make different calls: ranks [0, 2] are "
        "about to run step 9 with 6 samples of this kind, rank 1 is about to run step 9 with 8 samples of this kind. "
        "Every rank must be called with the same batches, and make the same calls in the same order. The last exchange "
        "it completed: none. All processes end; restart from the last checkpoint."
    )


def test_that_ranks_differ_is_told_beside_the_error_that_it_leads_to(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 raises, and ends by itself; the others have heard of that before they notice the difference."""
    ranks.watches[1].report("raised StepError: Incompatible shapes")
    begin(ranks, "run step 8", "save", "run step 8")
    assert ranks.ended(2) == {0: 1, 2: 1}
    lines = sorted(capfd.readouterr().err.splitlines())
    assert [line[:14] for line in lines] == [f"dapple: rank {rank}" for rank in range(3)]
    for line in lines:
        assert "stops after step 7, because the ranks make different calls: rank" in line
        # Told as soon as two have begun, whichever they are.
        assert "rank 1 is about to save of this kind" in line
        assert re.search(r"(ranks \[0, 2\] are|rank [02] is) about to run step 8 of this kind", line)


def test_that_ranks_differ_is_told_though_one_of_them_is_gone_by_then(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    begin(ranks, "run step 8", "save", "run step 8")
    threading.Event().wait(0.1)  # for it to be noticed
    ranks.sockets[1, 0].shutdown(socket.SHUT_WR)
    assert ranks.ended(3).keys() == {0, 1, 2}
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert "because the ranks make different calls: ranks [0, 2] are about to run step 8" in line


def test_a_signal_is_heeded_only_while_it_is_ours(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    """The thread is woken by number; whose handler is set decides."""
    watch = ranks.watches[1]
    watch.wake(signal.SIGTERM)
    threading.Event().wait(0.8)
    assert ranks.ends.empty()
    before = signal.signal(signal.SIGTERM, watch.on_terminate)
    try:
        watch.wake(signal.SIGTERM)
        assert ranks.ended(3)[1] in (1, 128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "rank 1 (stage 1), after step 7, was told to end (SIGTERM)" in told(capfd, 2)


def test_messages_of_several_threads_arrive_whole() -> None:
    """The main thread tells what it begins while the watch sends its beat."""
    mine, theirs = socket.socketpair()
    mine.settimeout(5)
    sending, receiving = Link(1, mine), Link(0, theirs)
    senders = [threading.Thread(target=send_many, args=(sending, text * 50_000)) for text in "ab"]
    for sender in senders:
        sender.start()
    received = []
    while len(received) < 100:
        received += receiving.receive()
    assert sorted(message["text"][:1] for message in received) == ["a"] * 50 + ["b"] * 50
    for sender in senders:
        sender.join(5)
    mine.close()
    theirs.close()


def send_many(link: Link, text: str) -> None:
    for _ in range(50):
        link.send({"text": text})


def test_standing_in_words() -> None:
    assert Standing().when == "before its first step"
    assert Standing(step=3, running=True).when == "in step 3"
    assert Standing(step=3).when == "after step 3"
    assert Standing(step=3, running=True).completed == "none of step 3"
    assert Standing(step=3, exchange="exchange/outputs").completed == "exchange/outputs"


class Alone(Job):
    """A job whose rank 0 decides without others."""

    def broadcast(self, value: object) -> object:
        return value


def test_a_rank_that_goes_on_after_its_error_is_ended_with_a_word(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapple_tf.distributed.watchdog._OWN_END", 0.3)
    for watch in ranks.watches:
        watch.report("raised StepError: the loss is not finite")
    assert ranks.ended(3) == {0: 1, 1: 1, 2: 1}
    assert told(capfd, 1).startswith(
        "dapple: rank 1 (stage 1) ends now: it has gone on for 0.3 s after the error above"
    )


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_the_time_to_wait_is_a_number_of_seconds(text: str) -> None:
    with pytest.raises(JobError, match=f"DAPPLE_TIMEOUT_SECONDS='{text}': give seconds, 1 or more"):
        start_watch(Alone(2, 0, 0, 2), {"DAPPLE_TIMEOUT_SECONDS": text})
