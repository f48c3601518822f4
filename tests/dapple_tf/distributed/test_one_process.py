"""Under pytest-xdist the tests that start jobs run in one process, so that no two jobs disturb each other."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="all tests run in this process")
def test_pytest_xdist_knows_the_group_of_this_folder(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@ranks"), "this version of pytest-xdist does not work with this pytest"
