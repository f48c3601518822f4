"""The seconds of a layout, as the local search simulates it."""

from __future__ import annotations

import numpy as np

from dapple_tf.planner.anneal import FREE, anneal
from dapple_tf.planner.layout import Layout, LayoutTables
from dapple_tf.planner.layout_simulation import AnyWorkspace, Tables


def seconds_of(tables: Tables, layout: Layout, workspace: AnyWorkspace, *, contention: bool) -> float:
    """Return the seconds of a step of ``layout`` under the fastest policy allowed."""
    moves = tables.moves if isinstance(tables, LayoutTables) else tables.layout.moves
    unused, never = np.ones(1, np.uint64), np.zeros(1, np.bool_)
    return anneal(tables, moves, layout, workspace, FREE, 0, 1.0, 1.0, False, contention, unused, never)
