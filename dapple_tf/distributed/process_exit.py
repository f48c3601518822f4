"""End this process at once, with the reason on stderr: its main thread may wait in a step forever."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

from dapple_tf.distributed.failure_messages import describe_call_mismatch, describe_forced_exit
from dapple_tf.distributed.progress import Progress


class ProcessExit:
    """Ends the process of ``rank``, by a call of ``exit_process`` with the exit code.

    ``ending``: the process is about to end, by this object or by itself.
    """

    def __init__(self, rank: int, progress: Progress, exit_process: Callable[[int], None] = os._exit) -> None:
        self._rank = rank
        self._progress = progress
        self._exit_process = exit_process
        self._mismatch_printed = False
        self.ending = False

    def end(self, exit_code: int) -> None:
        """End the process; what it has printed is written out before, unless a lock is held on the stream."""
        _flush_output()
        self.ending = True
        self._exit_process(exit_code)

    def end_after(self, seconds: float, exit_code: int) -> None:
        """End the process, printing why, if it has not ended by itself within ``seconds``."""
        timer = threading.Timer(seconds, self._force, (seconds, exit_code))
        timer.daemon = True
        timer.start()

    def print_call_mismatch(self, what: str) -> None:
        """Print, once, that the ranks make different calls."""
        if not self._mismatch_printed:
            self._mismatch_printed = True
            print_line(describe_call_mismatch(self._rank, self._progress.status(), what))

    def _force(self, seconds: float, exit_code: int) -> None:
        if self.ending:
            self._exit_process(exit_code)
            return
        print_line(describe_forced_exit(self._rank, self._progress.status(), seconds))
        self.end(exit_code)


def print_line(text: str) -> None:
    """Write a line to Python's stderr, past all buffers: the process is about to end."""
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # replaced by an object without one, or closed
        descriptor = 2
    os.write(descriptor, f"dapple: {text}\n".encode())


def _flush_output() -> None:
    """Flush stdout and stderr, for 0.2 s at most: a thread may hold a lock on them."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(0.2)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or replaced by any other object
            stream.flush()
