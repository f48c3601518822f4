"""The processor's cores that this process may run on: count them, or limit the process to a few of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_THREADS = Path("/proc/self/task")


def count_cores() -> int:
    """Return the number of cores that this process may run on; the machine's where the system cannot limit a process.

    ``mpirun --bind-to`` and ``taskset`` limit processes on Linux.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def limit_to_cores(count: int) -> Iterator[None]:
    """Run all threads of this process on ``count`` of its cores inside the block (on Linux; elsewhere do nothing).

    A device that shares the machine with others has only a few cores.

    The affinity of each thread is restored afterwards; threads started inside the block get this thread's.
    """
    if not _THREADS.is_dir():
        yield
        return
    own = os.sched_getaffinity(0)
    few = set(sorted(own)[:count])
    before: dict[int, set[int]] = {}
    for thread in _threads():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, few)
    try:
        yield
    finally:
        for thread in _threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, before.get(thread, own))


def _threads() -> list[int]:
    return sorted(int(path.name) for path in _THREADS.iterdir())
