"""Calls in threads: order, resources, failures, interrupts, and a main thread that has ended."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from dapple_tf.planner.threads import map_in_threads


def test_results_are_in_order_and_no_resource_is_shared() -> None:
    used: list[list[int]] = [[], [], []]

    def call(item: int, resource: list[int]) -> int:
        resource.append(threading.get_ident())
        time.sleep(0.001 * (item % 3))  # so that later items end before earlier ones
        return item * item

    assert map_in_threads(call, range(20), used) == [item * item for item in range(20)]
    assert sum(map(len, used)) == 20
    assert all(len(set(of_one)) <= 1 for of_one in used)
    assert map_in_threads(call, [], used) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failure_is_raised_and_nothing_else_is_begun(threads: int) -> None:
    begun = []

    def call(item: int, _: int) -> None:
        begun.append(item)
        raise MemoryError(f"item {item}")

    with pytest.raises(MemoryError, match="item"):
        map_in_threads(call, range(50), range(threads))
    assert len(begun) <= threads


def test_the_calling_thread_works_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    found = map_in_threads(lambda item, _: (item, threading.current_thread()), [1, 2], [0, 0])
    assert found == [(1, threading.current_thread()), (2, threading.current_thread())]


def test_an_interrupt_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = [], threading.Event()

    def interrupt(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    def call(item: int, _: int) -> None:
        begun.append(item)
        go_on.wait(10)

    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            map_in_threads(call, range(50), [0])
    go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert len(begun) <= 1


def test_a_thread_goes_on_after_the_main_thread_has_ended() -> None:
    code = """
import threading
from dapple_tf.planner.threads import map_in_threads

def late():
    threading.main_thread().join()
    print(map_in_threads(lambda item, _: item + 1, [1, 2, 3], [0, 0]))

threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "[2, 3, 4]", done.stderr
