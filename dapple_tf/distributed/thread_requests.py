"""Run functions on another thread and wait until they have run: one thread queues them, another serves the queue."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

_WAIT_SECONDS = 2.0


class ThreadRequests:
    """Queue of functions to run on the thread that calls ``serve``; ``wake`` interrupts the wait of that thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: queue.Queue[tuple[Callable[[], None], threading.Event]] = queue.Queue()

    def run(self, request: Callable[[], None]) -> None:
        """Run ``request`` on the serving thread; wait until it has run, at most 2 s."""
        done = threading.Event()
        self._waiting.put((request, done))
        self._wake()
        done.wait(_WAIT_SECONDS)

    def serve(self) -> None:
        """Run all queued functions, in order."""
        with contextlib.suppress(queue.Empty):
            while True:
                request, done = self._waiting.get_nowait()
                request()
                done.set()
