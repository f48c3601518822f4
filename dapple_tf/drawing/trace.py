"""Charts in the Chrome trace format, which Perfetto and TensorBoard's trace viewer read too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dapple_tf.drawing.chart import LABELS, Chart, Span, SpanKind

# Viewers count whole nanoseconds and cut what is left. Multiples of 1/64 microsecond are exact in binary, so a span
# never begins before the end of the one before it: Perfetto drops spans that overlap.
_TICKS = 64e6  # in a second

# Names of colours in chrome://tracing and TensorBoard. Perfetto gives names that differ only in numbers one colour.
_COLOUR_NAMES: Mapping[SpanKind, str] = MappingProxyType(
    {
        "forward": "rail_response",
        "backward": "rail_load",
        "inputs": "cq_build_passed",
        "weights": "detailed_memory_dump",
        "send-forward": "thread_state_runnable",
        "send-backward": "thread_state_running",
        "allreduce": "thread_state_iowait",
        "update": "thread_state_uninterruptible",
    }
)
_FORWARD = ("forward", "send-forward")


def trace_events(chart: Chart) -> dict[str, Any]:
    """Return the trace: processes ``stages`` and ``network`` with a thread for each row, arrows, and bytes as counters.

    Each group of rows has processes of its own, such as ``measured: stages``. Spans of a row that overlap are put on
    further threads, ``stage 0 (2)``. An arrow is a flow, from a time inside of its first span to one inside of its
    second; spans that take no time have none.
    """
    processes = _number_processes(chart)
    threads, places = _place_spans(chart, processes)
    events = [
        *_name_events(processes, threads),
        *(_span_event(span, place) for span, place in zip(chart.spans, places, strict=True)),
        *_flow_events(chart, places),
        *_counter_events(chart),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


@dataclass(frozen=True)
class _Place:
    """Where a span is drawn: the numbers of its process and thread, and its first and last tick."""

    pid: int
    tid: int
    start: int
    end: int

    @property
    def margin(self) -> float:
        """Ticks from an end of the span to a time inside of it; 0 for a span that takes no time."""
        return min(1.0, (self.end - self.start) / 2)


def _number_processes(chart: Chart) -> dict[tuple[str, bool], int]:
    """Return the process of each group's stages and network, from 1 on: Perfetto knows what 0 is."""
    known = {(row.group, row.network) for row in chart.rows}
    groups = dict.fromkeys(row.group for row in chart.rows)
    keys = [(group, network) for group in groups for network in (False, True) if (group, network) in known]
    return {key: pid for pid, key in enumerate(keys, 1)}


def _place_spans(
    chart: Chart, processes: Mapping[tuple[str, bool], int]
) -> tuple[dict[int, tuple[int, str]], list[_Place]]:
    """Return the process and name of each thread by its number, and the place of each span.

    A span is put on the row's first thread whose last span has ended. No thread has the number of a process: viewers
    take it for the main one.
    """
    ticks = [(round(span.start * _TICKS), round(span.end * _TICKS)) for span in chart.spans]
    lanes: list[list[int]] = [[] for _ in chart.rows]  # when the last span ends on each thread of a row
    lane_of = [0] * len(ticks)
    for index in sorted(range(len(ticks)), key=ticks.__getitem__):
        ends, (start, end) = lanes[chart.spans[index].row], ticks[index]
        lane_of[index] = next((lane for lane, last in enumerate(ends) if last <= start), len(ends))
        ends[lane_of[index] : lane_of[index] + 1] = [end]
    threads: dict[int, tuple[int, str]] = {}
    first_of = []
    for row, ends in zip(chart.rows, lanes, strict=True):
        first_of.append(len(processes) + len(threads) + 1)
        name = f"{row.name} ({row.detail})" if row.detail else row.name
        names = [name, *(f"{name} ({lane + 1})" for lane in range(1, len(ends)))]
        threads |= {first_of[-1] + lane: (processes[row.group, row.network], each) for lane, each in enumerate(names)}
    places = []
    for span, lane, (start, end) in zip(chart.spans, lane_of, ticks, strict=True):
        tid = first_of[span.row] + lane
        places.append(_Place(threads[tid][0], tid, start, end))
    return threads, places


def _name_events(
    processes: Mapping[tuple[str, bool], int], threads: Mapping[int, tuple[int, str]]
) -> Iterator[dict[str, Any]]:
    """Yield the names of processes and threads, and their order: from top to bottom as in the chart."""

    def describe(what: str, pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
        yield {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}
        index = pid if what == "process" else tid
        yield {"ph": "M", "name": f"{what}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": index}}

    for (group, network), pid in processes.items():
        name = "network" if network else "stages"
        yield from describe("process", pid, 0, f"{group}: {name}" if group else name)
    for tid, (pid, name) in threads.items():
        yield from describe("thread", pid, tid, name)


def _span_event(span: Span, place: _Place) -> dict[str, Any]:
    args: dict[str, Any] = {"kind": LABELS[span.kind]}
    if span.micro_batch is not None:
        args["micro_batch"] = span.micro_batch
    if span.critical:
        args["critical"] = True
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "cname": _COLOUR_NAMES[span.kind],
        "pid": place.pid,
        "tid": place.tid,
        "ts": _microseconds(place.start),
        "dur": _microseconds(place.end - place.start),
        "args": args,
    }


def _flow_events(chart: Chart, places: Sequence[_Place]) -> Iterator[dict[str, Any]]:
    """Yield the start and the finish of each arrow; of clocks that differ so much that it would go back in time, none.

    An arrow to a span that begins before the first one ends, by such clocks, starts when that begins.
    """
    for number, (first, second) in enumerate(chart.arrows, 1):
        source, target = places[first], places[second]
        finish = target.start + target.margin
        start = min(source.end - source.margin, finish)
        if source.margin and target.margin and start > source.start:
            name = "activations" if chart.spans[first].kind in _FORWARD else "gradients"
            for phase, place, tick in (("s", source, start), ("f", target, finish)):
                event = {"ph": phase, "name": name, "cat": "arrow", "id": number, "pid": place.pid, "tid": place.tid}
                yield {**event, "ts": _microseconds(tick), **({"bp": "e"} if phase == "f" else {})}


def _counter_events(chart: Chart) -> Iterator[dict[str, Any]]:
    for curve in chart.curves:
        for time, value in zip(curve.times, curve.values, strict=True):
            event = {"ph": "C", "name": f"memory {curve.name}", "pid": 1, "ts": _microseconds(round(time * _TICKS))}
            yield {**event, "args": {"bytes": value}}


def _microseconds(ticks: float) -> float:
    return ticks * 1e6 / _TICKS
