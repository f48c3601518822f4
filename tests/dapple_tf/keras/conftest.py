"""All models here are float64: the pipeline and plain Keras differ by rounding only."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    keras.backend.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # else layers keep the policy of the first that the process has made
    yield
    keras.backend.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
