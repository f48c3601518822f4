"""Report to the other ranks how this process ends: by an error, by a signal, or with the end of its script."""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn

from dapple_tf.distributed import membership
from dapple_tf.distributed.failure_detector import read_timeout
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.rendezvous import connect_pairs
from dapple_tf.distributed.shared_errors import reporting_rank
from dapple_tf.distributed.watchdog import INTERRUPTED, Watchdog
from dapple_tf.errors import StepError
from dapple_tf.launcher.restart import CONTINUE, begin_again, failure_code, is_driven
from dapple_tf.messages import LOGGER

# Texts of errors with which an exchange fails when other ranks are gone.
_LOST_RANKS = re.compile("Horovod|MPI_|[Gg]loo|lost the connection to rank")


def start_exit_reporting(job: Job) -> None:
    """Start the watchdog of ``job``, which from now on reports to the other ranks how this process ends.

    Then an uncaught exception, SIGTERM or Ctrl-C ends all ranks. Signal handlers that the user has installed, or
    installs later, stay. TensorFlow must be ready to start. Every rank must call this; a second call does nothing.
    """
    if job.watchdog is not None:
        return
    watchdog = job.watchdog = start_watchdog(job)
    report_uncaught_exceptions()
    watchdog.signals.install()
    os.register_at_fork(after_in_child=lambda: _detach(watchdog))
    atexit.register(_leave_at_exit, watchdog, job.process)


def start_watchdog(job: Job, environment: Mapping[str, str] = os.environ) -> Watchdog:
    """Connect the ranks of ``job`` and start this rank's watchdog; every rank must call this.

    Rank 0's DAPPLE_TIMEOUT_SECONDS (default 30) holds for all ranks. Raises JobError if it is not a number from 1 up,
    or if a rank cannot connect to rank 0.
    """
    timeout = job.run_on_rank_0(lambda: read_timeout(environment))
    links = connect_pairs(job, [(0, rank) for rank in range(1, job.size)], "ranks report failures to each other")
    watchdog = Watchdog(job.rank, job.size, links, job.progress, timeout)
    watchdog.start()
    return watchdog


def report_failure(error: BaseException, exit_code: int = 1) -> None:
    """Report to the other ranks that ``error`` ends this one with ``exit_code``; they end with the same code.

    Does nothing outside of a job. Ctrl-C has an exit code of its own.
    """
    job = membership.current()
    if job.watchdog is None:
        return
    what = f"raised {type(error).__name__}: {error}"
    # A step, or a library outside of one, has raised it.
    of_exchange = isinstance(error, StepError) or type(error).__module__.partition(".")[0] in ("tensorflow", "horovod")
    if isinstance(error, KeyboardInterrupt):
        job.watchdog.report_error("was interrupted (Ctrl-C)", INTERRUPTED)
    elif of_exchange and _LOST_RANKS.search(str(error)):
        job.watchdog.report_lost_ranks(what)
    else:
        job.watchdog.report_error(what, exit_code)


def end_for_more_ranks(job: Job) -> NoReturn:
    """End this rank, which has saved, so that its job goes on with other ranks; every rank must call this.

    Raises SystemExit. Under Horovod's driver the end of the program is followed by its next start.
    """
    if is_driven():
        atexit.register(begin_again, "the hosts have changed")
        if job.watchdog is not None:  # first leave the job: the last function is called first
            atexit.unregister(_leave_at_exit)
            atexit.register(_leave_at_exit, job.watchdog, job.process)
    raise SystemExit(CONTINUE)


def prints_error_in_full(error: BaseException) -> bool:
    """Return whether this rank must print ``error``; if another rank does, print a line that says which rank."""
    rank, job = reporting_rank(error), membership.current()
    if job.is_alone or rank in (None, job.rank):
        return True
    LOGGER.warning("rank %d ends: rank %d prints the error (%s)", job.rank, rank, type(error).__name__)
    return False


def report_uncaught_exceptions() -> None:
    """Report what ends this process to the other ranks of its job, and to the launcher by the exit code.

    A second call does nothing.
    """
    if not isinstance(sys.excepthook, _ExceptionReport):
        sys.excepthook = _ExceptionReport(sys.excepthook)


class _ExceptionReport:
    """The function that Python calls for an uncaught exception; ``previous``, the one before it, prints it."""

    def __init__(self, previous: Callable[[type[BaseException], BaseException, TracebackType | None], Any]) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and not membership.current().is_alone:
            LOGGER.warning("interrupted")  # a traceback of every rank would not help
        elif prints_error_in_full(error):
            self._previous(kind, error, traceback)
        code = failure_code(getattr(error, "lasts", False))
        report_failure(error, code)
        if code != 1:
            raise SystemExit(code)  # with which Python ends here


def _detach(watchdog: Watchdog) -> None:
    """Restore this process's signal handlers and close the watchdog's connections."""
    watchdog.signals.uninstall()
    watchdog.close()


def _leave_at_exit(watchdog: Watchdog, process: int) -> None:
    """Leave the job when the interpreter ends; an uncaught exception has been reported before this is called."""
    if os.getpid() == process:
        watchdog.leave()
        _detach(watchdog)
