"""How many examples Hypothesis draws, for all tests. No TensorFlow here: see ``tests.tensorflow_start``.

HYPOTHESIS_PROFILE chooses: ``ci`` (the same few examples every time), ``dev`` (the default) or ``thorough``.
"""

from __future__ import annotations

import os

import hypothesis

hypothesis.settings.register_profile("ci", max_examples=20, derandomize=True, deadline=None)
hypothesis.settings.register_profile("dev", max_examples=40, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=200, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
