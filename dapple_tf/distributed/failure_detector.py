"""Decide whether another rank has failed, and when this process must end because of it.

No I/O and no clock: callers pass what they have observed, and the time. A rank has failed if its connection closes
before it has left, if it is silent for too long, if it reports an error, or if it has left while this rank waits for
it. Before the ranks are connected, ``startup_watch`` decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dapple_tf.distributed.messages import FailureReport
from dapple_tf.distributed.progress import RankStatus
from dapple_tf.errors import JobError

TIMEOUT = "DAPPLE_TIMEOUT_SECONDS"
DEFAULT_TIMEOUT = 30.0


def read_timeout(environment: Mapping[str, str]) -> float:
    """Return the seconds of DAPPLE_TIMEOUT_SECONDS (default 30); raise JobError unless it is a number from 1 up."""
    text = environment.get(TIMEOUT, "")
    try:
        timeout = float(text or DEFAULT_TIMEOUT)
    except ValueError:
        timeout = 0.0
    if not 1 <= timeout < float("inf"):
        raise JobError(f"{TIMEOUT}={text!r}: give a number of seconds, 1 or more")
    return timeout


@dataclass(frozen=True)
class Failure:
    """The reason for which this process must end.

    ``what`` happened to ``rank``, which may be this one, when it had this ``status``. ``rank`` is None where the ranks
    make different calls, and where it is not known which of several ranks has failed. The process ends at ``deadline``,
    in seconds of the clock that the detector is called with, and with ``exit_code``.
    """

    rank: int | None
    what: str
    deadline: float
    exit_code: int = 1
    status: RankStatus = field(default_factory=RankStatus)


@dataclass
class _Peer:
    """The state of another rank, as far as this one knows.

    ``connected`` and ``last_heard`` (seconds): of this rank's own connection to it. ``left_after``: how many collective
    calls the rank had entered when it left. ``finished``: Horovod has ended on it. ``raised``: it has reported the
    error that it raised.
    """

    connected: bool
    last_heard: float
    status: RankStatus = field(default_factory=RankStatus)
    left_after: int | None = None
    finished: bool = False
    raised: bool = False


class FailureDetector:
    """The observations of ``rank``, one of ``size`` ranks, and ``failure``, the reason for which it must end.

    ``connected``: the ranks that it has a connection to. ``silence_seconds``: how long nothing may be received from one
    of them before that rank has failed. ``agreed``: all ranks have left, and rank 0 has found that they made the same
    calls. All times are seconds of one monotonic clock.
    """

    def __init__(self, rank: int, size: int, connected: Iterable[int], silence_seconds: float, now: float) -> None:
        self._rank = rank
        self._silence_seconds = silence_seconds
        own_connections = set(connected)
        self._peers = {peer: _Peer(peer in own_connections, now) for peer in range(size) if peer != rank}
        self.failure: Failure | None = None
        self.error_reported = False
        self.agreed = False

    # --- observations

    def note_received(self, rank: int, now: float) -> None:
        """Note that ``rank`` has sent something over its connection to this one."""
        self._peers[rank].last_heard = now

    def note_pause(self, seconds: float) -> None:
        """Exclude ``seconds`` for which this process itself was suspended from the silence of the other ranks."""
        for peer in self._peers.values():
            peer.last_heard += seconds

    def note_status(self, rank: int, status: RankStatus) -> None:
        """Note the progress that another rank reports."""
        self._peers[rank].status = status

    def note_leave(self, rank: int, status: RankStatus) -> None:
        """Note that the script of another rank has ended without an error."""
        peer = self._peers[rank]
        peer.status, peer.left_after = status, status.collective_calls

    def note_finished(self, rank: int) -> None:
        """Note that Horovod has ended on another rank; from rank 0, that it has ended on all."""
        self._peers[rank].finished = True

    def note_report(self, report: FailureReport, now: float) -> None:
        """Note a failure report about another rank, or about this one, which the others have declared failed."""
        if report.rank == self._rank:  # this rank was cut off from the network, or stopped, until now
            self.fail(self._rank, f"was declared failed by the other ranks: it {report.what}", report.status, now)
            return
        peer = self._peers[report.rank]
        peer.status, peer.raised = report.status, report.raised
        self.fail(report.rank, report.what, report.status, now, report.wait_seconds, report.exit_code)

    def note_disconnect(self, rank: int, failure: str, now: float) -> None:
        """Note that the connection to ``rank`` has closed; ``failure``: see ``Link``."""
        peer = self._peers[rank]
        peer.connected = False
        known = self.failure is not None and self.failure.rank == rank
        needed = rank == 0 and not self.agreed  # rank 0 decides whether all ranks have made the same calls
        if known or (peer.left_after is not None and not needed):
            return
        self.fail(rank, failure or "was killed or has crashed (its connection closed)", peer.status, now)

    def note_own_error(self) -> None:
        """Note that this rank has raised an error and reported it: no later failure of a rank ends this process."""
        self.error_reported = True
        self.failure = None

    # --- decisions

    def check(self, now: float, waiting_in: int | None, missing: str = "") -> None:
        """Look for ranks that are silent, or that have left although this rank waits in the call ``waiting_in``.

        ``missing``: which ranks have made a call that others have not made, in words, if this rank knows.
        """
        for rank, peer in self._peers.items():
            silent = now - peer.last_heard
            if peer.connected and silent > self._silence_seconds:  # also after the rank has left: Horovod waits for it
                what = (
                    f"has sent nothing for {silent:.1f} s: its host is cut off from the network, or the process hangs"
                )
                self.fail(rank, what, peer.status, now)
            elif peer.left_after is not None and waiting_in is not None and waiting_in > peer.left_after:
                what = (
                    "has exited (its script ended, or called sys.exit) while other ranks wait for it: "
                    f"{f'{missing}, and ' if missing else ''}all ranks must make the same calls"
                )
                self.fail(rank, what, peer.status, now)

    def fail(
        self, rank: int | None, what: str, status: RankStatus, now: float, wait_seconds: float = 0.0, exit_code: int = 1
    ) -> None:
        """Note that ``rank`` has failed, for which this process must end after ``wait_seconds``.

        Of two failures the one with the earlier deadline is kept. A call mismatch (see ``note_different_calls``) is
        kept always, since it causes the failures that follow it.
        """
        failure = Failure(rank, what, now + wait_seconds, exit_code, status)
        known = self.failure
        if self.error_reported or (known is not None and (known.rank is None or known.deadline <= failure.deadline)):
            return
        self.failure = failure

    def note_different_calls(self, what: str, now: float, wait_seconds: float) -> None:
        """Note that the ranks make different calls, for which this process must end after ``wait_seconds``.

        If another failure is known, the process does not end later than its deadline.
        """
        if not self.error_reported:
            self.failure = Failure(None, what, min(now + wait_seconds, self.deadline))

    def withdraw(self) -> None:
        """Forget the failure: this process need not end."""
        self.failure = None

    @property
    def deadline(self) -> float:
        """The time at which this process must end; infinite if no failure is known."""
        return math.inf if self.failure is None else self.failure.deadline

    @property
    def others_left(self) -> bool:
        """Whether the scripts of all other ranks have ended without an error."""
        return all(peer.left_after is not None for peer in self._peers.values())

    @property
    def others_finished(self) -> bool:
        """Whether Horovod has ended on all ranks that this one is connected to."""
        return all(peer.finished or not peer.connected for peer in self._peers.values())

    @property
    def may_leave(self) -> bool:
        """Whether this rank may end: all ranks have left, and have made the same calls.

        Horovod ends on all ranks when it ends on one. A rank that has raised an error waits only until the others know.
        """
        if self.error_reported:
            return all(peer.raised or not peer.connected for peer in self._peers.values())
        return self.agreed and self.failure is None
