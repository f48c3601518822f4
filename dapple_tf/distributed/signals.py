"""Receive SIGTERM and Ctrl-C while the main thread is inside TensorFlow.

Python runs signal handlers in the main thread, and not before TensorFlow returns to it. But the interpreter writes the
number of each signal to a socket at once (``signal.set_wakeup_fd``), where another thread can read it.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from typing import Any

# Written to the socket to wake the thread without a signal.
_NO_SIGNAL = 0


class SignalReceiver:
    """The socket, and this process's handlers of SIGTERM and SIGINT.

    ``reader`` becomes readable when a signal comes, or after ``wake``. ``interrupted``: the main thread has raised
    KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        for end in (self.reader, self._writer):
            end.setblocking(False)
        self.interrupted = False

    def install(self) -> None:
        """Install the handlers, where neither the user nor another library has; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:  # another library's: ours would take its signals away
            signal.set_wakeup_fd(previous)
            return
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self.on_terminate)
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, self.on_interrupt)

    def uninstall(self) -> None:
        """Restore what signals did before ``install``, except where the user has installed handlers since."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self.on_terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == self.on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        installed = signal.set_wakeup_fd(-1)
        if installed not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(installed)

    def wake(self, number: int = _NO_SIGNAL) -> None:
        """Make ``reader`` readable, as signal ``number`` does."""
        with contextlib.suppress(OSError):
            self._writer.send(bytes([number]))

    def receive(self) -> list[int]:
        """Return the numbers of the signals that have come, of those that this object handles."""
        try:
            numbers = self.reader.recv(1024)
        except OSError:
            return []
        handlers = {signal.SIGTERM: self.on_terminate, signal.SIGINT: self.on_interrupt}
        return [n for n in numbers if n in handlers and signal.getsignal(n) == handlers[signal.Signals(n)]]

    def close(self) -> None:
        """Close the socket; call ``uninstall`` before."""
        self.reader.close()
        self._writer.close()

    def on_terminate(self, number: int, frame: Any) -> None:
        """Do nothing: the thread has read the signal already."""

    def on_interrupt(self, number: int, frame: Any) -> None:
        """Raise KeyboardInterrupt, as Python does by default."""
        self.interrupted = True
        signal.default_int_handler(number, frame)
