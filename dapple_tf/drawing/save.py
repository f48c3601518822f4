"""Save a chart in the format that the file's suffix names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dapple_tf.drawing.chart import Chart
from dapple_tf.drawing.html import make_page
from dapple_tf.drawing.png import draw
from dapple_tf.drawing.trace import trace_events
from dapple_tf.errors import OutputError
from dapple_tf.profiler.files import atomic_replacement, find_write_problem, write_atomically

_SUFFIXES = (".png", ".html", ".json")


def check_path(path: str | os.PathLike[str], content: str = "a timeline") -> Path:
    """Return the path. Raises OutputError if ``content`` cannot be saved there: call it before any work is done."""
    target = Path(path)
    if os.fspath(path) and target.suffix.lower() not in _SUFFIXES:
        raise OutputError(f"{target}: {content} is saved as {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}")
    if problem := find_write_problem(path):
        raise OutputError(problem)
    return target


def save_chart(
    chart: Chart, path: str | os.PathLike[str], trace: Callable[[], Mapping[str, Any]] | None = None
) -> None:
    """Save a picture (.png), a web page (.html), or a trace for chrome://tracing and Perfetto (.json).

    An existing file is replaced, or left as it was if saving fails. ``trace``: returns the JSON values of a trace that
    shows more than the picture, by default those of ``trace_events``. Raises OutputError for another suffix or a path
    that cannot be written.
    """
    target = check_path(path)
    match target.suffix.lower():
        case ".json":
            write_atomically(target, json.dumps(trace_events(chart) if trace is None else trace()))
        case ".html":
            write_atomically(target, make_page(chart))
        case _:
            with atomic_replacement(target) as part:
                draw(chart, part)
