"""Simulated annealing over layouts, by random moves, within a number of simulated events."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dapple_tf.planner.device_moves import assign_devices
from dapple_tf.planner.draws import draw_share
from dapple_tf.planner.layout import Layout, MoveTables, copy_layout, make_layout
from dapple_tf.planner.layout_moves import move_at_random
from dapple_tf.planner.layout_simulation import AnyWorkspace, Tables, simulate_alone, simulate_shared
from dapple_tf.simulator.compiled import Integers, compiled, compiled_part

# The work of one move beside simulated events, in as many events: of each move, stage and device.
_EVENTS_OF_A_MOVE, _EVENTS_OF_A_STAGE, _EVENTS_OF_A_DEVICE = 300, 50, 15

# Moves in a row that are accepted by an estimate of the contention, not by a simulation of it.
_MOST_ESTIMATES = 3

# Rules that assign devices to stages. FREE: none, since moves assign them. IN_ORDER: stages take devices in the device
# order. SCATTERED: the devices of each stage are spread evenly over it. HALF_SCATTERED: those of the first half of the
# stages are, and the other stages take devices in order.
FREE, IN_ORDER, SCATTERED, HALF_SCATTERED = 0, 1, 2, 3


@compiled
def anneal(
    t: Tables,
    moves: MoveTables,
    start: Layout,
    w: AnyWorkspace,
    rule: int,
    events: int,
    first_temperature: float,
    last_temperature: float,
    extrapolate: bool,
    contention: bool,
    random: Integers,
    stop: NDArray[np.bool_],
) -> float:
    """Overwrite ``start`` with the fastest layout found, and return its seconds: simulated ones, never an estimate.

    A move that makes the step longer by a fraction x is accepted with probability exp(-x / temperature). The
    temperature falls from ``first_temperature`` to ``last_temperature`` as ``events`` are used up. ``rule``: assigns
    devices to stages after each move, so that the placement is not searched; FREE: the moves do. ``moves``: of the
    tables ``t``. ``extrapolate``: a simulation also stops where its
    steady phase shows that the step will likely be too long. ``random``: see ``draw``. ``stop``: see ``stop_flag``; it
    ends the search after the present move.

    ``contention``: whether it is simulated. That takes about 25 times as long as the step without it, and hardly ever
    rejects a layout that is fast enough without it. So up to three moves in a row are accepted by an estimate: the
    seconds without contention, times the factor that contention had on the last layout simulated with it. A layout
    that may be the fastest so far is always simulated.
    """
    most_stages, devices = len(start.recompute), len(start.owner)
    now, trial = make_layout(most_stages, devices), make_layout(most_stages, devices)
    if rule != FREE:
        _assign(start, rule)
    copy_layout(start, now)
    alone = simulate_alone(t, now, w, np.inf, extrapolate)
    step = simulate_shared(t, now, w, alone, np.inf, extrapolate) if contention else alone
    seconds, factor, estimates = step.seconds, _factor(step.seconds, alone.seconds), 0
    least, left = seconds, events
    while left > 0 and not stop[0]:
        copy_layout(now, trial)
        left -= _EVENTS_OF_A_MOVE + _EVENTS_OF_A_DEVICE * devices + _EVENTS_OF_A_STAGE * int(now.shape[0])
        if not move_at_random(moves, trial, random):
            continue
        if rule != FREE:
            _assign(trial, rule)
        temperature = first_temperature * (last_temperature / first_temperature) ** (1 - left / events)
        ceiling = seconds * (1 - temperature * np.log(draw_share(random) + 1e-12))
        step = simulate_alone(t, trial, w, ceiling, extrapolate)
        left -= step.events
        if step.seconds >= ceiling:
            continue
        if contention:
            alone, estimate = step, step.seconds * factor
            if estimates < _MOST_ESTIMATES and least * (1 - 1e-12) < estimate < ceiling:
                seconds, estimates = estimate, estimates + 1
                copy_layout(trial, now)
                continue
            step = simulate_shared(t, trial, w, alone, ceiling, extrapolate)
            left -= step.events - alone.events
            if step.seconds >= ceiling:
                continue
            factor, estimates = _factor(step.seconds, alone.seconds), 0
        seconds = step.seconds
        copy_layout(trial, now)
        if seconds < least * (1 - 1e-12):
            least = seconds
            copy_layout(now, start)
    return least


@compiled_part
def _factor(shared: float, alone: float) -> float:
    """Return how many times longer a step takes with contention; 1 for a step of no seconds."""
    return shared / alone if alone > 0 else 1.0


@compiled_part
def _assign(layout: Layout, rule: int) -> None:
    """Assign all devices to the stages again by a rule, as many to each as before."""
    stages = layout.shape[0]
    assign_devices(layout, 0, stages, rule == SCATTERED)
    if rule == HALF_SCATTERED:
        assign_devices(layout, 0, (stages - 1) // 2, True)
