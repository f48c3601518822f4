"""Progress of this process: the step that it runs, and the last exchange that it completed.

TensorFlow does not say how far a running step has come. So each exchange of its graph writes its number into a
variable, which any thread may read meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from dapple_tf.distributed.call_order_check import RankCall

# --- Detect a failed step that hangs
# When an op fails, TensorFlow cancels the other ops of the step and waits until they end. Horovod's ops ignore the
# cancellation: they wait for ranks that wait for this one. So every step holds one op that obeys it, a dequeue of
# ``_ELEMENTS`` elements from a queue, which otherwise ends when the step has completed its exchanges. While the op
# runs, it takes each element that another thread adds to the queue. If an element stays, the step was cancelled; if
# ``_ELEMENTS`` stay, all exchanges are completed.

# Elements that the op dequeues, so the largest number of probes in one step. Probes are a second apart at first, and
# later an eighth of the time that the step has run so far: the elements last for days.
_ELEMENTS = 96
_FIRST_SECONDS = 1.0
_GROWTH = 8
# The op starts with the step, unless all threads compute: it may take this long.
_START_SECONDS = 20.0
# Before a program runs for the first time TensorFlow optimizes its graph, that of a long window for minutes.
_FIRST_START_SECONDS = 1800.0


class HangDetector:
    """The queue, and the probes of the running step."""

    def __init__(self) -> None:
        self._queue: Any = None
        self._lock = threading.Lock()
        self._started: float | None = None
        self._next_probe = 0.0
        self._probes = 1
        self._op_started = False
        self._start_seconds = _START_SECONDS

    def guard(self, done: Any) -> Any:
        """Add the op to the step being built; return ``done``, a tensor that is computed after all exchanges."""
        import tensorflow as tf

        # Of two errors on one device TensorFlow reports the first, which would be the cancelled dequeue; of errors on
        # two devices, the cause.
        device = tf.config.list_logical_devices("CPU")[-1].name
        if self._queue is None:
            with tf.init_scope(), tf.device(device):
                self._queue = tf.queue.FIFOQueue(3 * _ELEMENTS, [tf.bool], [[]])
        with tf.device(device):
            taken = self._queue.dequeue_many(_ELEMENTS)
            elements = tf.ones([2 * _ELEMENTS], tf.bool)
            with tf.control_dependencies([done]):
                release = self._queue.enqueue_many([elements])
            with tf.control_dependencies([release, taken]):
                return tf.identity(done)

    @contextlib.contextmanager
    def step_running(self, *, first: bool = False) -> Iterator[None]:
        """Detect the failure of the step that runs in this context; ``first``: its program has not run before.

        The queue holds one element at first: once it is gone, the op has started.
        """
        with self._lock:
            left = int(self._queue.size())  # by the previous step
            if left > 1:
                self._queue.dequeue_many(left - 1)
            elif left == 0:
                self._queue.enqueue(True)
            self._probes, self._op_started, self._started = 1, False, time.monotonic()
            self._next_probe = self._started + _FIRST_SECONDS
            self._start_seconds = _FIRST_START_SECONDS if first else _START_SECONDS
        try:
            yield
        finally:
            with self._lock:
                self._started = None

    def has_failed(self, now: float) -> bool:
        """Return whether the running step has failed, as of ``now`` (seconds of ``time.monotonic``).

        Another thread than the one that runs the step must call this repeatedly: each call may add the probe that the
        next one evaluates.
        """
        with self._lock:
            if self._started is None or now < self._next_probe:
                return False
            left = int(self._queue.size())
            if left >= _ELEMENTS:
                return False  # all exchanges are completed; weights are being updated
            if left > 0:
                return self._op_started or now - self._started > self._start_seconds
            self._op_started = True
            if self._probes < _ELEMENTS - 1:
                self._queue.enqueue(True)  # taken at once, or never
                self._probes += 1
                self._next_probe = now + max(_FIRST_SECONDS, (now - self._started) / _GROWTH)
            return False


# --- Progress of this process: the step that it runs, and the last exchange that it completed


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
