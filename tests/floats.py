"""Layers, losses and metrics that name no dtype compute in float64: rounding alone tells results apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import pytest


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    floats, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # else layers keep the policy of the first that the process has made
    try:
        yield
    finally:
        keras.config.set_floatx(floats)
        keras.config.set_dtype_policy(policy)


@pytest.fixture
def float64() -> Iterator[None]:
    with in_float64():
        yield
