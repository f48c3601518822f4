"""Recorded steps in a trace's file: what viewers are not shown, from which the recording can be read again.

A trace for Chrome or Perfetto is a JSON object; what it has under ``dapple`` is ours, format ``dapple-timeline/1``:
all times in seconds as they were recorded. Nothing in a file is ever run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args, get_type_hints

from dapple_tf.errors import TraceError
from dapple_tf.timeline.prediction import Prediction
from dapple_tf.timeline.recording import Recording
from dapple_tf.timeline.timeline import Event, StageEvent, Timeline, Transfer
from graph_passes.schedules.schedule import Action, Kind
from profiler.fields import Fields, naming_file, read_json

FORMAT = "dapple-timeline/1"
_ADVICE = "save one with dapple train --trace FILE.json or dapple simulate -o FILE.json"
_SPAN = ("start", "end")
_LONGEST = 1e9  # seconds: no step takes 30 years
_ACTION = ("stage", "kind", "micro_batch", "replica", "device", *_SPAN)
_TRANSFER = ("source", "target", "micro_batch", *_SPAN)
_STAGE_EVENT = ("kind", "stage", "replica", "device", *_SPAN)
_TIMELINE = ("actions", "transfers", "stage_events")


def recording_data(recording: Recording) -> dict[str, Any]:
    """What a trace keeps of a recording; `read_recording` makes an equal one of it."""
    data: dict[str, Any] = {"format": FORMAT, "title": recording.title}
    if recording.measured is not None:
        data["measured"] = _timeline_data(recording.measured)
    if recording.predicted is not None:
        data["predicted"] = {
            "source": recording.predicted.source,
            "timeline": _timeline_data(recording.predicted.timeline),
        }
    if recording.planned_seconds is not None:
        data["planned_seconds"] = recording.planned_seconds
    return data


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """The recording that a trace was saved from.

    Raises TraceError naming the file and the place in it that is wrong: no JSON, no trace of ours, or a field that is
    missing or cannot be.
    """
    with naming_file(path, TraceError):
        data = read_json(path, TraceError)
        if not isinstance(data, dict) or "dapple" not in data:
            known = isinstance(data, list) or (isinstance(data, dict) and "traceEvents" in data)
            what = "a trace, but not one that dapple_tf saved" if known else "not a trace"
            raise TraceError(f"{what} (there is no field 'dapple' in it): {_ADVICE}")
        with naming_file("dapple", TraceError):
            return _read(data["dapple"])


def _read(data: Any) -> Recording:
    known = ("title", "measured", "predicted", "planned_seconds")
    fields = Fields.of(data, TraceError, known=known, file_format=FORMAT)
    measured = _read_timeline(fields.inner("measured", _TIMELINE), "measured") if fields.has("measured") else None
    predicted = None
    if fields.has("predicted"):
        inner = fields.inner("predicted", ("source", "timeline"))
        timeline = _read_timeline(inner.inner("timeline", _TIMELINE), "predicted.timeline")
        predicted = Prediction(timeline, inner.text("source"))
    if measured is None and predicted is None:
        raise TraceError("it holds neither a measured step nor a predicted one")
    planned = fields.number("planned_seconds") if fields.has("planned_seconds") else None
    return Recording(fields.text("title"), measured, predicted, planned)


def _timeline_data(timeline: Timeline) -> dict[str, Any]:
    return {
        "actions": [
            {**asdict(e.action), "replica": e.replica, "device": e.device, "start": e.start, "end": e.end}
            for e in timeline.events
        ],
        "transfers": [asdict(transfer) for transfer in timeline.transfers],
        "stage_events": [asdict(event) for event in timeline.stage_events],
    }


def _read_timeline(fields: Fields, where: str) -> Timeline:
    events = tuple(map(_read_action, fields.each("actions", _ACTION)))
    if not events:
        raise TraceError(f"{where}.actions is empty: a step runs some")
    known: dict[tuple[Action, int], int] = {}
    for index, event in enumerate(events):
        first = known.setdefault((event.action, event.replica), index)
        if first != index:
            raise TraceError(f"{where}.actions[{index}] is {event}, as {where}.actions[{first}]: it runs once a step")
    stages = {event.action.stage for event in events}
    if stages != set(range(len(stages))):
        raise TraceError(f"{where}.actions has stages {sorted(stages)}; they count from 0, none left out")
    transfers = tuple(map(_read_transfer, fields.each("transfers", _TRANSFER)))
    for index, transfer in enumerate(transfers):
        if transfer.source == transfer.target or not {transfer.source, transfer.target} <= stages:
            raise TraceError(
                f"{where}.transfers[{index}] goes {transfer.source}>{transfer.target}: no two stages of it"
            )
    more = tuple(map(_read_stage_event, fields.each("stage_events", _STAGE_EVENT)))
    for index, found in enumerate(more):
        if found.stage is not None and found.stage not in stages:
            raise TraceError(f"{where}.stage_events[{index}] is of stage {found.stage}: there are {sorted(stages)}")
    timeline = Timeline(events, transfers, more)
    if not timeline.seconds:
        raise TraceError(f"{where} takes no time at all")
    return timeline


def _read_action(fields: Fields) -> Event:
    kind: Kind = _choice(fields, "kind", get_args(get_type_hints(Action)["kind"]))
    action = Action(fields.integer("stage"), kind, fields.integer("micro_batch"))
    return Event(action, fields.integer("replica"), fields.text("device"), *_read_span(fields))


def _read_transfer(fields: Fields) -> Transfer:
    source, target = fields.integer("source"), fields.integer("target")
    return Transfer(source, target, fields.integer("micro_batch"), *_read_span(fields))


def _read_stage_event(fields: Fields) -> StageEvent:
    kind: Literal["allreduce", "update"] = _choice(fields, "kind", ("allreduce", "update"))
    stage = fields.integer("stage") if fields.has("stage") else None
    return StageEvent(kind, stage, fields.integer("replica"), fields.text("device"), *_read_span(fields))


def _read_span(fields: Fields) -> tuple[float, float]:
    start, end = fields.number("start"), fields.number("end")
    if end < start:
        raise TraceError(f"{fields.where}end is {end}, before its start, {start}")
    if end > _LONGEST:
        raise TraceError(f"{fields.where}end is {end}, more than {_LONGEST:g} seconds")
    return start, end


def _choice(fields: Fields, key: str, known: Sequence[str]) -> Any:
    value = fields.text(key)
    if value not in known:
        raise TraceError(f"{fields.where}{key} is {value!r}; there are {', '.join(known)}")
    return value
