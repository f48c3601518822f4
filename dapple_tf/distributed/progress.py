"""Progress of this process: the step that it runs, and the last exchange that it completed.

TensorFlow does not say how far a running step has come. So each exchange of its graph writes its number into a
variable, which any thread may read meanwhile.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from dapple_tf.distributed.call_order_check import RankCall
from dapple_tf.distributed.hang_detector import HangDetector

# TensorFlow cancels a step a moment before it notes the error that is the cause.
_CANCELLED_SECONDS = 0.5


@dataclass(frozen=True)
class RankStatus:
    """Progress of one rank, as it reports it to the others.

    ``stages``: those that it runs, none before it has a plan. ``exchange``: name of the last exchange that it
    completed, "" for none in this step. ``collective_calls``: how many calls that wait for all ranks (steps,
    broadcasts, gathers) it has entered.
    """

    stages: tuple[int, ...] = ()
    step: int = 0
    running: bool = False
    exchange: str = ""
    collective_calls: int = 0

    @property
    def when(self) -> str:
        """Return "before its first step", "in step n" or "after step n"."""
        if not self.step:
            return "before its first step"
        return f"{'in' if self.running else 'after'} step {self.step}"

    @property
    def last_exchange(self) -> str:
        """Return the name of the last exchange, or "none"."""
        return self.exchange or f"none{f' of step {self.step}' if self.running else ''}"


class PendingExchanges(Protocol):
    """The native exchanges of this process that wait for other ranks. Any thread may call these."""

    def has_cancelled_waits(self, seconds: float) -> bool:
        """Return whether an exchange waits whose step TensorFlow cancelled more than ``seconds`` ago."""

    def abort(self) -> None:
        """End all exchanges that wait at this moment, with an error."""


@dataclass
class Progress:
    """Progress of this process; ``step`` counts the steps of all pipelines of the process.

    ``stages``: those that the program built last runs here. ``calls``: number of calls announced that every rank must
    make; ``call_history`` is a checksum of them, and ``call_listener`` is called with each. ``exchanges``: the native
    exchanges of this process, None where there are none. ``programs``: number of programs that this process has built.
    """

    stages: tuple[int, ...] = ()
    step: int = 0
    collective_calls: int = 0
    completed_collective_calls: int = 0
    programs: int = 0
    calls: int = 0
    call_history: int = 0
    call_listener: Callable[[RankCall], None] | None = None
    exchanges: PendingExchanges | None = None
    hang_detector: HangDetector = field(default_factory=HangDetector)
    _running: bool = False
    _started: set[int] = field(default_factory=set)
    _exchanges: list[str] = field(default_factory=lambda: [""])
    _exchange_variable: Any = None

    @property
    def exchange_variable(self) -> Any:
        """The variable, on the host, that holds the number of the last exchange; 0 for none in this step."""
        if self._exchange_variable is None:
            import tensorflow as tf

            with tf.init_scope(), tf.device("CPU:0"):
                self._exchange_variable = tf.Variable(0, dtype=tf.int32, trainable=False)
        return self._exchange_variable

    def exchange_number(self, exchange: str) -> int:
        """Return the number that stands for an exchange in ``exchange_variable``."""
        if exchange not in self._exchanges:
            self._exchanges.append(exchange)
        return self._exchanges.index(exchange)

    def status(self) -> RankStatus:
        """Return the progress at this moment; any thread may call this."""
        number = 0 if self._exchange_variable is None else int(self._exchange_variable.numpy())
        return RankStatus(self.stages, self.step, self._running, self._exchanges[number], self.collective_calls)

    @property
    def waiting_in(self) -> int | None:
        """The number of the collective call that this rank waits in; None if it is in none."""
        return self.collective_calls if self.collective_calls > self.completed_collective_calls else None

    def announce_call(self, what: str, detail: str = "") -> None:
        """Announce a call that every rank must make; see ``RankCall``."""
        self.calls += 1
        self.call_history = zlib.crc32(what.encode(), self.call_history)
        if self.call_listener is not None:
            self.call_listener(RankCall(self.calls, what, detail))

    @contextlib.contextmanager
    def collective_call(self) -> Iterator[None]:
        """Mark a call that waits for all other ranks: it lasts as long as this context."""
        self.collective_calls += 1
        try:
            yield
        finally:
            self.completed_collective_calls = self.collective_calls

    def step_has_failed(self, now: float) -> bool:
        """Return whether the running step has failed and hangs, as of ``now`` (seconds of ``time.monotonic``).

        One thread must call this repeatedly: see ``HangDetector.has_failed``.
        """
        if self.hang_detector.has_failed(now):
            return True
        return self.exchanges is not None and self.exchanges.has_cancelled_waits(_CANCELLED_SECONDS)

    @contextlib.contextmanager
    def step_running(self, program: int) -> Iterator[None]:
        """Mark a step of the program of this number: it runs as long as this context."""
        self.exchange_variable.assign(0)
        self.step += 1
        first = program not in self._started
        self._started.add(program)
        self._running = True
        try:
            with self.collective_call(), self.hang_detector.step_running(first=first):
                yield
        finally:
            self._running = False
