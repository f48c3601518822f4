"""Packages that some tests need and the extra ``test`` does not install."""

from __future__ import annotations

import importlib.util

import pytest

# Its requirement tensorflow-text would install a second TensorFlow over tensorflow-cpu.
needs_keras_hub = pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None, reason="keras_hub is not installed: pip install keras-hub"
)

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed: pip install tensorboard"
)
