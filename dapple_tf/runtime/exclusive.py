"""Let one step at a time use a variable: steps of several threads that share variables run one after the other.

A forked child of a process in which TensorFlow had started runs no steps: it has none of TensorFlow's threads, and a
step would wait for them forever.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from dapple_tf import internals, variable_values
from dapple_tf.errors import UsageError

_COMPILING = threading.RLock()
"""Held while a step is compiled: variables move to their stages, and an optimizer makes its variables."""

# The lock of each variable, by its identity, as long as the variable exists. Any step of the process may use it.
_LOCKS: dict[int, Any] = {}
_MAKING = threading.Lock()

# The process from which this one was forked after TensorFlow had started there; empty if there is none.
_PARENTS: list[int] = []

# The many objects of a graph stay: with Python's own thresholds its garbage collector takes a sixth of a build's time.
_COLLECT_AFTER = (10_000, 20, 20)


def _note_fork() -> None:
    if internals.tensorflow_has_started():
        _PARENTS.append(os.getppid())


os.register_at_fork(after_in_child=_note_fork)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile one step at a time; tracing makes no values of deferred variables, which are made at their stages.

    Raises UsageError in a process that was forked after TensorFlow had started.
    """
    if _PARENTS:
        raise UsageError(
            f"process {os.getpid()} was forked from process {_PARENTS[-1]}, in which TensorFlow had started: its "
            "threads do not exist here, and a step would never end. Start processes anew (multiprocessing's 'spawn' or "
            "'forkserver'), or fork before anything of TensorFlow runs"
        )
    with _COMPILING, variable_values.without_values(), _rare_collections():
        yield


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python collect cyclic garbage only after ``_COLLECT_AFTER`` in the block; a collector turned off stays so."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(*map(max, before, _COLLECT_AFTER))
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def exclusive(variables: Iterable[Any]) -> Iterator[None]:
    """Let other threads wait that enter this for one of these ``variables``.

    All threads take the locks of variables in the same order, so no two threads wait for each other.
    """
    locks = [_lock_of(variable) for variable in sorted(variables, key=id)]
    with contextlib.ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        yield


def _lock_of(variable: Any) -> Any:
    key = id(variable)
    found = _LOCKS.get(key)
    if found is None:
        with _MAKING:
            found = _LOCKS.get(key)
            if found is None:
                found = _LOCKS[key] = threading.RLock()
                weakref.finalize(variable, _LOCKS.pop, key, None)
    return found
