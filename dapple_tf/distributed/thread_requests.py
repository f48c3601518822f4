"""Calls that one thread has another make, and waits for."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

_WAIT_SECONDS = 2.0


class ThreadRequests:
    """Calls for the thread that calls ``serve``; ``wake`` makes it do so."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: queue.Queue[tuple[Callable[[], None], threading.Event]] = queue.Queue()

    def run(self, request: Callable[[], None]) -> None:
        """Have the serving thread call ``request``; wait for that, 2 s at most."""
        done = threading.Event()
        self._waiting.put((request, done))
        self._wake()
        done.wait(_WAIT_SECONDS)

    def serve(self) -> None:
        """Make the calls that wait."""
        with contextlib.suppress(queue.Empty):
            while True:
                request, done = self._waiting.get_nowait()
                request()
                done.set()
