"""How this process ends, as the other ranks must know: by an error, a signal, or as it should."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import threading
from types import TracebackType

from dapple_tf.distributed import membership
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.watchdog import Watch, start_watch
from dapple_tf.errors import StepError

# By process: a forked child has none.
_WATCHES: dict[int, Watch] = {}
# What a step fails with when others have gone.
_LOST = re.compile("Horovod|MPI_|[Gg]loo")
_INTERRUPTED = 130


def guard(job: Job) -> None:
    """Watch the other ranks, and tell them how this one ends; again is fine. Every rank must call it.

    From here on an exception that nobody catches, SIGTERM and Ctrl-C end all ranks. Handlers that the user has set, or
    sets later, stay; then the signal is theirs.
    """
    if current_watch() is not None:
        return
    watch = start_watch(job)
    _WATCHES[os.getpid()] = watch
    _report_exceptions(watch)
    if threading.current_thread() is threading.main_thread():
        _heed_signals(watch)
    os.register_at_fork(after_in_child=lambda: _let_go(watch))
    atexit.register(_end, watch, os.getpid())


def current_watch() -> Watch | None:
    """The watch of this process, if it has one."""
    return _WATCHES.get(os.getpid())


def report_failure(error: BaseException) -> None:
    """Tell the other ranks that ``error`` ends this one; they end too. Nothing where there is no watch."""
    watch = current_watch()
    if watch is None:
        return
    what = f"raised {type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt):
        watch.report("was interrupted (Ctrl-C)", _INTERRUPTED)
    elif isinstance(error, StepError) and _LOST.search(str(error)):
        watch.report_loss(what)
    else:
        watch.report(what)


def prints_error_in_full(error: BaseException) -> bool:
    """Whether this rank is to tell ``error`` in full; where another is, it says so here in a line."""
    teller, job = membership.reporting_rank(error), membership.current()
    if teller is None or job is None or teller == job.rank:
        return True
    reason = f"for the reason that rank {teller} tells ({type(error).__name__})"
    print(f"dapple: rank {job.rank} ends, {reason}", file=sys.stderr, flush=True)
    return False


def _report_exceptions(watch: Watch) -> None:
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and current_watch() is watch:
            print("dapple: interrupted", file=sys.stderr, flush=True)  # a traceback from every rank helps nobody
        elif prints_error_in_full(error):
            before(kind, error, traceback)
        report_failure(error)

    sys.excepthook = report


def _heed_signals(watch: Watch) -> None:
    """Have the watch's thread see signals while the main thread is in TensorFlow, where no handler runs."""
    before = signal.set_wakeup_fd(watch.wake_in.fileno(), warn_on_full_buffer=False)
    if before != -1:  # another's: ours would take its signals away
        signal.set_wakeup_fd(before)
        return
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, watch.on_terminate)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, watch.on_interrupt)


def _let_go(watch: Watch) -> None:
    """Leave a process without the watch: signals do what they did before."""
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGTERM) == watch.on_terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == watch.on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        ours = signal.set_wakeup_fd(-1)
        if ours not in (-1, watch.wake_in.fileno()):
            signal.set_wakeup_fd(ours)
    watch.close()


def _end(watch: Watch, process: int) -> None:
    """The end of the interpreter: what was not caught has been reported, all else is a good end."""
    if os.getpid() == process:
        watch.leave()
        _let_go(watch)
