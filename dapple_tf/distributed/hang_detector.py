"""Has a step failed that does not return?

When an op fails, TensorFlow cancels the others of the step and waits for them; Horovod's do not heed that, and wait for
ranks that wait for this one. So every step holds an op that does: it takes elements from a queue until the step has
exchanged everything. As long as it lives it takes what another thread puts into the queue; what stays there tells that
the step has been cancelled. Many that stay tell that everything has been exchanged.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

# Elements that the op takes: so often can be asked in one step. Asking every second, later each time the step has taken
# an eighth longer, they last for days.
_ELEMENTS = 96
_FIRST_SECONDS = 1.0
_GROWTH = 8
# The op starts with the step, unless all threads compute: so long it may take.
_START_SECONDS = 20.0


class Canary:
    """The queue, and what was asked of the step that runs."""

    def __init__(self) -> None:
        self._queue: Any = None
        self._lock = threading.Lock()
        self._begun: float | None = None
        self._next = 0.0
        self._asked = 1
        self._seen = False

    def watch_over(self, done: Any) -> Any:
        """Put the op into the step being built: it ends when ``done`` is there. Gives ``done``, after that."""
        import tensorflow as tf

        # Of two errors on one device TensorFlow tells the first, which is this op's; of two devices, the cause.
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
    def singing(self) -> Iterator[None]:
        """While open, a step runs. It finds one element, which tells that the op has started."""
        with self._lock:
            left = int(self._queue.size())  # by the step before
            if left > 1:
                self._queue.dequeue_many(left - 1)
            elif left == 0:
                self._queue.enqueue(True)
            self._asked, self._seen, self._begun = 1, False, time.monotonic()
            self._next = self._begun + _FIRST_SECONDS
        try:
            yield
        finally:
            with self._lock:
                self._begun = None

    def is_dead(self, now: float) -> bool:
        """Whether the step that runs has failed; asked for every now and then by another thread."""
        with self._lock:
            if self._begun is None or now < self._next:
                return False
            left = int(self._queue.size())
            if left >= _ELEMENTS:
                return False  # everything has been exchanged; weights are being updated
            if left > 0:
                return self._seen or now - self._begun > _START_SECONDS
            self._seen = True
            if self._asked < _ELEMENTS - 1:
                self._queue.enqueue(True)  # it is taken at once, or never
                self._asked += 1
                self._next = now + max(_FIRST_SECONDS, (now - self._begun) / _GROWTH)
            return False
