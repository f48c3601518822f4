"""One name for the simulation of layouts on equal devices and on devices of different kinds, by the tables' type."""

from __future__ import annotations

from typing import Any

from numba.extending import overload

from dapple_tf.planner.layout import Layout, LayoutStep, LayoutTables, Workspace, simulate_layout
from dapple_tf.planner.layout_contention import add_contention_of_equals
from dapple_tf.planner.unequal_layout import (
    UnequalTables,
    UnequalWorkspace,
    add_unequal_contention,
    simulate_unequal,
)

Tables = LayoutTables | UnequalTables
AnyWorkspace = Workspace | UnequalWorkspace


def simulate_alone(t: Tables, layout: Layout, w: AnyWorkspace, ceiling: float, extrapolate: bool) -> LayoutStep:
    """Return the step of a layout without contention, in compiled code: ``simulate_layout`` or ``simulate_unequal``."""
    raise TypeError("only compiled code can call this")


def simulate_shared(
    t: Tables, layout: Layout, w: AnyWorkspace, alone: LayoutStep, ceiling: float, extrapolate: bool
) -> LayoutStep:
    """Return the step with contention of a layout simulated last without it, ``alone``, in compiled code."""
    raise TypeError("only compiled code can call this")


@overload(simulate_alone, strict=False)  # strict compares annotations, too, and the lambda has none
def _choose_alone(t: Any, layout: Any, w: Any, ceiling: Any, extrapolate: Any) -> Any:
    chosen = simulate_unequal if t.instance_class is UnequalTables else simulate_layout
    return lambda t, layout, w, ceiling, extrapolate: chosen(t, layout, w, ceiling, extrapolate)


@overload(simulate_shared, strict=False)
def _choose_shared(t: Any, layout: Any, w: Any, alone: Any, ceiling: Any, extrapolate: Any) -> Any:
    chosen = add_unequal_contention if t.instance_class is UnequalTables else add_contention_of_equals
    return lambda t, layout, w, alone, ceiling, extrapolate: chosen(t, layout, w, alone, ceiling, extrapolate)
