"""Tables and ranges of numbers as plain text."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

_UNLIMITED = 10_000  # characters: no table is as wide


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0, width: int | None = None
) -> list[str]:
    """Return the lines of a table: the header, then the rows, in columns two spaces apart.

    The first ``left`` columns are aligned left, the others right. ``width``: characters of a line; cells of the widest
    columns are wrapped where the table has more. By default no cell is wrapped.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    console = Console(
        file=text, width=width or _UNLIMITED, force_terminal=False, markup=False, highlight=False, emoji=False
    )
    console.print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def format_ranges(numbers: Sequence[int]) -> str:
    """Return the numbers with consecutive ones joined: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
