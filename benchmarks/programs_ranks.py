"""The programs of ``benchmarks.programs`` as jobs of two processes.

``python -m benchmarks.programs_ranks FILE NAME ...`` is a rank: rank 0 appends a line of JSON for each program to FILE.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.exactness_check import Found
from benchmarks.exactness_ranks import check_as_rank, run_jobs
from benchmarks.program_cases import PROGRAMS
from benchmarks.program_cases.program import Program
from benchmarks.programs_check import FEW, ProgramChecker


def check_on_ranks(programs: Sequence[Program]) -> Iterator[tuple[Program, list[Found]]]:
    """Yield each program with its outcome."""
    yield from run_jobs("benchmarks.programs_ranks", programs, [FEW])


def _check(name: str, job: Any) -> list[Found]:
    folder = Path(sys.argv[1]).parent / name
    folder.mkdir(exist_ok=True)
    return [ProgramChecker(PROGRAMS[name]).check(FEW, job, folder)]


if __name__ == "__main__":
    check_as_rank(sys.argv[1], sys.argv[2:], _check)
