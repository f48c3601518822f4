"""Decide from measured seconds which tests are slow, and divide tests into groups, each for one process.

``durations.txt`` has the seconds that tests took with ``HYPOTHESIS_PROFILE=ci``: processor time of the test's process
and of its child processes, so the load of the machine matters little. Each line has the seconds and a test's name. A
parametrized test has several cases; a name with brackets is one case, and a name without them stands for all cases
that have no line of their own. "?" in place of the seconds means that the test was not measured; it counts as slow. A
test without a line takes less than ``LISTED_SECONDS``. Tests that use a job that is launched once for several tests
(fixture ``launches``) have no lines: they are marked ``slow`` by hand. To measure the tests of some files again::

    HYPOTHESIS_PROFILE=ci .venv/bin/python -m pytest --record-durations FILES
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache

from tests.paths import ROOT

DURATIONS = ROOT / "tests" / "durations.txt"

LISTED_SECONDS = 0.15
# A test is slow if it takes more than these seconds.
LONE_SECONDS = 0.5  # a test that is not parametrized
TEST_SECONDS = 1.5  # the quickest case of a parametrized test; of equally quick ones the first by name
CASE_SECONDS = 0.15  # any other case
FILE_SECONDS = 1.1  # the quickest test of a file in which all tests would be slow: so most files have a test that runs

_UNKNOWN = "?"
# Folders whose tests run planners: one process runs all of them.
_PLANNER_FOLDERS = ("tests/dapple_tf/planner/", "tests/dapple_tf/autoplan/")


def read_durations() -> dict[str, float]:
    """Return the seconds in ``durations.txt`` by test; infinity for tests that were not measured."""
    rows = (line.split(maxsplit=1) for line in DURATIONS.read_text(encoding="utf-8").splitlines())
    return {test: math.inf if seconds == _UNKNOWN else float(seconds) for seconds, test in rows}


def write_durations(durations: Mapping[str, float]) -> None:
    """Write ``durations.txt``, sorted by name.

    Tests that take less than ``LISTED_SECONDS`` are left out, except for cases whose test has a line for all its cases.
    """
    lines = [
        f"{_UNKNOWN if math.isinf(seconds) else format(seconds, '.1f'):>6} {test}\n"
        for test, seconds in sorted(durations.items())
        if seconds >= LISTED_SECONDS or ("[" in test and function_of(test) in durations)
    ]
    DURATIONS.write_text("".join(lines), encoding="utf-8")


def function_of(test: str) -> str:
    """Return the name of a case without its brackets, which is the name of the test."""
    return test.partition("[")[0]


def find_slow(tests: Iterable[str], durations: Mapping[str, float]) -> frozenset[str]:
    """Return the slow ones of these tests. Pass all tests of a file together, since they are compared."""
    seconds = {test: seconds_of(test, durations) for test in tests}
    by_seconds = sorted(seconds, key=lambda test: (seconds[test], test))
    quickest: dict[str, str] = {}
    for test in by_seconds:
        quickest.setdefault(function_of(test), test)
    slow = {
        test
        for test, taken in seconds.items()
        if taken > (TEST_SECONDS if "[" in test else LONE_SECONDS)
        or (taken > CASE_SECONDS and test != quickest[function_of(test)])
    }
    of_files: defaultdict[str, list[str]] = defaultdict(list)
    for test in by_seconds:
        of_files[_file_of(test)].append(test)
    for of_file in of_files.values():
        if slow.issuperset(of_file) and seconds[of_file[0]] <= FILE_SECONDS:
            slow.remove(of_file[0])
    return frozenset(slow)


def seconds_of(test: str, durations: Mapping[str, float]) -> float:
    """Return the seconds that a test takes; 0 if it has no line."""
    return durations.get(test, durations.get(function_of(test), 0.0))


def group_of(test: str) -> str:
    """Return the name of a test's group, whose tests all run in one process: "jobs", "plans", or the test's file.

    Tests that start jobs are one group, since jobs that run at the same time would disturb each other's timing.
    """
    path = _file_of(test)
    if starts_jobs(path):
        return "jobs"
    return "plans" if path.startswith(_PLANNER_FOLDERS) else path


def _file_of(test: str) -> str:
    """Return the path of a test's file."""
    return test.partition("::")[0]


@cache
def starts_jobs(path: str) -> bool:
    """Return whether the tests of a file start jobs: the file then has the mark ``needs_horovod``."""
    return "needs_horovod" in (ROOT / path).read_text(encoding="utf-8")
