"""Plain text tables of figures."""

from __future__ import annotations

from collections.abc import Sequence


def format_megabytes(count: float) -> str:
    """Bytes in millions, with as many digits as say something: ``0.02``, ``3.1``, ``412``."""
    value = count / 1e6
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, their cells right-aligned in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
