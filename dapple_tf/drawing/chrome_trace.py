"""Charts in the Chrome trace format, which Perfetto reads too."""

from __future__ import annotations

from typing import Any

from dapple_tf.drawing.chart import Chart


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
