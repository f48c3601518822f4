"""These tests need TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest

import tests.tensorflow_start  # noqa: F401 - imported to start TensorFlow


@pytest.fixture
def float64() -> Iterator[None]:
    """Layers, losses and metrics that name no dtype compute in float64."""
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_dtype_policy("float64")
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
