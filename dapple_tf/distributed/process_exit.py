"""End this process at once, and print the reason on stderr: its main thread may wait in a step forever."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
from collections.abc import Callable

from dapple_tf.distributed.progress import Progress, RankStatus
from dapple_tf.launcher.restart import begin_again, starts_again


class ProcessExit:
    """Ends the process of ``rank``, by calling ``exit_process`` with the exit code.

    ``ending``: the process is about to end, by itself or because of this object.
    """

    def __init__(self, rank: int, progress: Progress, exit_process: Callable[[int], None] = os._exit) -> None:
        self._rank = rank
        self._progress = progress
        self._exit_process = exit_process
        self._mismatch_printed = False
        self.ending = False

    def end(self, exit_code: int) -> None:
        """End the process; stdout and stderr are flushed before, unless another thread holds a lock on them."""
        _flush_output()
        self.ending = True
        self._exit_process(exit_code)

    def end_for_loss(self, failed: int, what: str) -> None:
        """End the process because ``what`` happened to the rank ``failed``; the launcher starts the job again."""
        _flush_output()
        begin_again(f"rank {failed} {what}", (failed,))
        self.end(1)

    def end_after(self, seconds: float, exit_code: int) -> None:
        """Print why and end the process, if it has not ended by itself within ``seconds``."""
        timer = threading.Timer(seconds, self._force, (seconds, exit_code))
        timer.daemon = True
        timer.start()

    def print_call_mismatch(self, what: str) -> None:
        """Print, once, that the ranks make different calls."""
        if not self._mismatch_printed:
            self._mismatch_printed = True
            status = self._progress.status()
            print_line(
                f"{name_rank(self._rank, status)} stops {status.when}, because the ranks make different calls: {what}. "
                "Every rank must be called with the same batches, and make the same calls in the same order. The last "
                f"exchange it completed: {status.last_exchange}. All processes end; "
                f"{describe_resumption(self._progress.saved)}."
            )

    def _force(self, seconds: float, exit_code: int) -> None:
        if self.ending:
            self._exit_process(exit_code)
            return
        print_line(
            f"{name_rank(self._rank, self._progress.status())} is ended: it still runs {seconds:g} s after the error "
            f"above, but a step that fails ends the job; {describe_resumption(self._progress.saved)}."
        )
        self.end(exit_code)


def print_line(text: str) -> None:
    """Write a line to Python's stderr without buffering: the process is about to end."""
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # stderr is closed, or replaced by an object without a descriptor
        descriptor = 2
    os.write(descriptor, f"dapple: {text}\n".encode(errors="backslashreplace"))


def _flush_output() -> None:
    """Flush stdout and stderr, for 0.2 s at most: a thread may hold a lock on them."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(0.2)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the stream may be closed, or replaced by any object
            stream.flush()


# --- Describe why a rank ends: its own failure, or another rank's


def describe_resumption(saved: str) -> str:
    """Return what is saved, and how a job that ends goes on; a launcher that starts it again says the latter itself.

    ``saved``: what is saved, in words; "" where dapple has saved nothing.
    """
    saved = saved or "dapple has saved no checkpoint of this job"
    command = shlex.join(sys.orig_argv)
    return saved if starts_again() else f"{saved}; start the job again with ranks that run {command}"


def describe_failure(
    rank: int, status: RankStatus, failed: int, failed_status: RankStatus, what: str, saved: str
) -> str:
    """Return why ``rank`` stops: ``what`` happened to the rank ``failed``, which may be ``rank`` itself.

    ``saved``: see ``describe_resumption``.
    """
    name = name_rank(rank, status)
    if failed == rank:
        return (
            f"{name} stops {status.when}: it {what}; the last exchange it completed: {status.last_exchange}. All "
            f"processes end; {describe_resumption(saved)}."
        )
    return (
        f"{name} stops: {name_rank(failed, failed_status)}, {failed_status.when}, {what}; the last exchange it "
        f"completed, by its last report: {failed_status.last_exchange}. {name} was {status.when}; the last exchange it "
        f"completed: {status.last_exchange}. All processes end; {describe_resumption(saved)}."
    )


def name_rank(rank: int, status: RankStatus) -> str:
    """Return ``rank 1 (stage 0)``, ``rank 1 (stages 0, 2)``, or ``rank 1`` if its stages are not known."""
    if not status.stages:
        return f"rank {rank}"
    return f"rank {rank} (stage{'s' * (len(status.stages) > 1)} {', '.join(map(str, status.stages))})"
