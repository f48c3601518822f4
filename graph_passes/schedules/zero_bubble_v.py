"""ZB-V: no bubble at the memory of 1F1B, with two stages per worker in the shape of a V.

Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (V-ZB), and "Zero Bubble Pipeline Parallelism", 2023,
section 6. Worker w of p has the stages w and 2 p - 1 - w. With stages whose F, I and W take equally long, and
M >= 2 p - 1, no worker waits between its first and last action; each holds 2 p stashes, which is the stash of p
micro-batches on all of its layers, as on the first worker of 1F1B.
"""

from __future__ import annotations

from graph_passes.schedules.call_sequence import CallSequence
from graph_passes.schedules.schedule import Action, Kind, Schedule
from graph_passes.schedules.v_shaped import v_shaped


def zero_bubble_v(workers: int, micro_batches: int) -> Schedule:
    """Return the schedule of ``workers`` devices with two stages each.

    Of fewer than 2 p - 1 micro-batches the order is that of 2 p - 1, without those that are missing.
    """
    return v_shaped(workers, micro_batches, 2 * workers - 1, _row)


def _row(workers: int, worker: int, stages: tuple[int, ...], micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of a worker with the stages ``down`` the V and ``up`` again, for M >= 2 p - 1."""
    down, up = stages
    onwards = workers - worker  # the workers from this one to the last, at which the V turns
    later = micro_batches - workers  # forwards of ``up`` behind the first p
    calls = CallSequence()
    calls.repeat(2 * onwards - 1, (down, "F"))
    calls.repeat(worker, (up, "F"), (down, "F"))
    calls.repeat(onwards, (up, "F"), (up, "I"), (up, "W"))
    whole: tuple[tuple[int, Kind], ...] = (down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W")
    calls.repeat(later - onwards + 1, (down, "F"), *whole)
    calls.repeat(onwards - 1, *whole)
    calls.repeat(worker, (down, "I"), (up, "I"))
    calls.repeat(onwards, (down, "I"), (down, "W"))
    calls.append_remaining_weights()
    return tuple(calls.actions)
