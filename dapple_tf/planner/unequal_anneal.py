"""Simulated annealing over layouts on devices of different kinds, by the moves of ``layout_moves``."""

from __future__ import annotations

import numpy as np

from dapple_tf.planner.anneal import FREE
from dapple_tf.planner.layout import Layout, copy_layout, make_layout
from dapple_tf.planner.layout_moves import deal_devices, draw_share, move_at_random
from dapple_tf.planner.unequal_layout import UnequalTables, UnequalWorkspace, price_unequal
from dapple_tf.simulator.compiled import Integers, compiled

# What pricing a layout costs beside its simulation, in events.
_EVENTS_OF_A_MOVE, _EVENTS_OF_A_STAGE, _EVENTS_OF_A_DEVICE = 300, 80, 15


@compiled
def anneal_unequal(
    t: UnequalTables,
    start: Layout,
    w: UnequalWorkspace,
    placing: int,
    events: int,
    hot: float,
    cold: float,
    contention: bool,
    random: Integers,
) -> float:
    """Improve ``start`` in place to the best layout met, and return its seconds; see ``anneal.anneal``.

    ``placing``: FREE, or IN_ORDER, where devices are dealt to the stages in the order of the places after each move.
    """
    room, devices = len(start.recompute), len(start.owner)
    now, trial = make_layout(room, devices), make_layout(room, devices)
    if placing != FREE:
        deal_devices(start, 0, start.shape[0], False)
    copy_layout(start, now)
    seconds = price_unequal(t, now, w, np.inf, True, contention).seconds
    least, left = seconds, events
    while left > 0:
        copy_layout(now, trial)
        left -= _EVENTS_OF_A_MOVE + _EVENTS_OF_A_DEVICE * devices + _EVENTS_OF_A_STAGE * int(now.shape[0])
        if not move_at_random(t.layout.moves, trial, random):
            continue
        if placing != FREE:
            deal_devices(trial, 0, trial.shape[0], False)
        temperature = hot * (cold / hot) ** (1 - left / events)
        ceiling = seconds * (1 - temperature * np.log(draw_share(random) + 1e-12))
        price = price_unequal(t, trial, w, ceiling, True, contention)
        left -= price.events
        if price.seconds < ceiling:
            seconds = price.seconds
            copy_layout(trial, now)
            if seconds < least * (1 - 1e-12):
                least = seconds
                copy_layout(now, start)
    return least
