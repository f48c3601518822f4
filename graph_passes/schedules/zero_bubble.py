"""ZB-H1: weight gradients fill the bubble, at the memory of 1F1B (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).

A stage passes the gradient of its inputs on as soon as it can, and makes those of its weights up to d_i micro-batches
later: a stage near the end, which ends its warm-up early and holds few micro-batches, may put off more of them, and
fills with them the time in which it would wait for the last backwards. With equal stages, M >= S, and a T_W that is
neither above T_F nor above T_B, the bubble is (S - 1) (T_F + T_B - T_W), in place of 1F1B's (S - 1) (T_F + T_B + T_W).
"""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.errors import ScheduleError
from graph_passes.schedules.schedule import Action, Schedule, check


def zero_bubble(warm: Sequence[int], micro_batches: int, limit: int | None = None) -> Schedule:
    """K_i forwards, then a backward, the weights of d_i micro-batches before and a forward in turn, then what is left.

    ``limit``: D, the most micro-batches that a stage holds (F has run, W has not), S by default: d_i = min(i, D - K_i).
    Raises ScheduleError for a K_i out of range, or above D.
    """
    held = len(warm) if limit is None else limit
    stages = []
    for stage, k in enumerate(warm):
        if not 1 <= k <= min(micro_batches, held):
            raise ScheduleError(f"K_{stage} = {k} is not between 1 and M = {micro_batches} and D = {held}")
        delay = min(stage, held - k)
        actions = [Action(stage, "F", m) for m in range(k)]
        for m in range(micro_batches):
            actions.append(Action(stage, "B", m))
            if m >= delay:
                actions.append(Action(stage, "W", m - delay))
            if k + m < micro_batches:
                actions.append(Action(stage, "F", k + m))
        actions += [Action(stage, "W", m) for m in range(max(0, micro_batches - delay), micro_batches)]
        stages.append(tuple(actions))
    schedule = Schedule(tuple(stages))
    check(schedule)
    return schedule
