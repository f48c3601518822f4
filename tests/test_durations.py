"""The durations of tests choose the slow ones, and name tests that exist."""

from __future__ import annotations

import ast
import math

import pytest

from tests.durations import (
    CASE_SECONDS,
    FILE_SECONDS,
    LONE_SECONDS,
    TEST_SECONDS,
    find_slow,
    group_of,
    read_durations,
)
from tests.paths import ROOT

DURATIONS = read_durations()


@pytest.mark.parametrize("path", sorted({test.partition("::")[0] for test in DURATIONS}))
def test_every_listed_test_is_in_its_file(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    listed = {test.partition("::")[2].partition("[")[0] for test in DURATIONS if test.startswith(f"{path}::")}
    assert listed <= functions


def test_of_the_long_cases_of_a_test_the_quickest_is_not_slow() -> None:
    long = CASE_SECONDS + 0.1
    durations = {"a.py::test_a[1]": long, "a.py::test_a[2]": long + 0.1, "a.py::test_b": long}
    assert find_slow(durations, durations) == {"a.py::test_a[2]"}


def test_of_long_cases_that_take_equally_long_one_is_not_slow() -> None:
    durations = dict.fromkeys(["a.py::test_a[2]", "a.py::test_a[1]", "a.py::test_a[3]"], CASE_SECONDS + 0.1)
    assert find_slow(durations, durations) == {"a.py::test_a[2]", "a.py::test_a[3]"}


def test_a_long_case_is_slow_where_a_case_without_a_line_is_quicker() -> None:
    durations = {"a.py::test_a[1]": CASE_SECONDS + 0.5}
    assert find_slow(["a.py::test_a[1]", "a.py::test_a[2]"], durations) == {"a.py::test_a[1]"}


def test_a_test_that_takes_too_long_is_slow_though_it_is_alone() -> None:
    durations = {"a.py::test_a": LONE_SECONDS + 0.1, "a.py::test_b": LONE_SECONDS - 0.1}
    assert find_slow(durations, durations) == {"a.py::test_a"}


def test_a_case_that_takes_too_long_is_slow_though_it_is_the_quickest() -> None:
    durations = {"a.py::test_a[1]": TEST_SECONDS - 0.1, "a.py::test_b[1]": TEST_SECONDS + 0.1}
    assert find_slow(durations, durations) == {"a.py::test_b[1]"}


def test_of_a_file_of_long_tests_the_quickest_is_not_slow() -> None:
    long = FILE_SECONDS - 0.1
    durations = {"a.py::test_a": long + 0.05, "a.py::test_b": long, "b.py::test_a": FILE_SECONDS + 0.1}
    assert find_slow(durations, durations) == {"a.py::test_a", "b.py::test_a"}


def test_what_was_not_measured_is_slow() -> None:
    tests = ["a.py::test_a[1]", "a.py::test_a[2]"]
    assert find_slow(tests, {"a.py::test_a": math.inf, "a.py::test_a[1]": 0.1}) == {"a.py::test_a[2]"}


def test_only_tests_of_shared_launches_are_marked_slow_by_hand() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py")}
    marked = [path for path, text in texts.items() if "pytest.mark." + "slow" in text]
    assert all("launches: Launches" in texts[path] for path in marked), marked


def test_all_tests_that_start_jobs_are_of_one_group() -> None:
    assert group_of("tests/dapple_tf/distributed/test_failing_ranks.py::test_a") == "jobs"
    assert group_of("tests/dapple_tf/keras/test_keras_job.py::test_a") == "jobs"
    assert (
        group_of("tests/dapple_tf/distributed/test_digest.py::test_a") == "tests/dapple_tf/distributed/test_digest.py"
    )
    assert group_of("tests/dapple_tf/planner/test_best.py::test_a") == "plans"
