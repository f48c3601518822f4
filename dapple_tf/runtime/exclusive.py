"""Let one step at a time use a variable: steps of several threads that share variables run one after the other."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from dapple_tf import internals

_COMPILING = threading.RLock()
"""Held while a step is compiled: variables move to their stages, and an optimizer makes its own."""

# By the identity of the variable, for as long as that exists. A variable may be used by any step of the process.
_LOCKS: dict[int, Any] = {}
_MAKING = threading.Lock()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile one step at a time; tracing makes no values of deferred variables, which are made at their stages."""
    with _COMPILING, internals.without_values():
        yield


@contextlib.contextmanager
def exclusive(variables: Iterable[Any]) -> Iterator[None]:
    """Keep other threads that enter this for one of these ``variables`` waiting.

    All threads take the locks of variables in the same order, so none waits for one that waits for it.
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
