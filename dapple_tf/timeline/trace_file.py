"""Read recordings from trace files.

A trace for Chrome or Perfetto is a JSON object; its field ``dapple`` (format ``dapple-timeline/1``, see ``trace_data``)
holds the recording. Files are only read as data: nothing in them is ever run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from dapple_tf.errors import TraceError
from dapple_tf.timeline.events import Event, StageEvent, StageEventKind, Transfer
from dapple_tf.timeline.recording import Prediction, Recording
from dapple_tf.timeline.timeline import Timeline
from dapple_tf.timeline.trace_data import FORMAT
from graph_passes.errors import ScheduleError
from graph_passes.schedules.schedule import CALL_OF_KIND, Action, Kind, read_old_splits
from graph_passes.schedules.window import Window
from profiler.fields import Fields
from profiler.quote import quote
from profiler.read_files import naming_file, read_json

_ADVICE = "save one with dapple train --trace FILE.json or dapple simulate -o FILE.json"
_LONGEST = 1e9  # seconds: no step takes 30 years
_MOST_ACTIONS = 1_000_000
_LARGEST_FILE = 64 * 2**20  # bytes: about 100,000 events
_SPAN = ("start", "end")
_ACTION = ("stage", "kind", "micro_batch", "replica", "device", *_SPAN, "version")
_TRANSFER = ("source", "target", "micro_batch", *_SPAN, "count")
_TOGETHER = ("stage", "kind", "micro_batch")
_STAGE_EVENT = ("kind", "stage", "replica", "device", *_SPAN, "micro_batch")
_TIMELINE = ("actions", "transfers", "stage_events", "together", "window")
_WINDOW = tuple(field.name for field in fields_of(Window))


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Return the recording that a trace was saved from.

    Raises TraceError naming the file and the field that is wrong: not JSON, a trace that dapple_tf did not save, or a
    field that is missing or has an impossible value.
    """
    with naming_file(path, TraceError):
        data = read_json(path, TraceError, _LARGEST_FILE)
        if not isinstance(data, dict) or "dapple" not in data:
            known = isinstance(data, list) or (isinstance(data, dict) and "traceEvents" in data)
            what = "a trace, but not one that dapple_tf saved" if known else "not a trace"
            raise TraceError(f"{what} (there is no field 'dapple' in it): {_ADVICE}")
        with naming_file("dapple", TraceError):
            return _read(data["dapple"])


def _read(data: Any) -> Recording:
    known = ("title", "measured", "predicted", "planned_seconds")
    fields = Fields.of(data, TraceError, known=known, file_format=FORMAT)
    title = fields.text("title")
    measured = predicted = None
    if fields.has("measured"):
        measured = _read_timeline(fields.inner("measured", _TIMELINE), "measured", title)
    if fields.has("predicted"):
        inner = fields.inner("predicted", ("source", "timeline"))
        timeline = _read_timeline(inner.inner("timeline", _TIMELINE), "predicted.timeline", title)
        predicted = Prediction(timeline, inner.text("source"))
    if measured is None and predicted is None:
        raise TraceError("it holds neither a measured step nor a predicted one")
    planned = fields.number("planned_seconds") if fields.has("planned_seconds") else None
    return Recording(title, measured, predicted, planned)


