"""Whole programs in the manner of public ones, by theme; ``benchmarks.programs`` compares each with plain Keras."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from benchmarks.program_cases import (
    generative,
    representation,
    science,
    sequences,
    tables,
    text,
    training,
    vision,
)
from benchmarks.program_cases.program import Program

_THEMES = (text, sequences, vision, tables, generative, representation, science, training)


def _by_name() -> dict[str, Program]:
    found: dict[str, Program] = {}
    for program in itertools.chain.from_iterable(module.PROGRAMS for module in _THEMES):
        assert program.name not in found, f"two programs are called {program.name}"
        found[program.name] = program
    return found


PROGRAMS: Mapping[str, Program] = _by_name()
"""Every program by its name."""
