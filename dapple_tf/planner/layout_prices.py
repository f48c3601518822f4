"""One name for the prices of layouts on equal devices and on devices of different kinds, chosen by the tables' type."""

from __future__ import annotations

from typing import Any

from numba.extending import overload

from dapple_tf.planner.layout import Layout, LayoutPrice, LayoutTables, Workspace, price_layout
from dapple_tf.planner.layout_contention import add_contention_of_equals
from dapple_tf.planner.unequal_layout import (
    UnequalTables,
    UnequalWorkspace,
    add_unequal_contention,
    price_unequal,
)
from dapple_tf.simulator.compiled import compiled

Tables = LayoutTables | UnequalTables
AnyWorkspace = Workspace | UnequalWorkspace


def price_alone(t: Tables, layout: Layout, w: AnyWorkspace, ceiling: float, judge_early: bool) -> LayoutPrice:
    """Return the price of a layout without contention, in compiled code: ``price_layout`` or ``price_unequal``."""
    raise TypeError("only compiled code can call this")


def price_shared(
    t: Tables, layout: Layout, w: AnyWorkspace, alone: LayoutPrice, ceiling: float, judge_early: bool
) -> LayoutPrice:
    """Return the price with contention of a layout priced last without it, ``alone``, in compiled code."""
    raise TypeError("only compiled code can call this")


@overload(price_alone, strict=False)  # strict compares annotations, too, and the lambda has none
def _choose_alone(t: Any, layout: Any, w: Any, ceiling: Any, judge_early: Any) -> Any:
    chosen = price_unequal if t.instance_class is UnequalTables else price_layout
    return lambda t, layout, w, ceiling, judge_early: chosen(t, layout, w, ceiling, judge_early)


@overload(price_shared, strict=False)
def _choose_shared(t: Any, layout: Any, w: Any, alone: Any, ceiling: Any, judge_early: Any) -> Any:
    chosen = add_unequal_contention if t.instance_class is UnequalTables else add_contention_of_equals
    return lambda t, layout, w, alone, ceiling, judge_early: chosen(t, layout, w, alone, ceiling, judge_early)


@compiled
def price(
    t: Tables, layout: Layout, w: AnyWorkspace, ceiling: float, judge_early: bool, contention: bool
) -> LayoutPrice:
    """Return the price of a layout; see ``price_layout`` and, with ``contention``, ``add_contention``."""
    alone = price_alone(t, layout, w, ceiling, judge_early)
    if not contention:
        return alone
    return price_shared(t, layout, w, alone, ceiling, judge_early)
