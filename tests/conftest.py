"""Settings of all tests: how many examples Hypothesis draws, and which tests share a process of pytest-xdist.

No TensorFlow here: see ``tests.tensorflow_start``.

HYPOTHESIS_PROFILE chooses: ``ci`` (the same few examples every time), ``dev`` (the default) or ``thorough``.
"""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("ci", max_examples=20, derandomize=True, deadline=None)
hypothesis.settings.register_profile("dev", max_examples=40, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=200, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Files outside of tests/dapple_tf/distributed whose tests start jobs.
_STARTS_RANKS = ("test_links.py", "test_processes.py", "test_keras_job.py", "test_keras_examples.py")
# Folders whose tests plan: the planners' code is compiled once, by the process that has the ranks.
_PLAN = ("planner", "autoplan")
# Tests that are slow beside those that are marked so where they are: by node id, a line each.
_SLOW = frozenset((Path(__file__).parent / "slow_tests.txt").read_text().splitlines())


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that start several ranks in one process: two jobs at a time would disturb each other's timing."""
    for item in items:
        if item.nodeid in _SLOW:
            item.add_marker(pytest.mark.slow)
        parts = item.path.parts
        if "distributed" in parts or item.path.name in _STARTS_RANKS or any(folder in parts for folder in _PLAN):
            item.add_marker(pytest.mark.xdist_group("ranks"))
