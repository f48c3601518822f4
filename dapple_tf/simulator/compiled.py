"""Numba's compiler as a typed decorator, and the arrays that compiled functions take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """The function as machine code, compiled at its first call for each kind of arguments.

    What is made is kept on disk, beside the module or in the user's cache.
    """
    return cast(_Function, numba.njit(cache=True)(function))
