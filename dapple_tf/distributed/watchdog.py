"""The watch that the ranks of a job keep over each other: when one fails, all end, and say why.

A rank whose step waits for one that is gone would wait for ever. Beside TensorFlow, a thread of every rank keeps a
connection to rank 0. One that closes without a farewell means that the process is gone; silence, that its host is cut
off or the process hangs. Rank 0 tells the others what it hears; when rank 0 itself goes, each notices.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dapple_tf.distributed.call_order_check import CallOrderCheck, RankCall
from dapple_tf.distributed.failure_messages import (
    describe_difference,
    describe_end,
    describe_failure,
    flush_output,
    say,
)
from dapple_tf.distributed.links import Link, Message, link_ranks
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.progress import Progress, Standing, progress
from dapple_tf.errors import JobError

TIMEOUT = "DAPPLE_TIMEOUT_SECONDS"
_DEFAULT_TIMEOUT = 30.0

# Seconds to wait for a better reason before ending for a weak one: a rank that was told to end (by a launcher that
# gives a second before it kills) may hear why; one whose fellow raised may be about to raise the same error itself.
_BETTER_REASON = 0.4
# Seconds for one to turn up where a step has lost the others: they are failing too.
_LOSS_REASON = 3.0
# Seconds for the main thread of a rank that was interrupted, or has raised, to end by itself.
_OWN_END = 5.0
_INTERRUPTED = 130
_LONGEST_REASON = 2000  # characters


@dataclass(frozen=True)
class _Verdict:
    """Rank ``rank`` has failed: ``what`` happened to it; this process ends at ``deadline`` with ``exit_code``.

    Without a rank: the ranks differ in what they begin, as ``what`` says.
    """

    rank: int | None
    what: str
    standing: Standing
    deadline: float
    exit_code: int = 1


@dataclass
class _Other:
    """What is known of another rank.

    ``left``: the meetings it had come to when it ended as it should; ``failed``: it has said that it fails, and why.
    """

    standing: Standing = field(default_factory=Standing)
    left: int | None = None
    failed: bool = False


class Watch:
    """The watch of this rank over its ``links``; ``end`` is called with an exit code when the process must end."""

    def __init__(
        self,
        job: Job,
        links: Sequence[Link],
        own: Progress,
        timeout: float,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._job = job
        self._links = {link.rank: link for link in links}
        self._own = own
        self._end = end
        self._others = {rank: _Other() for rank in range(job.size) if rank != job.rank}
        self._beat = min(0.25, timeout / 10)
        # A beat may be late by one, and what was noticed has to travel: all is over within the time given.
        self._silence = timeout - 2 * self._beat
        self._timeout = timeout
        self._heard = dict.fromkeys(self._links, time.monotonic())
        self._verdict: _Verdict | None = None
        self._reported = False
        self._over = False
        self._broken_off = False
        self._told_difference = False
        self._interrupts = 0
        self._own_beginnings: queue.SimpleQueue[RankCall] = queue.SimpleQueue()
        self._beginnings = CallOrderCheck(job.size)  # of all ranks, on rank 0
        self._orders: queue.Queue[tuple[Callable[[], None], threading.Event]] = queue.Queue()
        self._alone = threading.Event()
        self._selector = selectors.DefaultSelector()
        # Written to by the interpreter when a signal comes (its number), and by ``_order`` (0).
        self._wake_out, self.wake_in = socket.socketpair()
        for end_of_pair in (self._wake_out, self.wake_in):
            end_of_pair.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        for link in links:
            link.connection.settimeout(1)
            self._selector.register(link.connection, selectors.EVENT_READ, link)
        self.interrupted_main = False
        self._thread = threading.Thread(target=self._run, name="dapple-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch, and to compare what the ranks begin."""
        self._own.listener = self.tell_beginning
        self._thread.start()

    # --- what the main thread tells

    def tell_beginning(self, beginning: RankCall) -> None:
        """Have rank 0 compare what this rank begins; in some microseconds, without waiting for anything."""
        if self._job.rank == 0:
            self._own_beginnings.put(beginning)  # looked at with those of the others, or at the next beat
        else:
            self._send({"kind": "beginning", "rank": self._job.rank, **asdict(beginning)})

    def report(self, what: str, exit_code: int = 1) -> None:
        """Tell all ranks that this one fails, before it ends by itself; only the first report counts."""
        self._order(lambda: self._tell_own(what, exit_code))

    def report_loss(self, what: str) -> None:
        """End this process, which cannot reach the others any more, for that reason or a better one that turns up."""
        self._order(lambda: self._suspect(self._job.rank, what, _LOSS_REASON))
        self._thread.join(_OWN_END)

    def leave(self) -> None:
        """Say farewell, and wait until all others have: Horovod ends for all ranks when it ends for one.

        A rank that has failed waits only until the others have heard. The watch is over then.
        """
        self._order(self._farewell)
        self._alone.wait(_OWN_END if self._reported else self._timeout)
        self._over = True
        self.wake(0)
        self._thread.join(2)  # a thread that outlives the interpreter may bring it down

    def close(self) -> None:
        """Close the connections: at the end, and in a forked child, which would keep them open when its parent dies."""
        for link in self._links.values():
            link.connection.close()
        self._wake_out.close()
        self.wake_in.close()

    def _order(self, work: Callable[[], None]) -> None:
        """Have the watch's thread do something, and wait for it a little."""
        if not self._thread.is_alive():
            return
        done = threading.Event()
        self._orders.put((work, done))
        self.wake(0)
        done.wait(2)

    def wake(self, number: int) -> None:
        """Wake the thread up: signal ``number`` has come, or an order (0)."""
        with contextlib.suppress(OSError):
            self.wake_in.send(bytes([number]))

    # --- the thread

    def _run(self) -> None:
        next_beat = last = time.monotonic()
        while not self._over:
            wait = next_beat if self._verdict is None else min(next_beat, self._verdict.deadline)
            ready = self._selector.select(max(0.0, wait - time.monotonic()))
            now = time.monotonic()
            if now - last > 2 * self._beat:  # this process itself has stood still: what waits is to be read first
                self._heard = {rank: heard + now - last for rank, heard in self._heard.items()}
            last = now
            for key, _ in ready:
                if key.data is not None:
                    self._read(key.data)
            if any(key.data is None for key, _ in ready):
                self._obey()  # last: what the others have told may be the cause of what this rank is to report
            if now >= next_beat:
                next_beat = now + self._beat
                self._send({"kind": "standing", **self._own_facts()})
                if self._own.canary.is_dead(now):
                    self._break_off()
            self._compare_own()
            self._judge(time.monotonic())
        self._alone.set()

    def _break_off(self) -> None:
        """Make the exchanges of a step that has failed fail too: TensorFlow does not return before they end."""
        if not self._broken_off:
            self._broken_off = True
            import horovod.tensorflow as hvd

            threading.Thread(target=hvd.shutdown, daemon=True).start()

    def _obey(self) -> None:
        with contextlib.suppress(OSError):
            for number in self._wake_out.recv(1024):
                self._signalled(number)
        with contextlib.suppress(queue.Empty):
            while True:
                work, done = self._orders.get_nowait()
                work()
                done.set()

    def _signalled(self, number: int) -> None:
        if number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == self.on_terminate:
            if self._reported:
                self._finish(1)
            what = "was told to end (SIGTERM), as launchers do when a job ends"
            self._suspect(self._job.rank, what, _BETTER_REASON, 128 + number)
            facts = {"what": what, "wait": _BETTER_REASON, "exit_code": 1}
            self._send({"kind": "failure", **facts, **self._own_facts()})
        elif number == signal.SIGINT and signal.getsignal(signal.SIGINT) == self.on_interrupt:
            self._interrupts += 1
            wait = _OWN_END if self._interrupts == 1 else 0.0
            self._suspect(self._job.rank, "was interrupted (Ctrl-C)", wait, _INTERRUPTED)

    def _read(self, link: Link) -> None:
        messages = link.receive()
        self._heard[link.rank] = time.monotonic()
        for message in messages:
            self._hear(link, message)
        if not link.open:
            self._selector.unregister(link.connection)
            told = self._verdict is not None and self._verdict.rank == link.rank
            if self._others[link.rank].left is None and not told:
                what = "was killed or has crashed (its connection closed)"
                if link.cut_off:
                    what = f"cannot be reached ({link.cut_off}): its host is cut off"
                self._suspect(link.rank, what)
            self._look_around()

    def _hear(self, link: Link, message: Message) -> None:
        rank, kind = message["rank"], message["kind"]
        if kind == "beginning":
            self._compare(rank, RankCall(message["number"], message["what"], message["detail"]))
            return
        if kind == "difference":
            self._differ(message["what"])
            return
        if rank == self._job.rank:
            # The others hold this rank for lost, which was cut off or has stood still until now.
            self._suspect(rank, f"was given up by the others: it {message['what']}")
            return
        other = self._others[rank]
        other.standing = Standing(**message["standing"])
        if kind == "failure":
            other.failed = "raised" in message
            self._suspect(rank, message["what"], message["wait"], message["exit_code"])
            self._look_around()
        if kind == "farewell":
            other.left = other.standing.meetings
            self._look_around()
        if self._job.rank == 0 and (kind == "farewell" or "raised" in message):
            self._send(message, but=link.rank)

    def _judge(self, now: float) -> None:
        for rank, link in self._links.items():
            silent = now - self._heard[rank]
            if link.open and silent > self._silence and self._others[rank].left is None:
                self._suspect(
                    rank, f"has not been heard of for {silent:.1f} s: its host is cut off, or the process hangs"
                )
        for rank, other in self._others.items():
            if other.left is not None and self._own.waiting and self._own.meetings > other.left:
                self._suspect(
                    rank,
                    "has ended by itself (its script is over, or called sys.exit), but other ranks go on and wait for "
                    "it; all ranks must take the same steps",
                )
        verdict = self._verdict
        if verdict is None or now < verdict.deadline:
            return
        if verdict.rank == self._job.rank and self.interrupted_main and self._interrupts == 1:
            # The main thread has raised KeyboardInterrupt, and the user's code goes on: that is up to it.
            self._verdict, self.interrupted_main, self._interrupts = None, False, 0
            return
        self._stop(verdict)

    def _compare_own(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._compare(self._job.rank, self._own_beginnings.get_nowait())

    def _compare(self, rank: int, beginning: RankCall) -> None:
        difference = self._beginnings.add(rank, beginning)
        if difference:
            self._send({"kind": "difference", "rank": self._job.rank, "what": difference})
            self._differ(difference)

    def _differ(self, what: str) -> None:
        """End because the ranks differ, after some time in which more of them may tell what they begin.

        That is the cause of what else goes wrong in them, so nothing takes its place; but it does not end a process
        later than it would end anyway.
        """
        if self._reported:
            self._tell_difference(what)
            return
        deadline = time.monotonic() + _BETTER_REASON
        if self._verdict is not None:
            deadline = min(deadline, self._verdict.deadline)
        self._verdict = _Verdict(None, what, self._own.standing(), deadline)

    def _tell_difference(self, what: str) -> None:
        if self._told_difference:
            return
        self._told_difference = True
        say(describe_difference(self._job.rank, self._own.standing(), what))

    def _suspect(self, rank: int, what: str, wait: float = 0.0, exit_code: int = 1) -> None:
        """Hold ``rank`` for failed, and end after ``wait`` seconds; a reason to end sooner takes its place."""
        if self._reported:
            return
        deadline = time.monotonic() + wait
        mine = rank == self._job.rank
        standing = self._own.standing() if mine else self._others[rank].standing
        verdict = self._verdict
        if verdict is None or (verdict.rank is not None and deadline < verdict.deadline):
            self._verdict = _Verdict(rank, what, standing, deadline, exit_code)

    def _stop(self, verdict: _Verdict) -> None:
        """Tell the others, say why, and end the process: its main thread may wait in a step for ever."""
        if verdict.rank is None:
            self._tell_difference(verdict.what)
            self._finish(verdict.exit_code)
            return
        facts = {"rank": verdict.rank, "standing": asdict(verdict.standing)}
        self._send({"kind": "failure", "what": verdict.what, "wait": 0.0, "exit_code": verdict.exit_code, **facts})
        say(describe_failure(self._job.rank, self._own.standing(), verdict.rank, verdict.standing, verdict.what))
        self._finish(verdict.exit_code)

    def _finish(self, exit_code: int) -> None:
        """End the process at once; what it had printed is not lost, unless a lock is held on it."""
        flush_output()
        self._over = True
        self._end(exit_code)

    # --- orders

    def _tell_own(self, what: str, exit_code: int) -> None:
        if self._reported:
            return
        self._compare_own()
        self._reported = True
        if self._verdict is not None and self._verdict.rank is None:  # the cause of what is reported
            self._tell_difference(self._verdict.what)
        self._verdict = None
        what = what if len(what) <= _LONGEST_REASON else what[:_LONGEST_REASON] + " ..."
        # The others wait a little: they may be about to raise the same error, and to say more of it.
        facts = {"what": what, "wait": _BETTER_REASON, "exit_code": exit_code, "raised": True}
        self._send({"kind": "failure", **facts, **self._own_facts()})
        # What the main thread still does may wait for others.
        reaper = threading.Timer(_OWN_END, self._end_for_good, (exit_code,))
        reaper.daemon = True
        reaper.start()

    def _end_for_good(self, exit_code: int) -> None:
        """End a process that has not ended by itself after the error that it reported, and say why."""
        if self._over:  # it is about to end
            self._end(exit_code)
            return
        say(describe_end(self._job.rank, self._own.standing(), _OWN_END))
        self._finish(exit_code)

    def _farewell(self) -> None:
        if not self._reported:
            self._send({"kind": "farewell", **self._own_facts()})
        self._look_around()

    def _look_around(self) -> None:
        """Let ``leave`` go on when nobody is there any more."""
        if self._reported:
            alone = all(self._others[rank].failed or not link.open for rank, link in self._links.items())
        else:
            alone = all(other.left is not None for other in self._others.values())
        if alone or not any(link.open for link in self._links.values()):
            self._alone.set()

    # --- messages

    def _own_facts(self) -> Message:
        return {"rank": self._job.rank, "standing": asdict(self._own.standing())}

    def _send(self, message: Message, but: int | None = None) -> None:
        for rank, link in self._links.items():
            if rank != but and link.open:
                link.send(message)

    # --- signals: the interpreter runs these in the main thread, when that is not in TensorFlow

    def on_terminate(self, number: int, frame: Any) -> None:
        """Nothing to add: the thread has been woken up already."""

    def on_interrupt(self, number: int, frame: Any) -> None:
        """Raise KeyboardInterrupt, as without the watch."""
        self.interrupted_main = True
        signal.default_int_handler(number, frame)


def start_watch(job: Job, environment: Mapping[str, str] = os.environ) -> Watch:
    """Have this rank and all others watch each other; every rank must call it. TensorFlow must be ready to start.

    Rank 0's DAPPLE_TIMEOUT_SECONDS (default 30) holds for all: within so many seconds after one has failed or fell
    silent, all have ended. Raises JobError where that is no number from 1, or ranks cannot connect.
    """
    timeout = job.run_on_rank_0(lambda: _read_timeout(environment))
    watch = Watch(job, link_ranks(job), progress(), timeout)
    watch.start()
    return watch


def _read_timeout(environment: Mapping[str, str]) -> float:
    text = environment.get(TIMEOUT, "")
    try:
        timeout = float(text or _DEFAULT_TIMEOUT)
    except ValueError:
        timeout = 0.0
    if not 1 <= timeout < float("inf"):
        raise JobError(f"{TIMEOUT}={text!r}: give seconds, 1 or more")
    return timeout
