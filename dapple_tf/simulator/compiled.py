"""Numba's compiler as typed decorators, for the inner loops of the planners of other systems and of order search.

Numba is imported, and a function compiled, at the first call. Nothing that ``dapple.simulate``, planner "best" or
``--help`` need is compiled: compiling takes seconds to minutes.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from dapple_tf.simulator.interrupts import check_stop

# Options that leave out the entry points for C callbacks and for Python. (Numba's type stubs lack both.)
_NOT_FROM_C: dict[str, Any] = {"no_cfunc_wrapper": True}
_NOT_FROM_PYTHON: dict[str, Any] = {"no_cpython_wrapper": True}

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Return the function as machine code, compiled at its first call for each combination of argument types.

    It releases Python's global lock, so that threads run it beside each other. The code is cached on disk, beside the
    module or, where that folder cannot be written to, in the user's cache; without either it is compiled in each
    process. Numba compiles again if the function's own file has changed, but not if a compiled function that it calls
    has, and fails to read the cache where a type has got another name. So ``_drop_stale_code`` removes what is older
    than any source. In the user's cache, delete the ``*.nbc`` and ``*.nbi`` files after an update.
    """
    return cast(_Function, _Lazy(function, {"cache": True, "nogil": True, **_NOT_FROM_C}))


def compiled_part(function: _Function) -> _Function:
    """Return the function as machine code that only compiled functions can call; calling it from Python fails.

    This saves compiling the code that unpacks Python's arguments, which is longer than most functions where these are
    NamedTuples of many arrays.
    """
    return cast(_Function, _Lazy(function, {"cache": True, **_NOT_FROM_C, **_NOT_FROM_PYTHON}))


def inlined(function: _Function) -> _Function:
    """Return the function for use in ``compiled`` functions, which take in its body as if it were written there.

    Only for functions of a few arrays: each array's references are counted at every use. A NamedTuple of many arrays
    takes a ``compiled`` function without branches instead, which LLVM inlines after it has removed the counting.
    """
    return cast(_Function, _Lazy(function, {"inline": "always"}))


def call_from_compiled(*functions: Callable[..., Any]) -> None:
    """Let ``compiled`` functions call these plain Python functions, as machine code; Python calls them as they are."""
    _CALLED.update(dict.fromkeys(functions))


_CALLED: dict[Callable[..., Any], None] = {}


class _Lazy:
    """A function that Numba gets when it is first called, by Python or by another compiled function."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        return self._compiler(*args)

    @property
    def _numba_type_(self) -> Any:
        """The type by which Numba recognises a compiled function that another one calls."""
        return self._compiler._numba_type_

    @functools.cached_property
    def _compiler(self) -> Any:
        numba = _load_numba()
        try:
            return numba.njit(**self._options)(self._function)
        except RuntimeError:  # there is no folder for the cache
            return numba.njit(**{**self._options, "cache": False})(self._function)


@functools.cache
def _load_numba() -> ModuleType:
    """Import Numba, which takes about a second, and prepare it."""
    # Where colorama is installed, numba would let it wrap sys.stdout, and print an escape sequence when the process
    # ends: behind the JSON object that is to be the last line.
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    import numba
    from numba.core import event
    from numba.extending import register_jitable

    class StopBetweenPasses(event.Listener):
        """Ends a compilation between two passes, where an exception leaves the compiler's state consistent."""

        def on_start(self, event: event.Event) -> None:
            check_stop()

        def on_end(self, event: event.Event) -> None:
            pass

    event.register("numba:run_pass", StopBetweenPasses())  # type: ignore[no-untyped-call]  # Numba has no type hints
    _drop_stale_code(Path(__file__).parents[1])
    for function in _CALLED:
        register_jitable(function)
    return numba


_IMPORT = b"from dapple_tf.simulator.compiled import"


def _drop_stale_code(package: Path) -> None:
    """Remove the compiled code in a package's ``__pycache__`` folders that is older than one of its sources.

    Sources are the files that import from this module, or whose functions such files call. What cannot be removed
    stays.
    """
    called = {Path(function.__code__.co_filename) for function in _CALLED}
    sources = [path for path in package.rglob("*.py") if _IMPORT in path.read_bytes() or path in called]
    newest = max((source.stat().st_mtime_ns for source in sources), default=0)
    for compiled_code in (*package.rglob("__pycache__/*.nbi"), *package.rglob("__pycache__/*.nbc")):
        with contextlib.suppress(OSError):  # another process removes it, too, or the folder cannot be written to
            if compiled_code.stat().st_mtime_ns < newest:
                compiled_code.unlink()
