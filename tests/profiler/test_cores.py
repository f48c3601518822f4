"""Limiting the process to a few cores, and restoring its threads."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from dapple_tf.profiler.detect import count_cores, limit_to_cores


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can hold threads to cores")
def test_all_threads_are_limited_and_restored() -> None:
    own = os.sched_getaffinity(0)
    stop, ids = threading.Event(), []

    def idle() -> None:
        ids.append(threading.get_native_id())
        stop.wait(60)

    before = threading.Thread(target=idle)
    before.start()
    with limit_to_cores(1):
        during = threading.Thread(target=idle)
        during.start()
        while len(ids) < 2:
            pass
        held = [os.sched_getaffinity(thread) for thread in (0, *ids)]
    freed = [os.sched_getaffinity(thread) for thread in (0, *ids)]
    stop.set()
    before.join()
    during.join()
    assert held == [{min(own)}] * 3
    assert freed == [own] * 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can hold threads to cores")
def test_threads_are_restored_after_an_error() -> None:
    own = os.sched_getaffinity(0)
    with pytest.raises(KeyError), limit_to_cores(1):
        raise KeyError
    assert os.sched_getaffinity(0) == own


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can hold threads to cores")
def test_more_cores_than_exist_means_all_of_them() -> None:
    own = os.sched_getaffinity(0)
    with limit_to_cores(10_000):
        assert os.sched_getaffinity(0) == own


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can hold threads to cores")
def test_cores_that_the_process_may_not_use_do_not_count() -> None:
    with limit_to_cores(1):
        assert count_cores() == 1


def test_where_processes_cannot_be_limited_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert count_cores() == os.cpu_count()
