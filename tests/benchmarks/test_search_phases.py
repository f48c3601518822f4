"""The phases that ``python -m benchmarks search_phases`` takes out of planner "best" are still in its source."""

from __future__ import annotations

import pytest

from benchmarks.search_phases import PHASES
from tests.paths import ROOT


@pytest.mark.parametrize("phase", PHASES)
def test_the_text_of_a_phase_stands_once_in_its_file(phase: str) -> None:
    name, old, new = PHASES[phase]
    assert (ROOT / "dapple_tf" / name).read_text(encoding="utf-8").count(old) == 1
    assert old != new
