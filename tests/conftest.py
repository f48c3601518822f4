"""Settings of all tests: how many examples Hypothesis draws, and which tests share a process of pytest-xdist.

No TensorFlow here: see ``tests.tensorflow_start``.

HYPOTHESIS_PROFILE chooses: ``ci`` (the same few examples every time), ``dev`` (the default) or ``thorough``.
"""

from __future__ import annotations

import os

import hypothesis
import pytest

hypothesis.settings.register_profile("ci", max_examples=20, derandomize=True, deadline=None)
hypothesis.settings.register_profile("dev", max_examples=40, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=200, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Files outside of tests/dapple_tf/distributed whose tests start jobs.
_STARTS_RANKS = ("test_links.py", "test_processes.py", "test_keras_job.py", "test_keras_examples.py")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that start several ranks in one process: two jobs at a time would disturb each other's timing."""
    for item in items:
        if "distributed" in item.path.parts or item.path.name in _STARTS_RANKS:
            item.add_marker(pytest.mark.xdist_group("ranks"))
