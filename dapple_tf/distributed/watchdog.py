"""End all ranks of a job when one of them fails, and print why.

A step that waits for a rank that has ended would wait forever. So every rank has a thread beside TensorFlow's, with a
connection to rank 0. Over it the ranks send heartbeats and report failures. Rank 0 forwards the reports; if rank 0
itself ends, every rank detects that. ``failure_detector`` decides which rank has failed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from dapple_tf.distributed.call_order_check import CallComparison, RankCall
from dapple_tf.distributed.failure_detector import Failure, FailureDetector
from dapple_tf.distributed.links import Link, Transport
from dapple_tf.distributed.messages import (
    AgreementMessage,
    CallMessage,
    CallMismatch,
    FailureReport,
    FinishedMessage,
    Heartbeat,
    LeaveMessage,
    Message,
    StopMessage,
)
from dapple_tf.distributed.process_exit import ProcessExit, describe_failure, name_rank, print_line
from dapple_tf.distributed.progress import Progress
from dapple_tf.distributed.signals import SignalReceiver, ThreadRequests

# Exit code of a process that Ctrl-C has ended.
INTERRUPTED = 130

# Seconds to wait for another rank's report, which may contain the root cause, before this rank ends. The time is short,
# since launchers kill a process one second after SIGTERM. All ranks may also raise the same error almost at once.
_CAUSE_SECONDS = 0.4
# The same, if a step has failed because other ranks have ended: they are about to report why.
_LOST_RANKS_SECONDS = 3.0
# Seconds in which the main thread of a rank should end by itself, after an interrupt or an error.
_OWN_EXIT_SECONDS = 5.0
# Seconds between two checks, by a rank that has left, whether its watchdog still runs.
_CHECK_SECONDS = 1.0
_LONGEST_REASON = 2000  # characters
# Held while Horovod ends: two threads that end it at the same time would wait for each other in its C++ code forever.
_ENDING_HOROVOD = threading.Lock()


class Watchdog:
    """The watchdog of ``rank``, one of ``size``, over its ``links``.

    All processes have ended ``timeout_seconds`` after a rank has failed or fallen silent. ``exit_process`` ends this
    one, and ``end_exchanges`` the exchanges of all ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: Sequence[Link],
        progress: Progress,
        timeout_seconds: float,
        exit_process: Callable[[int], None] = os._exit,
        end_exchanges: Callable[[], None] | None = None,
    ) -> None:
        self._rank = rank
        self._progress = progress
        self._heartbeat_seconds = min(0.25, timeout_seconds / 10)
        # A heartbeat may be late by one interval, and a report takes time to arrive.
        silence_seconds = timeout_seconds - 2 * self._heartbeat_seconds
        self.signals = SignalReceiver()
        self._requests = ThreadRequests(self.signals.wake)
        self._transport = Transport(links, self.signals.reader)
        self._detector = FailureDetector(rank, size, self._transport.ranks, silence_seconds, time.monotonic())
        self._calls = CallComparison(size, self._report_different_calls)  # used on rank 0
        self._may_leave = threading.Event()
        self._may_finish = threading.Event()
        self._exit = ProcessExit(rank, progress, exit_process)
        self._end_exchanges = end_exchanges or end_horovod
        self._interrupts = 0
        self._left = False
        self._finished = False
        self._exchanges_aborted = False
        self._stops = _Stops(rank, progress, self._transport)
        self._thread = threading.Thread(target=self._run, name="dapple-watchdog", daemon=True)

    # --- called by the main thread

    def start(self) -> None:
        """Start the thread, and have rank 0 compare the calls of all ranks."""
        self._progress.call_listener = self.announce_call
        self._thread.start()

    def announce_call(self, call: RankCall) -> None:
        """Have rank 0 compare a call that this rank is about to make; takes microseconds and waits for no rank."""
        if self._rank == 0:
            self._calls.add_own(call)  # compared when the thread next wakes, at the next heartbeat at the latest
        else:
            self._transport.send(CallMessage(self._rank, call))

    def report_error(self, what: str, exit_code: int = 1) -> None:
        """Report to all ranks that this one has failed and will end; only the first report counts."""
        self._run_in_thread(lambda: self._report_own_error(what, exit_code))

    def report_lost_ranks(self, what: str) -> None:
        """End this process since other ranks have ended: because of the failure that they report, or of ``what``."""
        self._run_in_thread(lambda: self._fail_self(what, _LOST_RANKS_SECONDS))
        self._thread.join(_OWN_EXIT_SECONDS)

    def allow_stops(self, tell: Callable[[str], None]) -> None:
        """Let the first SIGUSR1, SIGTERM or Ctrl-C of any rank stop all of them between two steps.

        From now on every rank must call ``agree_to_stop`` after each step. ``tell`` is called on rank 0 when it learns
        of the signal, on the watchdog's thread, with words that say which rank got which signal in which step. A second
        signal ends the job at once, as without this call.
        """
        self._stops.tell = tell
        self.signals.spares_interrupt = True

    def agree_to_stop(self, done: int) -> bool:
        """Return whether all ranks stop after step ``done``, the last one that this rank has completed.

        It costs nothing until a signal has arrived. Then rank 0 says after which step, the next one, and begins that
        step only when all others know: no rank can complete it before rank 0 has begun it.
        """
        if self._stops.propose(done + 1):
            self._wait_for_others(self._stops.known, "all ranks know after which step they stop")
        return self._stops.after == done

    def forbid_stops(self) -> None:
        """Let each signal end the job at once again."""
        self._stops.tell = None
        self.signals.spares_interrupt = False

    def leave(self) -> None:
        """Report that this rank has left, wait until all ranks have left and made the same calls, and stop the thread.

        The ranks leave together because Horovod ends on all ranks when it ends on one. Rank 0 may also still find that
        their last calls differ: then the process ends here, with an error. A rank that has failed waits only until the
        others know. Horovod ends before the watchdog: its end waits for all ranks too, and the watchdog detects a rank
        that is stopped at that time. No process ends before Horovod has ended on all ranks.
        """
        self._run_in_thread(self._announce_leave)
        if self._detector.error_reported:
            self._may_leave.wait(_OWN_EXIT_SECONDS)
        elif not self._wait_for_others(self._may_leave, "all ranks have made the same calls"):
            return
        if self._detector.agreed:
            self._end_exchanges()
            self._run_in_thread(self._announce_finished)
            if not self._wait_for_others(self._may_finish, "Horovod has ended on all ranks"):
                return
        self._exit.ending = True
        self.signals.wake()
        self._thread.join(2)  # a thread that outlives the interpreter may crash it

    def close(self) -> None:
        """Close the connections: at the end, and in a forked child, which would keep them open if its parent died."""
        self._transport.close()
        self.signals.close()

    def _wait_for_others(self, event: threading.Event, unknown: str) -> bool:
        """Wait until the watchdog's thread sets ``event``, or an error of this rank is reported; return True.

        If the thread has failed, end the process with an error that names the ``unknown`` fact, and return False.
        """
        while not self._detector.error_reported and not event.wait(_CHECK_SECONDS):
            if not self._thread.is_alive():
                print_line(f"rank {self._rank} ends: its watchdog has failed, so it is not known whether {unknown}.")
                self._exit.end(1)
                return False
        return True

    def _run_in_thread(self, request: Callable[[], None]) -> None:
        if self._thread.is_alive():
            self._requests.run(request)

    # --- the thread

    def _run(self) -> None:
        next_heartbeat = last = time.monotonic()
        while not self._exit.ending:
            wait_until = min(next_heartbeat, self._detector.deadline)
            arrivals, woken = self._transport.wait(wait_until - time.monotonic())
            now = time.monotonic()
            if now - last > 2 * self._heartbeat_seconds:  # this process was stopped, and messages have waited meanwhile
                self._detector.note_pause(now - last)
            last = now
            for link, messages in arrivals:
                self._receive(link, messages, now)
            if woken:  # after the messages, which may contain the cause of the failure that this rank will report
                for number in self.signals.receive():
                    self._handle_signal(number)
                self._requests.serve()
            if now >= next_heartbeat:
                next_heartbeat = now + self._heartbeat_seconds
                self._transport.send(Heartbeat(self._rank, self._progress.status()))
                if self._progress.step_has_failed(now):
                    self._abort_exchanges()
            self._calls.compare_own()
            self._detector.check(time.monotonic(), self._progress.waiting_in, self._calls.describe_missing())
            self._act(time.monotonic())
        self._may_leave.set()
        self._may_finish.set()

    def _receive(self, link: Link, messages: Sequence[Message], now: float) -> None:
        self._detector.note_received(link.rank, now)
        for message in messages:
            self._handle(message, link.rank, now)
        if not link.open:
            self._detector.note_disconnect(link.rank, link.failure, now)

    def _handle(self, message: Message, sender: int, now: float) -> None:
        match message:
            case Heartbeat():
                self._detector.note_status(message.rank, message.status)
            case LeaveMessage():
                self._detector.note_leave(message.rank, message.status)
            case AgreementMessage():
                self._detector.agreed = True
            case FinishedMessage():
                self._detector.note_finished(message.rank)
            case FailureReport():
                self._detector.note_report(message, now)
            case CallMessage():
                self._calls.compare(message.rank, message.call)
            case CallMismatch():
                self._note_different_calls(message.what)
            case StopMessage():
                self._stops.receive(message)
        passed_on = isinstance(message, LeaveMessage) or (isinstance(message, FailureReport) and message.raised)
        if self._rank == 0 and passed_on:
            self._transport.send(message, but=sender)

    def _handle_signal(self, number: int) -> None:
        if self._detector.failure is None and not self._detector.error_reported and self._stops.ask(number):
            if number != signal.SIGINT:  # whose handler counts it
                self.signals.spares_interrupt = False
            return
        if (
            number == signal.SIGUSR1
        ):  # nothing can be saved: end as if by SIGTERM, for which the user may have a handler
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if number == signal.SIGINT:
            self._interrupts += 1
            seconds = _OWN_EXIT_SECONDS if self._interrupts == 1 else 0.0
            self._fail_self("was interrupted (Ctrl-C)", seconds, INTERRUPTED)
            return
        if self._detector.error_reported:
            self._exit.end(1)
            return
        what = "was terminated (SIGTERM), as launchers do when a job ends"
        self._fail_self(what, _CAUSE_SECONDS, 128 + number)
        self._transport.send(FailureReport(self._rank, self._progress.status(), what, _CAUSE_SECONDS))

    def _fail_self(self, what: str, seconds: float, exit_code: int = 1) -> None:
        self._detector.fail(self._rank, what, self._progress.status(), time.monotonic(), seconds, exit_code)

    def _report_own_error(self, what: str, exit_code: int) -> None:
        if self._detector.error_reported:
            return
        self._calls.compare_own()
        cause = self._detector.failure
        if cause is not None and cause.rank is None:
            self._exit.print_call_mismatch(cause.what)
        self._detector.note_own_error()
        what = what if len(what) <= _LONGEST_REASON else what[:_LONGEST_REASON] + " ..."
        self._transport.send(
            FailureReport(self._rank, self._progress.status(), what, _CAUSE_SECONDS, exit_code, raised=True)
        )
        self._exit.end_after(_OWN_EXIT_SECONDS, exit_code)  # the main thread may still wait for other ranks

    def _announce_leave(self) -> None:
        if not self._detector.error_reported:
            self._calls.compare_own()
            self._left = True
            self._transport.send(LeaveMessage(self._rank, self._progress.status()))

    def _announce_finished(self) -> None:
        self._finished = True
        if self._rank != 0:
            self._transport.send(FinishedMessage(self._rank))

    def _abort_exchanges(self) -> None:
        """End the exchanges of a failed step with an error: TensorFlow does not return before they end."""
        if self._progress.exchanges is not None:
            self._progress.exchanges.abort()  # at each call, since an exchange may have begun after the last one
        if not self._exchanges_aborted:
            self._exchanges_aborted = True
            threading.Thread(target=self._end_exchanges, daemon=True).start()

    # --- compare the calls that every rank must make

    def _report_different_calls(self, what: str) -> None:
        self._transport.send(CallMismatch(what))
        self._note_different_calls(what)

    def _note_different_calls(self, what: str) -> None:
        if self._detector.error_reported:  # the mismatch is the cause of that error
            self._exit.print_call_mismatch(what)
        # Until then further ranks may announce their calls.
        self._detector.note_different_calls(what, time.monotonic(), _CAUSE_SECONDS)

    def _conclude(self) -> None:
        """On rank 0, once all ranks have left: let them end if they have made the same calls."""
        if self._left and self._detector.others_left and not self._detector.agreed and self._detector.failure is None:
            self._detector.agreed = self._calls.conclude()
            if self._detector.agreed:
                self._transport.send(AgreementMessage())

    # --- actions

    def _act(self, now: float) -> None:
        """End the process if a failure requires that; let ``leave`` return if no rank needs this one."""
        if self._rank == 0:
            self._conclude()
        if self._detector.may_leave:
            self._may_leave.set()
        if self._finished and self._detector.others_finished and not self._may_finish.is_set():
            if self._rank == 0:
                self._transport.send(FinishedMessage(0))
            self._may_finish.set()
        failure = self._detector.failure
        if failure is None or now < failure.deadline:
            return
        if failure.rank == self._rank and self.signals.interrupted and self._interrupts == 1:
            # The main thread has raised KeyboardInterrupt, and the user's code has caught it.
            self._detector.withdraw()
            self.signals.interrupted, self._interrupts = False, 0
            return
        self._end_for(failure)

    def _end_for(self, failure: Failure) -> None:
        if failure.rank is None:
            self._exit.print_call_mismatch(failure.what)
        else:
            self._transport.send(FailureReport(failure.rank, failure.status, failure.what, exit_code=failure.exit_code))
            own = self._progress.status()
            saved = self._progress.saved
            print_line(describe_failure(self._rank, own, failure.rank, failure.status, failure.what, saved))
            if failure.rank != self._rank and failure.exit_code == 1:
                self._exit.end_for_loss(failure.rank, failure.what)
                return
        self._exit.end(failure.exit_code)


