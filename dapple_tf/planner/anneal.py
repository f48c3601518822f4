"""Simulated annealing over layouts, by random moves, within a number of simulated events."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.device_moves import deal_devices
from dapple_tf.planner.draws import draw_share
from dapple_tf.planner.layout import (
    Layout,
    LayoutTables,
    Workspace,
    copy_layout,
    make_layout,
    simulate_layout,
)
from dapple_tf.planner.layout_contention import add_contention
from dapple_tf.planner.layout_moves import move_at_random
from dapple_tf.simulator.compiled import Integers, compiled, compiled_part

# The work of one move beside simulated events, in as many events: of each move, stage and device.
_EVENTS_OF_A_MOVE, _EVENTS_OF_A_STAGE, _EVENTS_OF_A_DEVICE = 300, 50, 15

# Moves in a row that are accepted by an estimate of the contention, not by a simulation of it.
_MOST_ESTIMATES = 3

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
    judge_early: bool,
    contention: bool,
    random: Integers,
    stop: NDArray[np.bool_],
) -> float:
    """Improve ``start`` in place to the best layout met, and return its seconds.

    A move that makes the step longer by a share x is taken with probability exp(-x / temperature). The temperature
    falls from ``hot`` to ``cold`` as ``events`` are used up. ``placing``: FREE, or how devices are dealt to the stages
    after each move, so that their placement is not searched. ``judge_early``: see ``simulate_layout``.
    ``random``: see ``draw``. ``stop``: see ``stop_flag``; it ends the search after the present move.

    ``contention``: whether it counts. Simulating it takes about 25 times as long as the step without it, and hardly
    ever rejects a layout that is fast enough without it. So up to three moves in a row are accepted if the layout is
    fast enough with the contention of the last layout that was simulated: with as large a factor on its seconds. What
    may be the best layout so far is always simulated.
    """
    room, devices = len(start.recompute), len(start.owner)
    now, trial = make_layout(room, devices), make_layout(room, devices)
    if placing != FREE:
        _deal(start, placing)
    copy_layout(start, now)
    alone = simulate_layout(t, now, w, np.inf, judge_early)
    step = add_contention(t, now, w, alone, np.inf, judge_early) if contention else alone
    seconds, factor, estimates = step.seconds, step.seconds / alone.seconds, 0
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
        step = simulate_layout(t, trial, w, ceiling, judge_early)
        left -= step.events
        if step.seconds >= ceiling:
            continue
        if contention:
            alone, estimate = step, step.seconds * factor
            if estimates < _MOST_ESTIMATES and least * (1 - 1e-12) < estimate < ceiling:
                seconds, estimates = estimate, estimates + 1
                copy_layout(trial, now)
                continue
            step = add_contention(t, trial, w, alone, ceiling, judge_early)
            left -= step.events - alone.events
            if step.seconds >= ceiling:
                continue
            factor, estimates = step.seconds / alone.seconds, 0
        seconds = step.seconds
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
