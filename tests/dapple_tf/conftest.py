"""These tests need TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest

import tests.tensorflow_start  # noqa: F401 - imported to start TensorFlow


@pytest.fixture
def float64() -> Iterator[None]:
    """All models are float64: the pipeline and plain Keras differ by rounding only."""
    keras.backend.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # else layers keep the policy of the first that the process has made
    yield
    keras.backend.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
