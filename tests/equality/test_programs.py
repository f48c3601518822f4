"""Every program of ``benchmarks.program_cases`` comes out as it must."""

from __future__ import annotations

import pytest

from benchmarks.exactness_check import is_expected
from benchmarks.program_cases import PROGRAMS
from benchmarks.programs import find_missing
from benchmarks.programs_check import CONFIGURATIONS, ProgramChecker


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_comes_out_as_it_must(name: str) -> None:
    """With one micro-batch, four, or one a sample, in turn."""
    program = PROGRAMS[name]
    if missing := find_missing(program):
        pytest.skip(f"it needs {missing}")
    configuration = CONFIGURATIONS[list(PROGRAMS).index(name) % len(CONFIGURATIONS)]
    found = ProgramChecker(program).check(configuration)
    assert is_expected(program, found), f"{configuration}: {found.outcome.value}, {found.detail}"


def test_half_of_all_programs_run_as_jobs() -> None:
    assert len(PROGRAMS) >= 60
    assert sum(program.ranks for program in PROGRAMS.values()) >= len(PROGRAMS) / 2
