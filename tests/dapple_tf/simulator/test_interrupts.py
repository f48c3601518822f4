"""Interrupts of functions that run C code, in real processes: the exception, what is left behind, the time."""

from __future__ import annotations

import threading

import pytest

from dapple_tf.simulator.interrupts import check_stop, interruptible, stop_flag
from tests.processes import run_python

# ``count`` runs for longer than any test, nearly all the time in C code.
COUNT = """
import ctypes, os, signal, sys, threading, time
import numpy as np
from dapple_tf.simulator.interrupts import check_stop, interruptible, stop_flag

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background with SIGINT ignored

def count(most, stop):
    done = 0
    while done < most and not stop[0]:
        ctypes.CDLL(None).usleep(1000)
        done += 1
    return done

def left():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dapple")]

def interrupt(seconds, number=signal.SIGINT):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
"""


def run(code: str) -> str:
    """Return what a new process prints that runs the code, after ``COUNT``, and ends with exit code 0."""
    return run_python("-X", "faulthandler", "-c", COUNT + code, timeout_seconds=60).stdout


def test_an_interrupt_ends_code_that_reads_the_flag() -> None:
    printed = run("""
@interruptible
def search():
    interrupt(0.05)
    return count(10**15, stop_flag())

for _ in range(10):
    try:
        search()
    except KeyboardInterrupt:
        end = time.monotonic() + 30
        while left() and time.monotonic() < end:
            time.sleep(0.001)  # the last instructions of the thread
        print(left())
assert interruptible(count)(10, np.zeros(1, np.bool_)) == 10
""")
    assert printed == "[]\n" * 10


def test_an_interrupt_of_code_that_reads_no_flag_is_raised_after_a_second_and_the_code_ends_later() -> None:
    printed = run("""
own = np.zeros(1, np.bool_)

@interruptible
def deaf():
    interrupt(0.1)
    count(10**15, stop_flag())
    interrupt(0.2)  # in the second of waiting
    count(10**15, own)
    check_stop()
    print("not reached")

begin = time.monotonic()
try:
    deaf()
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on a busy machine the second one may come later
    print(0.9 < time.monotonic() - begin < 10, left())
own[0] = True
""")
    assert printed == "True ['dapple deaf']\n"


def test_what_another_signal_handler_raises_is_raised() -> None:
    printed = run("""
def handle(number, frame):
    raise TimeoutError("enough")

signal.signal(signal.SIGTERM, handle)

@interruptible
def search():
    interrupt(0.05, signal.SIGTERM)
    return count(10**15, stop_flag())

try:
    search()
except TimeoutError as error:
    print(error)
""")
    assert printed == "enough\n"


def test_results_and_failures_are_those_of_the_function() -> None:
    def divide(a: int, *, by: int) -> float:
        return a / by

    assert interruptible(divide)(1, by=2) == 0.5
    assert interruptible(divide).__name__ == "divide"
    with pytest.raises(ZeroDivisionError):
        interruptible(divide)(1, by=0)


def test_only_calls_of_the_main_thread_get_a_thread_of_their_own() -> None:
    inner = interruptible(threading.current_thread)

    @interruptible
    def outer() -> tuple[threading.Thread, threading.Thread]:
        return threading.current_thread(), inner()

    own, same = outer()
    assert own is same
    assert own is not threading.main_thread()
    assert not own.is_alive()


def test_the_function_is_called_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert interruptible(threading.current_thread)() is threading.main_thread()


def test_nothing_is_stopped_outside_of_an_interrupted_call() -> None:
    assert not stop_flag()[0]
    check_stop()
