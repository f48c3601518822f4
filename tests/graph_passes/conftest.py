"""The tests of ``graph_passes`` start no TensorFlow, so they take seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_tensorflow() -> Iterator[None]:
    """Fail a module whose tests import TensorFlow, unless tests of another folder have done so before."""
    before = "tensorflow" in sys.modules
    yield
    assert before or "tensorflow" not in sys.modules
