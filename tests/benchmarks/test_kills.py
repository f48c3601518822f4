"""The benchmark of killed jobs: its choice of signals, and the ends that it counts as wrong; no job is started."""

from __future__ import annotations

import random

import pytest

from benchmarks.killed_jobs import LAYOUTS, Ended, Kill
from benchmarks.kills import _choose, _find_problems

KILL = Kill("KILL", 1, 3.0)
NAMED = "dapple: rank 0 (stage 0) stops: rank 1 (stage 1), in step 3, was killed"


@pytest.mark.parametrize(
    ("ended", "kill", "problems"),
    [
        (Ended(1, 2.0, (), NAMED), KILL, []),
        (Ended(137, 2.0, (), "mpirun noticed that process rank 1 with PID 0 on node a exited"), KILL, []),
        (Ended(1, 2.0, (), "Process name: [[1,1],1]\nExit code: 1"), KILL, []),
        (Ended(1, 2.0, (), "rank 0 stops"), KILL, ["NOT NAMED"]),
        (Ended(1, 2.0, (), "rank 10 stops"), KILL, ["NOT NAMED"]),
        (Ended(None, 60.0, (), NAMED), KILL, ["HUNG, or left processes"]),
        (Ended(1, 60.0, (), NAMED), KILL, ["TOO LATE"]),
        (Ended(0, 2.0, (), NAMED), KILL, ["ended well without a result"]),
        (Ended(0, 2.0, (0.5,), ""), KILL, []),
        (Ended(1, 2.0, (), ""), Kill("INT", None, 3.0), []),
    ],
)
def test_a_wrong_end_is_noticed(ended: Ended, kill: Kill, problems: list[str]) -> None:
    assert _find_problems(ended, kill) == problems


def test_kills_are_of_all_kinds_and_a_launcher_is_not_stopped() -> None:
    """A launcher that is stopped does not end before it goes on."""
    numbers = random.Random(0)
    found = [_choose(numbers, 4, 20.0) for _ in range(400)]
    assert {kill.rank for kill in found} == {None, 0, 1, 2, 3}
    assert {kill.name for kill in found if kill.rank is not None} == {"KILL", "STOP", "TERM", "INT"}
    assert {kill.name for kill in found if kill.rank is None} == {"KILL", "TERM", "INT"}
    assert all(0 <= kill.seconds <= 20 for kill in found)
    assert str(Kill("INT", None, 3.0)) == "INT to the launcher after 3.0 s"


def test_a_layout_has_its_number_of_ranks() -> None:
    for ranks, layouts in LAYOUTS.items():
        assert all(sum(map(int, layout.split(","))) == ranks for layout in layouts)
