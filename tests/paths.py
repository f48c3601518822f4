"""Folders that tests read: the project's root, and the published profiles beside a workplace's checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED_PROFILES = ROOT.parent / "shared" / "profiles"
SHARED_PLANNER_CASES = SHARED_PROFILES.parent / "planner-cases"
"""Problems with a plan that an older planner "best" did not find; not part of the project."""
