"""Call functions that run C++ code so that Ctrl-C ends them at once.

Python raises KeyboardInterrupt in the main thread only, and only while that thread runs Python code: C++ code must
return first. So C++ code runs in another thread. The main thread waits for it in Python, where it can be interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# How long an interrupt waits for the thread to end. It ends within milliseconds, unless a C++ compiler runs.
_PATIENCE_SECONDS = 1.0

_stop = ContextVar[NDArray[np.bool_]]("_stop")


class StoppedError(BaseException):
    """The call of an ``interruptible`` function was interrupted, so its thread ends."""


def interruptible(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Return the function, run in a thread of its own where the main thread calls it.

    What a signal handler raises meanwhile (Ctrl-C: KeyboardInterrupt) is raised at once if the thread ends within a
    second, which it does where the function calls ``check_stop`` often enough; else after a second. The thread then
    ends at its next ``check_stop``, and no result of it is used. In other threads, and where no thread can be started,
    the function is just called.
    """

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        return _call_in_thread(functools.partial(function, *args, **kwargs), function.__name__)

    return call


def stop_flag() -> NDArray[np.bool_]:
    """Return the flag [1] that is set when the call that runs in this context must end; C++ code may read it."""
    return _stop.get(np.zeros(1, np.bool_))


def check_stop() -> None:
    """Raise StoppedError if the call that runs in this context must end."""
    if stop_flag()[0]:
        raise StoppedError


def _call_in_thread(function: Callable[[], _Result], name: str) -> _Result:
    stop, results, failures = np.zeros(1, np.bool_), list[_Result](), list[BaseException]()
    ended = threading.Event()  # Reason: until Python 3.13 a thread counts as ended once ``join`` was interrupted.

    def work() -> None:
        _stop.set(stop)
        try:
            check_stop()
            results.append(function())
        except BaseException as failure:
            failures.append(failure)
        finally:
            ended.set()

    thread = threading.Thread(target=copy_context().run, args=(work,), name=f"dapple {name}")
    try:
        with contextlib.suppress(RuntimeError):  # Python ends, or the system allows no more threads
            thread.start()
        if thread.ident is not None:
            ended.wait()
            thread.join()
    except BaseException:
        stop[0] = True
        if thread.ident is not None:
            _wait_for(ended)
        raise
    if thread.ident is None:
        return function()
    if failures:
        raise failures[0]
    return results[0]


def _wait_for(ended: threading.Event) -> None:
    """Wait for the event, for a second at most; further interrupts in this time change nothing."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not ended.is_set() and (left := end - time.monotonic()) > 0:
        with contextlib.suppress(KeyboardInterrupt):
            ended.wait(left)
