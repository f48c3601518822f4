"""Call a function of many items in threads, each with a resource of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextvars import copy_context
from threading import Thread
from typing import TypeVar

from dapple_tf.simulator.interrupts import check_stop

_Item = TypeVar("_Item")
_Resource = TypeVar("_Resource")
_Result = TypeVar("_Result")


def map_in_threads(
    function: Callable[[_Item, _Resource], _Result], items: Sequence[_Item], resources: Sequence[_Resource]
) -> list[_Result]:
    """Return ``function(item, resource)`` of every item, in the items' order; no two threads share a resource.

    After a failure, or an interrupt of the calling thread or of the ``interruptible`` function that it runs, no further
    item is begun; the first failure is raised. The threads have copies of the calling thread's context. Where no thread
    can be started (Python ends, or the system allows no more), the calling thread does the work.

    It is not a ``ThreadPoolExecutor``: that starts no thread once the main thread has ended, in any other thread.
    """
    left, results, failures = enumerate(items), dict[int, _Result](), list[BaseException]()

    def work(resource: _Resource) -> None:
        try:
            for index, item in left:  # the threads take turns at this iterator
                if failures:
                    return
                check_stop()
                results[index] = function(item, resource)
        except BaseException as failure:
            failures.append(failure)

    started = list[Thread]()
    try:
        with contextlib.suppress(RuntimeError):
            for resource in resources[: len(items)]:
                thread = Thread(target=copy_context().run, args=(work, resource))
                thread.start()
                started.append(thread)
        if not started:
            work(resources[0])
        for thread in started:
            thread.join()
    except BaseException as interrupt:
        failures.append(interrupt)
        raise
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(items))]
