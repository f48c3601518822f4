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


def save_chart(chart: Chart, path: str | os.PathLike[str], data: Callable[[], Mapping[str, Any]] | None = None) -> None:
    """Save a picture (.png), a web page (.html), or a trace for chrome://tracing and Perfetto (.json).

    An existing file is replaced, or left as it was if saving fails. ``data``: returns the JSON values that a trace
    holds in its field ``dapple``, which the viewers ignore; it is called for a trace only. Raises OutputError for
    another suffix or a path that cannot be written.
    """
    target = check_path(path)
    match target.suffix.lower():
        case ".json":
            extra = {} if data is None else {"dapple": data()}
            write_atomically(target, json.dumps({**trace_events(chart), **extra}))
        case ".html":
            write_atomically(target, make_page(chart))
        case _:
            with atomic_replacement(target) as part:
                draw(chart, part)


# --- Charts in the Chrome trace format, which Perfetto reads too


def trace_events(chart: Chart) -> dict[str, Any]:
    """Return the trace: processes ``stages`` and ``network`` with a thread for each row, and memory as counters.

    Times are microseconds. Each group of rows has processes of its own, such as ``measured: stages``.
    """
    events: list[dict[str, Any]] = []
    processes: dict[str, int] = {}
    groups = list(dict.fromkeys(row.group for row in chart.rows))
    for group in groups:
        for name in ("stages", "network"):
            if any((row.group, row.network) == (group, name == "network") for row in chart.rows):
                processes[_process(group, network=name == "network")] = len(processes)
    for name, pid in processes.items():
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
    pids = [processes[_process(row.group, network=row.network)] for row in chart.rows]
    for tid, (pid, row) in enumerate(zip(pids, chart.rows, strict=True)):
        name = f"{row.name} ({row.detail})" if row.detail else row.name
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    for span in chart.spans:
        args: dict[str, Any] = {} if span.micro_batch is None else {"micro_batch": span.micro_batch}
        if span.critical:
            args["critical"] = True
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": pids[span.row],
                "tid": span.row,
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": args,
            }
        )
    for curve in chart.curves:
        for time, value in zip(curve.times, curve.values, strict=True):
            events.append(
                {
                    "ph": "C",
                    "name": f"memory {curve.name}",
                    "pid": 0,
                    "tid": 0,
                    "ts": time * 1e6,
                    "args": {"bytes": value},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(group: str, *, network: bool) -> str:
    name = "network" if network else "stages"
    return f"{group}: {name}" if group else name