def _read_timeline(fields: Fields, where: str, title: str) -> Timeline:
    events = tuple(map(_read_action, fields.each("actions", _ACTION)))
    if not events:
        raise TraceError(f"{where}.actions is empty: a step has at least one action")
    actions = read_old_splits(event.action for event in events)
    events = tuple(replace(event, action=action) for event, action in zip(events, actions, strict=True))
    known: dict[tuple[Action, int], int] = {}
    for index, event in enumerate(events):
        first = known.setdefault((event.action, event.replica), index)
        if first != index:
            raise TraceError(
                f"{where}.actions[{index}] is {event}, as {where}.actions[{first}]: an action runs once in a step"
            )
    stages = {event.action.stage for event in events}
    if stages != set(range(len(stages))):
        raise TraceError(
            f"{where}.actions has stages {quote(sorted(stages))}; they must be numbered from 0 without gaps"
        )
    transfers = tuple(map(_read_transfer, fields.each("transfers", _TRANSFER)))
    micro_batches = len({action.micro_batch for action in actions})
    for index, transfer in enumerate(transfers):
        if transfer.source == transfer.target or not {transfer.source, transfer.target} <= stages:
            raise TraceError(
                f"{where}.transfers[{index}] goes {transfer.source}>{transfer.target}; it must connect two different "
                f"stages of {quote(sorted(stages))}"
            )
        most = min(transfer.micro_batch + 1, micro_batches)
        if not 1 <= transfer.count <= most:
            raise TraceError(
                f"{where}.transfers[{index}].count is {transfer.count}; a transfer carries the results of 1 to {most} "
                f"micro-batches, the last of which is {transfer.micro_batch}"
            )
    stage_events = tuple(map(_read_stage_event, fields.each("stage_events", _STAGE_EVENT)))
    for index, found in enumerate(stage_events):
        if found.stage is not None and found.stage not in stages:
            raise TraceError(
                f"{where}.stage_events[{index}] is of stage {found.stage}; the step has stages {quote(sorted(stages))}"
            )
    together = tuple(map(_read_bare_action, fields.each("together", _TOGETHER))) if fields.has("together") else ()
    for index, action in enumerate(together):
        for each in (action, replace(action, micro_batch=action.micro_batch + 1)):
            if each not in actions:
                raise TraceError(
                    f"{where}.together[{index}] is {action}, whose result travels with that of the next micro-batch: "
                    f"there is no action {each}"
                )
    window = _read_window(fields.inner("window", _WINDOW), where) if fields.has("window") else None
    if window is not None:
        _check_window(window, events, stage_events, where)
    timeline = Timeline(events, transfers, stage_events, title=title, together=together, window=window)
    if not timeline.step_seconds:
        raise TraceError(f"{where} has no duration: all its events end at 0")
    return timeline


def _read_window(fields: Fields, where: str) -> Window:
    replicas, minibatches = fields.integers("replicas"), fields.integer("minibatches")
    if minibatches * fields.integer("micro_batches") * len(replicas) > _MOST_ACTIONS:
        raise TraceError(f"{where}.window has more than {_MOST_ACTIONS} micro-batches on its stages")
    try:
        return Window(
            minibatches, replicas, fields.integers("warm_up"), fields.integer("micro_batches"), fields.flag("in_turn")
        )
    except (ScheduleError, ValueError) as error:
        raise TraceError(f"{where}.window: {error}") from error


def _check_window(window: Window, events: Sequence[Event], stage_events: Sequence[StageEvent], where: str) -> None:
    """Raise TraceError unless the events are those of the window."""
    expected = {(action, place[1]) for place, row in window.rows.items() for action in row}
    found = {(event.action, event.replica) for event in events}
    if found != expected:
        raise TraceError(f"{where}.actions are not those of {where}.window: {len(found ^ expected)} differ")
    for index, event in enumerate(stage_events):
        known = () if event.stage is None else window.updates[event.stage]
        if event.micro_batch not in {group[-1] for group in known}:
            raise TraceError(
                f"{where}.stage_events[{index}].micro_batch is {event.micro_batch}, not the last one of an update"
            )


def _read_action(fields: Fields) -> Event:
    version = fields.integer("version") if fields.has("version") else None
    action, replica = _read_bare_action(fields), fields.integer("replica")
    return Event(action, replica, fields.text("device"), *_read_span(fields), version)


def _read_transfer(fields: Fields) -> Transfer:
    source, target, last = (fields.integer(key) for key in ("source", "target", "micro_batch"))
    count = fields.integer("count") if fields.has("count") else 1
    return Transfer(source, target, last, *_read_span(fields), count)


def _read_bare_action(fields: Fields) -> Action:
    kind: Kind = _choice(fields, "kind", tuple(CALL_OF_KIND))
    return Action(fields.integer("stage"), kind, fields.integer("micro_batch"))


def _read_stage_event(fields: Fields) -> StageEvent:
    kind: StageEventKind = _choice(fields, "kind", ("allreduce", "update"))
    stage = fields.integer("stage") if fields.has("stage") else None
    micro_batch = fields.integer("micro_batch") if fields.has("micro_batch") else None
    return StageEvent(kind, stage, fields.integer("replica"), fields.text("device"), *_read_span(fields), micro_batch)


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
        raise TraceError(f"{fields.where}{key} is {quote(value)}; known are {', '.join(known)}")
    return value
