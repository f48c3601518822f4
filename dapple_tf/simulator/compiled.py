"""Numba's compiler as typed decorators, and the array types that compiled functions take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

# Where colorama is installed, numba would let it wrap sys.stdout, and print an escape sequence when the process ends:
# behind the JSON object that is to be the last line.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]

# Options that leave out the entry points for C callbacks and for Python. (Numba's type stubs lack both.)
_NOT_FROM_C: dict[str, Any] = {"no_cfunc_wrapper": True}
_NOT_FROM_PYTHON: dict[str, Any] = {"no_cpython_wrapper": True}

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Return the function as machine code, compiled at its first call for each combination of argument types.

    It releases Python's global lock, so that threads run it beside each other. The code is cached on disk, beside the
    module or, where that folder cannot be written to, in the user's cache. Numba compiles again if the function's own
    file has changed, but not if a compiled function that it calls has, and fails to read the cache where a type has got
    another name. So ``drop_stale_code`` removes what is older than any source. In the user's cache, delete the
    ``*.nbc`` and ``*.nbi`` files after an update.
    """
    return cast(_Function, numba.njit(cache=True, nogil=True, **_NOT_FROM_C)(function))


def compiled_part(function: _Function) -> _Function:
    """Return the function as machine code that only compiled functions can call; calling it from Python fails.

    This saves compiling the code that unpacks Python's arguments, which is longer than most functions where these are
    NamedTuples of many arrays.
    """
    return cast(_Function, numba.njit(cache=True, **_NOT_FROM_C, **_NOT_FROM_PYTHON)(function))


def inlined(function: _Function) -> _Function:
    """Return the function for use in ``compiled`` functions, which take in its body as if it were written there.

    Only for functions of a few arrays: each array's references are counted at every use. A NamedTuple of many arrays
    takes a ``compiled`` function without branches instead, which LLVM inlines after it has removed the counting.
    """
    return cast(_Function, numba.njit(inline="always")(function))


_IMPORT = b"from dapple_tf.simulator.compiled import"


def drop_stale_code(package: Path) -> None:
    """Remove the compiled code in a package's ``__pycache__`` folders that is older than one of its sources.

    Sources are the files that import from this module. What cannot be removed stays.
    """
    sources = (path for path in package.rglob("*.py") if _IMPORT in path.read_bytes())
    newest = max((source.stat().st_mtime_ns for source in sources), default=0)
    for compiled_code in (*package.rglob("__pycache__/*.nbi"), *package.rglob("__pycache__/*.nbc")):
        with contextlib.suppress(OSError):  # another process removes it, too, or the folder cannot be written to
            if compiled_code.stat().st_mtime_ns < newest:
                compiled_code.unlink()


drop_stale_code(Path(__file__).parents[1])
