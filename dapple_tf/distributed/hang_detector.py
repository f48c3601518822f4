"""Detect a failed step that hangs.

When an op fails, TensorFlow cancels the other ops of the step and waits until they end. Horovod's ops ignore the
cancellation: they wait for ranks that wait for this one. So every step holds one op that obeys it, a dequeue of
``_ELEMENTS`` elements from a queue, which otherwise ends when the step has completed its exchanges. While the op runs,
it takes each element that another thread adds to the queue. If an element stays, the step was cancelled; if
``_ELEMENTS`` stay, all exchanges are completed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

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
