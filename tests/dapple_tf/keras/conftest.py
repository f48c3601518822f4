"""All models here are float64."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def always_float64(float64: None) -> None:
    """Use the fixture in every test."""
