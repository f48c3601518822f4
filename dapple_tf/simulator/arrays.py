"""The types of arrays in the simulator and the planner, and sums of parts of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]


def prefix_sums(values: Floats) -> Floats:
    """Return the sums of the first 0, 1, ... entries along the last axis, which gets one longer."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)


def runs(sums: Floats) -> Floats:
    """Return from prefix sums [..., N + 1] the sums of the entries from a first one to an end, [..., N, N + 1]."""
    return sums[..., None, :] - sums[..., :-1, None]
