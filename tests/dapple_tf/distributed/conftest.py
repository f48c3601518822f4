"""Fixtures of tests that start jobs of several ranks."""

from __future__ import annotations

import pytest

from tests.dapple_tf.distributed.launches import Launches


@pytest.fixture(scope="session")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """The launches of this session, each run at its first use."""
    return Launches(tmp_path_factory.mktemp("jobs"))
