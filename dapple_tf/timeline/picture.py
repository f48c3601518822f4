"""Draw the chart of a timeline, and save it as a picture, a web page or a trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dapple_tf.drawing.chart import LIGHTEST, Chart, Curve, Row, Span, SpanKind, chain_charts, stack_charts
from dapple_tf.drawing.save import save_chart
from dapple_tf.drawing.table import format_ranges
from dapple_tf.drawing.trace import trace_events
from dapple_tf.graph_passes.schedules.schedule import CALL_OF_KIND
from dapple_tf.timeline.event_dependencies import EventDependencies
from dapple_tf.timeline.events import Event, Transfer
from dapple_tf.timeline.figures import StepFigures
from dapple_tf.timeline.recording import Recording
from dapple_tf.timeline.trace_data import recording_data

_MEASURED = "measured"  # the group of rows
_VISIBLE = 1e-4  # of the step time: in a recorded step a row whose transfers are all shorter is left out


def save_recording(recording: Recording, path: str | os.PathLike[str], *, with_earlier: bool = False) -> None:
    """Save a recording as the suffix of ``path`` says (.png, .html or .json); a trace (.json) can be read again.

    ``with_earlier``: a picture shows the steps that were recorded before too, as a trace does. Raises OutputError for
    another suffix or a path that cannot be written.
    """
    if with_earlier:
        chart = draw_trace(recording)
        rows = tuple(replace(row, until=chart.seconds) if row.until else row for row in chart.rows)
        chart = replace(chart, title=recording.title, rows=rows)
    else:
        chart = draw_recording(recording)
    save_chart(chart, path, lambda: {**trace_events(draw_trace(recording)), "dapple": recording_data(recording)})


def draw_recording(recording: Recording) -> Chart:
    """Return the chart of a recording: the predicted step above the measured one, or the only step of the two."""
    return _draw_recording(recording, make_chart)


def _draw_recording(recording: Recording, draw: Callable[[StepFigures, str], Chart]) -> Chart:
    measured, predicted = recording.measured, recording.predicted
    if measured is None or predicted is None:
        return draw(recording.shown, recording.headline)
    parts = {
        "predicted": draw(predicted.timeline, f"{predicted.timeline.summary} ({predicted.source})"),
        _MEASURED: draw(measured, measured.summary),
    }
    return stack_charts(recording.headline, tuple(parts.items()))


def draw_trace(recording: Recording) -> Chart:
    """Return the chart of a trace: with arrows between stages, measured memory, and the steps recorded before."""
    chart = _draw_recording(recording, _draw_with_arrows)
    shown = recording.shown
    earlier = [(step.seconds, _draw_with_arrows(step.timeline)) for step in shown.earlier]
    if recording.measured is not None and recording.predicted is not None:  # the rows of ``chart`` have groups
        earlier = [(seconds, stack_charts("", [(_MEASURED, part)])) for seconds, part in earlier]
    measured = [Curve(f"measured, {m.device}", m.times, m.values) for m in shown.memory_curves]
    return chain_charts(replace(chart, curves=(*chart.curves, *measured)), earlier)


def make_chart(timeline: StepFigures, title: str = "") -> Chart:
    """Return the chart of a timeline: rows of events, and curves of memory where it is known.

    A recorded step has a row for each device. A simulated step has a row for each worker, since its replicas are alike;
    but if they take minibatches of a window in turn, it has a row for each device too. The stages of a device that runs
    several have shades, the first stage the darkest; its AllReduces, which run while it computes, have a thin row.
    Between two stages there is a thin row for each direction that has transfers.
    """
    return _draw(timeline, title)[0]


def _draw_with_arrows(timeline: StepFigures, title: str = "") -> Chart:
    """Return the chart of a timeline for a trace: with arrows, and below each device the ops of its actions."""
    chart, drawn = _draw(timeline, title)
    chart = replace(chart, arrows=tuple(_arrows(timeline, drawn)))  # of long pipelines they take seconds to find
    return _with_ops(chart, timeline, drawn) if timeline.ops else chart


def _with_ops(chart: Chart, timeline: StepFigures, drawn: Mapping[int, int]) -> Chart:
    """Return the chart with a row of ops below each row of a device that ran any."""
    span_of = {(e.action, e.replica): chart.spans[drawn[id(e)]] for e in timeline.events if id(e) in drawn}
    shown = [(op, span_of[op.action, op.replica]) for op in timeline.ops if (op.action, op.replica) in span_of]
    with_ops = {span.row for _, span in shown}
    rows, places, ops_of = list[Row](), list[int](), dict[int, int]()
    for index, row in enumerate(chart.rows):
        places.append(len(rows))
        rows.append(row)
        if index in with_ops:
            ops_of[index] = len(rows)
            rows.append(replace(row, name=f"ops of {row.name}", until=0.0))
    spans = [span._replace(row=places[span.row]) for span in chart.spans]
    for op, span in shown:
        start = span.start + op.start
        spans.append(Span(ops_of[span.row], f"{op.op} {op.name}", span.kind, start, start + op.seconds, op.micro_batch))
    return replace(chart, rows=tuple(rows), spans=tuple(spans))


def _draw(timeline: StepFigures, title: str) -> tuple[Chart, Mapping[int, int]]:
    """Return the chart of a timeline, and the indices of its spans by the id of the event that each shows."""
    simulation = timeline.simulation
    alike = simulation is not None and not timeline.runs_whole_minibatches
    places = [place for place in timeline.places if not alike or place[1] == 0]
    shortest = _VISIBLE * timeline.step_seconds if simulation is None else 0.0
    channels = sorted({(t.source, t.target) for t in timeline.transfers if t.end - t.start > shortest})
    replicated = len({replica for _, replica, _ in places}) > 1
    stages_of: dict[tuple[int, str], list[int]] = {}  # by replica and device
    for stage, replica, device in places:
        stages_of.setdefault((replica, device), []).append(stage)
    reducing = {event.device for event in timeline.stage_events if event.kind == "allreduce"}
    rows: dict[tuple[object, ...], Row] = {}
    for i, (stage, replica, device) in enumerate(places):
        own = stages_of[replica, device]
        name = _name_stages(own) + replicated * f", replica {replica}"
        if simulation is not None and alike:
            device_names = f"devices {format_ranges(simulation.plan.stages[stage].devices)}"
        else:
            device_names = device
        if stage == own[0]:
            rows["device", replica, device] = Row(name, device_names, until=timeline.step_seconds)
            if len(own) > 1 and device in reducing:
                rows["allreduce", device] = Row(f"AllReduce of {name}", network=True)
        if i + 1 == len(places) or places[i + 1][0] != stage:
            for source, target in (channel for channel in channels if min(channel) == stage):
                detail = "activations" if source < target else "gradients"
                rows["channel", source, target] = Row(f"{source} to {target}", detail, network=True)
    shades = {
        (stage, device): LIGHTEST * index / max(1, len(own) - 1)
        for (_, device), own in stages_of.items()
        for index, stage in enumerate(own)
    }
    spans, drawn = _spans(timeline, {place: index for index, place in enumerate(rows)}, shades)
    numbers = "minibatches" if timeline.runs_whole_minibatches else "micro-batches"
    memories = set() if simulation is None else {memory for _, memory in simulation.tightest_memory}
    chart = Chart(
        title,
        timeline.step_seconds,
        tuple(rows.values()),
        tuple(spans),
        curves=tuple(_memory_curves(timeline)),
        limit=memories.pop() if len(memories) == 1 else None,  # of devices with unequal memories there is none
        numbers=numbers if timeline.window is None else f"{numbers}, v is the version of the weights",
        plan=timeline.plan_drawing,
    )
    return chart, drawn


def _spans(
    timeline: StepFigures, rows: dict[tuple[object, ...], int], shades: dict[tuple[int, str], float]
) -> tuple[list[Span], dict[int, int]]:
    """Return a span for each event that has a row, and the indices of the spans by the id of their event.

    The update of variables that belong to no stage has none. The keys of ``rows`` are ("device", replica, device),
    ("allreduce", device), or ("channel", stage, stage). ``shades``: by stage and device.
    """
    critical = {id(part.item) for part in timeline.critical_path if part.kind != "waiting"}
    spans: list[Span] = []
    drawn: dict[int, int] = {}
    for e in timeline.events:
        row = rows.get(("device", e.replica, e.device))
        if row is not None:
            kind: SpanKind = CALL_OF_KIND[e.action.kind]
            shade = shades[e.action.stage, e.device]
            marked, detail = id(e) in critical, "" if e.version is None else f"v{e.version}"
            drawn[id(e)] = len(spans)
            spans.append(Span(row, e.name, kind, e.start, e.end, e.action.micro_batch, marked, shade, detail))
    for t in timeline.transfers:
        row = rows.get(("channel", t.source, t.target))
        if row is not None:
            kind = "send-forward" if t.source < t.target else "send-backward"
            drawn[id(t)] = len(spans)
            spans.append(Span(row, str(t), kind, t.start, t.end, t.micro_batch, critical=id(t) in critical))
    device_rows = {place[2]: row for place, row in rows.items() if place[0] == "device"}
    for s in timeline.stage_events:
        row = rows.get((s.kind, s.device), device_rows.get(s.device))
        if row is not None and (s.stage, s.device) in shades:
            spans.append(Span(row, s.name, s.kind, s.start, s.end, critical=id(s) in critical))
    return spans, drawn


def _arrows(timeline: StepFigures, drawn: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the spans between which activations and gradients go from stage to stage.

    ``drawn``: spans by the id of their event. Through a transfer that is not drawn an arrow goes from action to action.
    """
    dependencies = EventDependencies(timeline.step)
    items: list[Event | Transfer] = [*timeline.events, *timeline.transfers]
    for item in items:
        if id(item) in drawn:
            for sender in dependencies.senders(item):
                through = isinstance(sender, Transfer) and id(sender) not in drawn
                firsts: Iterable[Event | Transfer] = dependencies.senders(sender) if through else [sender]
                yield from ((drawn[id(first)], drawn[id(item)]) for first in firsts if id(first) in drawn)


def _memory_curves(timeline: StepFigures) -> list[Curve]:
    if timeline.simulation is None:
        return []
    workers = timeline.simulation.plan.worker_map.stages_of
    return [Curve(_name_stages(stages), *timeline.simulation.memory(stages[0])) for stages in workers]


def _name_stages(stages: Sequence[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {format_ranges(stages)}"
