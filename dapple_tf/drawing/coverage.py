"""Columns of a picture whose spans are narrower than its pixels: what share of each column spans cover, in what colour.

Polygons take long to draw where there are many, and most of these would be less than a pixel wide.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def measure_coverage(left: Floats, right: Floats, row: Integers, rows: int, columns: int) -> Floats:
    """Return the share of each column that spans cover, [rows, columns]; those that overlap count twice.

    ``left``, ``right``: the ends of each span, in columns from 0; ``row``: its row.
    """
    change = np.zeros((rows, columns + 2))  # of the share from one column to the next
    for ends, sign in ((left, 1.0), (right, -1.0)):
        ends = np.clip(ends, 0, columns)
        column = ends.astype(np.int64)
        np.add.at(change, (row, column), sign * (1 - (ends - column)))
        np.add.at(change, (row, column + 1), sign * (ends - column))
    covered: Floats = np.cumsum(change, axis=1)[:, :columns].clip(0.0)
    return covered


def mix_colours(covered: Floats, colours: Floats) -> Floats:
    """Return red, green, blue and opacity of each column, [rows, columns, 4], all from 0 to 1.

    ``covered`` [kinds, rows, columns]: by spans of each kind; ``colours`` [kinds, 3].
    """
    whole = covered.sum(axis=0)
    mixed = np.tensordot(covered, colours, axes=(0, 0)) / np.maximum(whole, 1e-12)[..., None]
    return np.concatenate([mixed.clip(0, 1), whole.clip(0, 1)[..., None]], axis=2)
