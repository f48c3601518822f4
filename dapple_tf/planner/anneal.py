"""Simulated annealing over layouts, by random moves, within a number of simulated events."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.layout import (
    Layout,
    LayoutPrice,
    LayoutTables,
    Workspace,
    copy_layout,
    make_layout,
    price_layout,
)
from dapple_tf.planner.layout_contention import price_with_contention
from dapple_tf.planner.layout_moves import deal_devices, draw_share, move_at_random
from dapple_tf.simulator.compiled import Integers, compiled, compiled_part

# What pricing a layout costs beside its simulation, in events.
_EVENTS_OF_A_MOVE, _EVENTS_OF_A_STAGE, _EVENTS_OF_A_DEVICE = 300, 50, 15

# Where the devices of the stages are: anywhere; in the order of the places; each stage on many servers; or the first
# half of the stages each on many servers, and the others in the order of the places.
FREE, IN_ORDER, SCATTERED, HALF_SCATTERED = 0, 1, 2, 3


@compiled
def anneal(
    t: LayoutTables,
    start: Layout,
    w: Workspace,
    placing: int,
    events: int,
    hot: float,
    cold: float,
    hurried: bool,
    contention: bool,
    random: Integers,
    stop: NDArray[np.bool_],
) -> float:
    """Improve ``start`` in place to the best layout met, and return its seconds.

    A move that makes the step longer by a share x is taken with probability exp(-x / temperature). The temperature
    falls from ``hot`` to ``cold`` as ``events`` are used up. ``placing``: FREE, or how devices are dealt to the stages
    after each move, so that their placement is not searched. ``hurried``: see ``price_layout``.
    ``contention``: whether to simulate it. ``random``: see ``draw``. ``stop``: see ``stop_flag``;
    it ends the search after the present move.
    """
    room, devices = len(start.recompute), len(start.owner)
    now, trial = make_layout(room, devices), make_layout(room, devices)
    if placing != FREE:
        _deal(start, placing)
    copy_layout(start, now)
    seconds = _price(t, now, w, np.inf, hurried, contention).seconds
    least, left = seconds, events
    while left > 0 and not stop[0]:
        copy_layout(now, trial)
        left -= _EVENTS_OF_A_MOVE + _EVENTS_OF_A_DEVICE * devices + _EVENTS_OF_A_STAGE * int(now.shape[0])
        if not move_at_random(t.moves, trial, random):
            continue
        if placing != FREE:
            _deal(trial, placing)
        temperature = hot * (cold / hot) ** (1 - left / events)
        ceiling = seconds * (1 - temperature * np.log(draw_share(random) + 1e-12))
        price = _price(t, trial, w, ceiling, hurried, contention)
        left -= price.events
        if price.seconds < ceiling:
            seconds = price.seconds
            copy_layout(trial, now)
            if seconds < least * (1 - 1e-12):
                least = seconds
                copy_layout(now, start)
    return least


@compiled_part
def _deal(layout: Layout, placing: int) -> None:
    """Deal all devices to the stages anew, as many to each as before."""
    stages = layout.shape[0]
    deal_devices(layout, 0, stages, placing == SCATTERED)
    if placing == HALF_SCATTERED:
        deal_devices(layout, 0, (stages - 1) // 2, True)


@compiled_part
def _price(
    t: LayoutTables, layout: Layout, w: Workspace, ceiling: float, hurried: bool, contention: bool
) -> LayoutPrice:
    if contention:
        return price_with_contention(t, layout, w, ceiling, hurried)
    return price_layout(t, layout, w, ceiling, hurried)
