"""Draw the chart of a timeline, and save it as a picture, a web page or a trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from dapple_tf.drawing.chart import LIGHTEST, Chart, Curve, Row, Span, SpanKind, stack_charts
from dapple_tf.drawing.save import save_chart
from dapple_tf.drawing.table import format_ranges
from dapple_tf.graph_passes.schedules.schedule import CALL_OF_KIND
from dapple_tf.timeline.figures import StepFigures
from dapple_tf.timeline.recording import Recording
from dapple_tf.timeline.simulation import Simulation
from dapple_tf.timeline.trace_data import recording_data

_VISIBLE = 1e-4  # of the step time: in a recorded step a row whose transfers are all shorter is left out


def save_recording(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Save a recording as the suffix of ``path`` says (.png, .html or .json); a trace (.json) can be read again.

    Raises OutputError for another suffix or a path that cannot be written.
    """
    save_chart(draw_recording(recording), path, partial(recording_data, recording))


def draw_recording(recording: Recording) -> Chart:
    """Return the chart of a recording: the predicted step above the measured one, or the only step of the two."""
    measured, predicted = recording.measured, recording.predicted
    if measured is None or predicted is None:
        return make_chart(recording.shown, recording.headline)
    parts = {
        "predicted": make_chart(predicted.timeline, f"{predicted.timeline.summary} ({predicted.source})"),
        "measured": make_chart(measured, measured.summary),
    }
    return stack_charts(recording.headline, tuple(parts.items()))


def make_chart(timeline: StepFigures, title: str = "") -> Chart:
    """Return the chart of a timeline: rows of events, and curves of memory where it is known.

    A recorded step has a row for each device. A simulated step has a row for each worker, since its replicas are alike;
    but if they take minibatches of a window in turn, it has a row for each device too. The stages of a device that runs
    several have shades, the first stage the darkest; its AllReduces, which run while it computes, have a thin row.
    Between two stages there is a thin row for each direction that has transfers.
    """
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
            rows |= {("channel", *channel): _channel_row(*channel) for channel in channels if min(channel) == stage}
    shades = {
        (stage, device): LIGHTEST * index / max(1, len(own) - 1)
        for (_, device), own in stages_of.items()
        for index, stage in enumerate(own)
    }
    return Chart(
        title,
        timeline.step_seconds,
        tuple(rows.values()),
        tuple(_spans(timeline, {place: index for index, place in enumerate(rows)}, shades)),
        curves=tuple(_memory_curves(timeline)),
        limit=_memory_limit(simulation),
        numbers=_name_numbers(timeline),
    )


def _memory_limit(simulation: Simulation | None) -> float | None:
    """Return the bytes of a device's memory; None without a simulation, and if devices have unequal memories."""
    if simulation is None or len({memory for _, memory in simulation.tightest_memory}) > 1:
        return None
    return simulation.tightest_memory[0][1]


def _name_numbers(timeline: StepFigures) -> str:
    """Return the meaning of the numbers in the picture."""
    name = "minibatches" if timeline.runs_whole_minibatches else "micro-batches"
    return name if timeline.window is None else f"{name}, v is the version of the weights"


def _spans(
    timeline: StepFigures, rows: dict[tuple[object, ...], int], shades: dict[tuple[int, str], float]
) -> list[Span]:
    """Return a span for each event that has a row; the update of variables that belong to no stage has none.

    The keys of ``rows`` are ("device", replica, device), ("allreduce", device), or ("channel", stage, stage).
    ``shades``: by stage and device.
    """
    critical = {id(part.item) for part in timeline.critical_path if part.kind != "waiting"}
    spans = []
    for e in timeline.events:
        row = rows.get(("device", e.replica, e.device))
        if row is not None:
            kind: SpanKind = CALL_OF_KIND[e.action.kind]
            shade = shades[e.action.stage, e.device]
            marked, detail = id(e) in critical, "" if e.version is None else f"v{e.version}"
            spans.append(Span(row, e.name, kind, e.start, e.end, e.action.micro_batch, marked, shade, detail))
    for t in timeline.transfers:
        row = rows.get(("channel", t.source, t.target))
        if row is not None:
            kind = "send-forward" if t.source < t.target else "send-backward"
            spans.append(Span(row, str(t), kind, t.start, t.end, t.micro_batch, critical=id(t) in critical))
    device_rows = {place[2]: row for place, row in rows.items() if place[0] == "device"}
    for s in timeline.stage_events:
        row = rows.get((s.kind, s.device), device_rows.get(s.device))
        if row is not None and (s.stage, s.device) in shades:
            spans.append(Span(row, s.name, s.kind, s.start, s.end, critical=id(s) in critical))
    return spans


def _memory_curves(timeline: StepFigures) -> list[Curve]:
    if timeline.simulation is None:
        return []
    workers = timeline.simulation.plan.worker_map.stages_of
    return [Curve(_name_stages(stages), *timeline.simulation.memory(stages[0])) for stages in workers]


def _name_stages(stages: Sequence[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {format_ranges(stages)}"


def _channel_row(source: int, target: int) -> Row:
    return Row(f"{source} to {target}", "activations" if source < target else "gradients", network=True)
