"""Wake a thread by signals, which arrive while the main thread is inside TensorFlow, and by functions to run.

Python runs signal handlers in the main thread, and only when TensorFlow returns to Python. But the interpreter writes
the number of each signal to a socket at once (``signal.set_wakeup_fd``), from which another thread can read it.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

# Written to the socket to wake the thread if there is no signal.
_NO_SIGNAL = 0
# Python's own handlers.
_DEFAULTS: Mapping[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
_WAIT_SECONDS = 2.0  # at most, for a function that another thread runs


class SignalReceiver:
    """The socket, and the handlers of SIGTERM, SIGINT and SIGUSR1 in this process.

    ``reader`` becomes readable when a signal arrives, and after ``wake``. ``interrupted``: the main thread has raised
    KeyboardInterrupt. ``spares_interrupt``: the next Ctrl-C raises nothing there.
    """

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        for end in (self.reader, self._writer):
            end.setblocking(False)
        self._handlers = {
            signal.SIGTERM: self.on_terminate,
            signal.SIGUSR1: self.on_terminate,
            signal.SIGINT: self.on_interrupt,
        }
        self.interrupted = False
        self.spares_interrupt = False

    def install(self) -> None:
        """Install the handlers, unless the user or another library has installed one; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:  # another library uses it, and would no longer receive signals
            signal.set_wakeup_fd(previous)
            return
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == _DEFAULTS[number]:
                signal.signal(number, handler)

    def uninstall(self) -> None:
        """Restore the handlers from before ``install``, except where the user has installed one since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, _DEFAULTS[number])
        installed = signal.set_wakeup_fd(-1)
        if installed not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(installed)

    def wake(self, number: int = _NO_SIGNAL) -> None:
        """Make ``reader`` readable, as signal ``number`` does."""
        with contextlib.suppress(OSError):
            self._writer.send(bytes([number]))

    def receive(self) -> list[int]:
        """Return the numbers of the signals that have arrived, if this object handles them."""
        try:
            numbers = self.reader.recv(1024)
        except OSError:
            return []
        return [n for n in numbers if n in self._handlers and signal.getsignal(n) == self._handlers[signal.Signals(n)]]

    def close(self) -> None:
        """Close the socket; call ``uninstall`` before."""
        self.reader.close()
        self._writer.close()

    def on_terminate(self, number: int, frame: Any) -> None:
        """Do nothing: the thread has read the signal already."""

    def on_interrupt(self, number: int, frame: Any) -> None:
        """Raise KeyboardInterrupt, as Python does by default, unless this one is spared."""
        if self.spares_interrupt:
            self.spares_interrupt = False
            return
        self.interrupted = True
        signal.default_int_handler(number, frame)


class ThreadRequests:
    """A queue of functions that the thread which calls ``serve`` runs; ``wake`` ends the wait of that thread."""

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