def end_horovod() -> None:
    """End Horovod; its exchanges fail. Does nothing where it has not started."""
    if "horovod.tensorflow" in sys.modules:
        import horovod.tensorflow as hvd

        with _ENDING_HOROVOD:
            hvd.shutdown()


# --- Stop all ranks after the same step


class _Stops:
    """The stop of ``rank``, which makes this ``progress``, and all others between two steps, over the ``transport``.

    ``tell``: called on rank 0 at the first signal; None where signals end the job at once. ``after``: the step after
    which all stop, once rank 0 has chosen it. ``known``: is set on rank 0 when all ranks know it.
    """

    def __init__(self, rank: int, progress: Progress, transport: Transport) -> None:
        self._rank = rank
        self._progress = progress
        self._transport = transport
        self._signalled = False
        self._asked = False
        self._unaware = set(transport.ranks)
        self.tell: Callable[[str], None] | None = None
        self.after: int | None = None
        self.known = threading.Event()

    def ask(self, number: int) -> bool:
        """Ask rank 0 for a stop because of a signal with this number.

        Returns False for a later signal, or where stops are forbidden.
        """
        if self.tell is None or self._signalled:
            return False
        self._signalled = True
        message = StopMessage(self._rank, 0, signal.Signals(number).name, self._progress.status())
        if self._rank == 0:
            self._note_asked(message)
        else:
            self._transport.send(message)
        return True

    def propose(self, step: int) -> bool:
        """On rank 0, where a stop was asked for, say once that all stop after ``step``; return whether it was said."""
        if not self._asked or self.after is not None:
            return False
        self.after = step
        if not self._unaware:
            self.known.set()
        self._transport.send(StopMessage(self._rank, step))
        return True

    def receive(self, message: StopMessage) -> None:
        """Take a message of another rank."""
        if self._rank != 0:
            self.after = message.after
            self._transport.send(StopMessage(self._rank, message.after))
        elif message.after:
            self._unaware.discard(message.rank)
            if not self._unaware:
                self.known.set()
        else:
            self._note_asked(message)

    def _note_asked(self, message: StopMessage) -> None:
        if not self._asked and self.tell is not None:
            self._asked = True
            self.tell(f"{name_rank(message.rank, message.status)}, {message.status.when}, got {message.signal}")
