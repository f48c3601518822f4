"""Progress of this process: the step that it runs, and the last exchange that it completed.

TensorFlow does not report how far a running step has come. So each exchange of the step's graph writes its name into a
variable, which any thread may read during the step.
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
# cancellation: they wait for ranks that wait for this one. So every step contains one op that is cancelled: a dequeue
# of ``_ELEMENTS`` elements from a queue. If nothing fails, it ends when the step has completed its exchanges. While the
# op runs, it takes each element that another thread adds to the queue as a probe. If the element stays in the queue,
# the step was cancelled; if at least ``_ELEMENTS`` elements are in the queue, all exchanges are completed.

# The number of elements that the op dequeues, and so the largest number of probes in one step. At first there is a
# second between two probes, and later an eighth of the time that the step has run: the elements last for days.
_ELEMENTS = 96
_FIRST_SECONDS = 1.0
_GROWTH = 8
# The op starts with the step, unless all threads compute: it may take this long.
_START_SECONDS = 20.0
# Before a program runs for the first time TensorFlow optimizes its graph; for a long window this takes minutes.
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
        """Add the op to the step that is being built; return ``done``, which is computed after all exchanges."""
        import tensorflow as tf

        # Of two errors on one device TensorFlow reports the first, which would be the cancelled dequeue. Of errors on
        # two devices it reports the cause, so the op has a device of its own.
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

        At first the queue holds one element: once the op has started, it takes this element.
        """
        with self._lock:
            left = int(self._queue.size())  # the previous step left them
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

        A thread that does not run the step must call this repeatedly: each call may add a probe, which the next call
        evaluates.
        """
        with self._lock:
            if self._started is None or now < self._next_probe:
                return False
            left = int(self._queue.size())
            if left >= _ELEMENTS:
                return False  # all exchanges are completed, and the weights are being updated
            if left > 0:
                return self._op_started or now - self._started > self._start_seconds
            self._op_started = True
            if self._probes < _ELEMENTS - 1:
                self._queue.enqueue(True)  # the op takes it at once, or never
                self._probes += 1
                self._next_probe = now + max(_FIRST_SECONDS, (now - self._started) / _GROWTH)
            return False


# --- Progress of this process: the step that it runs, and the last exchange that it completed


# TensorFlow cancels a step a moment before it records the error that is the cause.
_CANCELLED_SECONDS = 0.5


@dataclass(frozen=True)
class RankStatus:
    """The progress that one rank reports to the others.

    ``stages``: the stages that it runs, none before it has a plan. ``step``: the number of the last step that it began.
    ``running``: it runs this step, or with ``forward`` a run without training after it. ``exchange``: the name of the
    last exchange that it completed, "" if it has completed none in this run. ``collective_calls``: how many calls that
    wait for all ranks (steps, broadcasts, gathers) it has entered.
    """

    stages: tuple[int, ...] = ()
    step: int = 0
    running: bool = False
    forward: bool = False
    exchange: str = ""
    collective_calls: int = 0

    @property
    def when(self) -> str:
        """Return "before its first step", "in step n" or "after step n", with "in a run forward " before the others."""
        if self.running and not self.forward:
            return f"in step {self.step}"
        between = f"after step {self.step}" if self.step else "before its first step"
        return f"in a run forward {between}" if self.running else between

    @property
    def last_exchange(self) -> str:
        """Return the name of the last exchange, or "none"."""
        run = "this run" if self.forward else f"step {self.step}"
        return self.exchange or f"none{f' of {run}' if self.running else ''}"


class PendingExchanges(Protocol):
    """The native exchanges of this process that wait for other ranks. Any thread may call the methods."""

    def has_cancelled_waits(self, seconds: float) -> bool:
        """Return whether an exchange waits whose step TensorFlow cancelled more than ``seconds`` ago."""

    def abort(self) -> None:
        """End all exchanges that wait at this moment, with an error."""


@dataclass
class Progress:
    """Progress of this process.

    ``step``: the steps of all pipelines of the process, and those that were done before it resumed from a checkpoint.
    ``stages``: the stages that this process runs in the program that was built last. ``calls``: the number of announced
    calls that every rank must make; ``call_history`` is a checksum of these calls, and ``call_listener`` is called with
    each. ``exchanges``: the native exchanges of this process, or None. ``programs``: the number of programs that this
    process has built. ``saved``: what is saved of the run, in words; "" where nobody has said.
    """

    stages: tuple[int, ...] = ()
    step: int = 0
    saved: str = ""
    collective_calls: int = 0
    completed_collective_calls: int = 0
    programs: int = 0
    calls: int = 0
    call_history: int = 0
    call_listener: Callable[[RankCall], None] | None = None
    exchanges: PendingExchanges | None = None
    hang_detector: HangDetector = field(default_factory=HangDetector)
    _running: bool = False
    _forward: bool = False
    _started: set[int] = field(default_factory=set)
    _exchange_variable: Any = None

    @property
    def exchange_variable(self) -> Any:
        """The variable, on the host, that holds the name of the last exchange; "" for none in this step."""
        if self._exchange_variable is None:
            import tensorflow as tf

            with tf.init_scope(), tf.device("CPU:0"):
                self._exchange_variable = tf.Variable("", trainable=False)
        return self._exchange_variable

    def status(self) -> RankStatus:
        """Return the progress at this moment; any thread may call this."""
        exchange = "" if self._exchange_variable is None else self._exchange_variable.numpy().decode()
        return RankStatus(self.stages, self.step, self._running, self._forward, exchange, self.collective_calls)

    @property
    def waiting_in(self) -> int | None:
        """The number of the collective call in which this rank waits; None if it is in no such call."""
        return self.collective_calls if self.collective_calls > self.completed_collective_calls else None

    def announce_call(self, what: str, detail: str = "") -> None:
        """Announce a call that every rank must make; see ``RankCall``."""
        self.calls += 1
        self.call_history = zlib.crc32(what.encode(), self.call_history)
        if self.call_listener is not None:
            self.call_listener(RankCall(self.calls, what, detail))

    @contextlib.contextmanager
    def collective_call(self) -> Iterator[None]:
        """Mark a call that waits for all other ranks; the call lasts as long as this context."""
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
    def step_running(self, program: int, *, trains: bool) -> Iterator[None]:
        """Mark a step of the program with this number; the step runs as long as this context.

        Without ``trains`` it is a run forward, and not counted.
        """
        self.exchange_variable.assign("")
        self.step += trains
        self._forward = not trains
        first = program not in self._started
        self._started.add(program)
        self._running = True
        try:
            with self.collective_call(), self.hang_detector.step_running(first=first):
                yield
        finally:
            self._running = False
