"""Schedules in which some results travel together, drawn at random."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import strategies as st

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action, Schedule, check


@st.composite
def marked(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """``schedule`` with some of the marks ``+`` that it may have."""

    def is_valid(marks: Collection[Action]) -> bool:
        try:
            check(Schedule(schedule.workers, frozenset(marks)))
        except ScheduleError:
            return False
        return True

    possible = [action for actions in schedule.workers for action in actions if is_valid([action])]
    marks = [action for action in possible if draw(st.booleans())]
    return Schedule(schedule.workers, frozenset(marks)) if is_valid(marks) else schedule
