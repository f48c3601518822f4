"""Choose the slow tests by their measured seconds, and the group of tests that one process runs.

``durations.txt`` has the seconds that tests took with ``HYPOTHESIS_PROFILE=ci``. They are processor time of the test's
process and of the processes that it starts, so other programs on the machine do not count. A line names a test or one
case of it, in brackets. The line of a test stands for all its cases that have no line. "?" in place of the seconds
means that the test has not been measured; it then counts as slow. A test without a line takes less than
``LISTED_SECONDS``. Tests that share one launch of a job (fixture ``launches``) have no lines; their marks say which
launches are slow. To measure the tests of some files again::

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
LONE_SECONDS = 0.5  # a test without cases
TEST_SECONDS = 1.5  # the quickest case of a test; of equally quick ones the first by name
CASE_SECONDS = 0.15  # any other case
FILE_SECONDS = 1.1  # the quickest test of a file in which all tests would be slow, so that few files are left out

_UNKNOWN = "?"
# Folders whose tests plan: one process runs them.
_PLAN = ("tests/dapple_tf/planner/", "tests/dapple_tf/autoplan/")


def read_durations() -> dict[str, float]:
    """Return the seconds of ``durations.txt`` by test; infinity where they are not known."""
    rows = (line.split(maxsplit=1) for line in DURATIONS.read_text(encoding="utf-8").splitlines())
    return {test: math.inf if seconds == _UNKNOWN else float(seconds) for seconds, test in rows}


def write_durations(durations: Mapping[str, float]) -> None:
    """Write ``durations.txt``, in the order of names.

    A test has a line if it takes ``LISTED_SECONDS`` or longer, or if there is a line for all cases of the test.
    """
    lines = [
        f"{_UNKNOWN if math.isinf(seconds) else format(seconds, '.1f'):>6} {test}\n"
        for test, seconds in sorted(durations.items())
        if seconds >= LISTED_SECONDS or ("[" in test and function_of(test) in durations)
    ]
    DURATIONS.write_text("".join(lines), encoding="utf-8")


def function_of(test: str) -> str:
    """Return a test's name without the brackets that name the case."""
    return test.partition("[")[0]


def find_slow(tests: Iterable[str], durations: Mapping[str, float]) -> frozenset[str]:
    """Return which of these tests are slow. Give all tests of a file, since they are compared with each other."""
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
    """Return the name of the group of tests that one process runs: "jobs", "plans", or a file.

    Two jobs of several ranks at a time would disturb each other's timing.
    """
    path = _file_of(test)
    if starts_jobs(path):
        return "jobs"
    return "plans" if path.startswith(_PLAN) else path


def _file_of(test: str) -> str:
    """Return the path of a test's file."""
    return test.partition("::")[0]


@cache
def starts_jobs(path: str) -> bool:
    """Return whether a file of tests starts jobs: those need Horovod."""
    return "needs_horovod" in (ROOT / path).read_text(encoding="utf-8")
