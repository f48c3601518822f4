"""A progress bar on stderr for profiling."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

ShowProgress = Callable[[str, int], None]
"""Shows the current activity, and advances the bar by a number of steps."""


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[ShowProgress]:
    """Show a bar of ``total`` steps during the block, if stderr is a terminal."""
    console = Console(file=sys.stderr)
    columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("profiling", total=total)

        def show(activity: str, steps: int) -> None:
            bar.update(task, advance=steps, description=f"profiling: {activity}")

        yield show
