"""Schedules as text: ``0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1``, a worker a line or between semicolons.

``0F0+`` stands for an action whose result travels with that of the next one.
"""

from __future__ import annotations

import itertools
import re
from functools import lru_cache

from graph_passes.errors import ScheduleError
from graph_passes.schedules.schedule import CALL_OF_KIND, Action, Kind, Schedule, check, read_old_splits

LONGEST_NUMBER = 9
"""Digits of a number in the text or name of a schedule."""

_ACTION = re.compile(rf"(\d{{1,{LONGEST_NUMBER}}})([FBIW])(\d{{1,{LONGEST_NUMBER}}})(\+?)")
_KINDS: dict[str, Kind] = {kind: kind for kind in CALL_OF_KIND}


def is_text(schedule: str) -> bool:
    """Return whether this is the text of a schedule (perhaps an invalid one) and not a name: it has an action."""
    return any(_ACTION.fullmatch(word) for word in re.split(r"[\s;]+", schedule))


@lru_cache(maxsize=4)  # one text is read and checked in many places
def parse_schedule(text: str) -> Schedule:
    """Return the schedule that ``str(schedule)`` printed; empty lines are skipped.

    A B beside a W of the same stage and micro-batch is read as I: texts of earlier versions write it so.

    Raises ScheduleError that names the word, the stage or the worker that is wrong, or shows the deadlock.
    """
    workers: list[tuple[Action, ...]] = []
    together: set[Action] = set()
    for line in filter(None, map(str.strip, re.split(r"[\n;]", text))):
        actions, marks = [], []
        for word in line.split():
            match = _ACTION.fullmatch(word)
            if not match:
                raise ScheduleError(f"{word[:60]!r} is not an action such as 2F0")
            actions.append(Action(int(match[1]), _KINDS[match[2]], int(match[3])))
            marks.append(match[4])
        workers.append(read_old_splits(actions))
        together.update(itertools.compress(workers[-1], marks))
    schedule = Schedule(tuple(workers), frozenset(together))
    check(schedule)
    return schedule
