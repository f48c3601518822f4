"""What every test starts from: eight logical devices, and how many examples Hypothesis draws.

HYPOTHESIS_PROFILE chooses: ``ci`` (the same few examples every time), ``dev`` (the default) or ``thorough``.
"""

from __future__ import annotations

import os

import hypothesis

import dapple_tf as dapple

dapple.init(8)  # before TensorFlow starts, which any other test module may cause

hypothesis.settings.register_profile("ci", max_examples=20, derandomize=True, deadline=None)
hypothesis.settings.register_profile("dev", max_examples=40, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=200, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
