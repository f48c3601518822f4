"""These tests need TensorFlow."""

from __future__ import annotations

import tests.tensorflow_start  # noqa: F401 - imported to start TensorFlow
from tests.floats import float64  # noqa: F401 - a fixture
