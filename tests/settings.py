"""Settings of Hypothesis for single tests."""

from __future__ import annotations

import hypothesis

_THOROUGH = 200  # examples of the profile of that name; see conftest.py

by_the_paper = hypothesis.settings(
    max_examples=300
    if hypothesis.settings.default.max_examples >= _THOROUGH
    else hypothesis.settings.default.max_examples
)
"""A planner against its paper's statements: 300 examples where tests are thorough."""
