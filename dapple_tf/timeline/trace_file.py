"""Read recordings from trace files.

A trace for Chrome or Perfetto is a JSON object; its field ``dapple`` (format ``dapple-timeline/1``, see ``trace_data``)
holds the recording. Files are only read as data: nothing in them is ever run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from dapple_tf.errors import ScheduleError, TraceError
from dapple_tf.graph_passes.schedules.schedule import Action, Kind, name_input_halves
from dapple_tf.graph_passes.schedules.window import Window
from dapple_tf.profiler.quote import quote
from dapple_tf.profiler.read_files import naming_file, read_json
from dapple_tf.profiler.records import Count, Figure, Name, read_record
from dapple_tf.timeline.events import Event, MemoryCurve, OpRun, StageEvent, StageEventKind, Transfer
from dapple_tf.timeline.figures import EarlierStep
from dapple_tf.timeline.recording import Prediction, Recording
from dapple_tf.timeline.timeline import Timeline
from dapple_tf.timeline.trace_data import FORMAT
from dapple_tf.wording import format_count

_ADVICE = "save one with dapple train --trace FILE.json or dapple simulate -o FILE.json"
_LONGEST = 1e9  # seconds: no step takes 30 years
_MOST_ACTIONS = 1_000_000
_LARGEST_FILE = 64 * 2**20  # bytes: about 100,000 events


# --- The records of a file, if they differ from the objects that are made of them


@dataclass(frozen=True)
class _Action:
    """One event of an action, whose fields stand in the record itself."""

    stage: Count
    kind: Kind
    micro_batch: Count
    replica: Count
    device: Name
    start: Figure
    end: Figure
    version: Count | None = None


@dataclass(frozen=True)
class _StageEvent:
    """A stage event; a file does not have ``stage`` if the variables belong to no stage."""

    kind: StageEventKind
    replica: Count
    device: Name
    start: Figure
    end: Figure
    stage: Count | None = None
    micro_batch: Count | None = None


@dataclass(frozen=True)
class _Window:
    """An asynchronous window, whose size is checked before the ``Window`` is made."""

    minibatches: Count
    replicas: tuple[Count, ...]
    warm_up: tuple[Count, ...]
    micro_batches: Count
    in_turn: bool


@dataclass(frozen=True)
class _Step:
    """The events of one step or window."""

    actions: tuple[_Action, ...]
    transfers: tuple[Transfer, ...]
    stage_events: tuple[_StageEvent, ...]
    together: tuple[Action, ...] = ()
    window: _Window | None = None
    ops: tuple[OpRun, ...] = ()


@dataclass(frozen=True)
class _Prediction:
    """A predicted step, and what it was predicted from."""

    source: Name
    timeline: _Step


@dataclass(frozen=True)
class _Earlier:
    """A step recorded before the measured one, and the seconds between their first actions."""

    seconds: Figure
    timeline: _Step


@dataclass(frozen=True)
class _Recording:
    """The field ``dapple`` of a trace."""

    title: Name
    measured: _Step | None = None
    earlier: tuple[_Earlier, ...] = ()
    memory_curves: tuple[MemoryCurve, ...] = ()
    predicted: _Prediction | None = None
    planned_seconds: Figure | None = None


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Return the recording that was saved as this trace.

    Raises TraceError, which names the file and the field, if the file is not JSON, if dapple_tf has not saved it, and
    if a field is missing or has an impossible value.
    """
    with naming_file(path, TraceError):
        data = read_json(path, TraceError, _LARGEST_FILE)
        if not isinstance(data, dict) or "dapple" not in data:
            known = isinstance(data, list) or (isinstance(data, dict) and "traceEvents" in data)
            what = "a trace, but not one that dapple_tf saved" if known else "not a trace"
            raise TraceError(f"{what} (there is no field 'dapple' in it): {_ADVICE}")
        with naming_file("dapple", TraceError):
            return _make_recording(read_record(data["dapple"], _Recording, TraceError, file_format=FORMAT))


def _make_recording(found: _Recording) -> Recording:
    measured = predicted = None
    _check_curves(found.memory_curves)
    if found.measured is not None:
        measured = _make_timeline(found.measured, "measured", found.title, found)
    if found.predicted is not None:
        timeline = _make_timeline(found.predicted.timeline, "predicted.timeline", found.title)
        predicted = Prediction(timeline, found.predicted.source)
    if measured is None and predicted is None:
        raise TraceError("it holds neither a measured step nor a predicted one")
    return Recording(found.title, measured, predicted, found.planned_seconds)


def _make_earlier(found: _Recording) -> tuple[EarlierStep, ...]:
    steps = []
    for index, step in enumerate(found.earlier):
        where = f"earlier[{index}]"
        if step.seconds > _LONGEST:
            raise TraceError(f"{where}.seconds is {step.seconds:g}, more than {_LONGEST:g} seconds")
        steps.append(EarlierStep(step.seconds, _make_timeline(step.timeline, f"{where}.timeline", found.title)))
    return tuple(steps)


def _check_ops(ops: tuple[OpRun, ...], known: Mapping[tuple[Action, int], int], where: str) -> tuple[OpRun, ...]:
    """Return the ops; raise TraceError unless each is of a known action, at a plausible time."""
    for index, op in enumerate(ops):
        if (op.action, op.replica) not in known:
            raise TraceError(
                f"{where}[{index}] is of {op.action} of replica {op.replica}, which is no action of the step"
            )
        if op.start + op.seconds > _LONGEST:
            raise TraceError(f"{where}[{index}] ends after more than {_LONGEST:g} seconds")
    return ops


def _check_curves(curves: Sequence[MemoryCurve]) -> None:
    """Raise TraceError unless each curve has as many times as values, in order and within a plausible time."""
    for index, curve in enumerate(curves):
        where = f"memory_curves[{index}]"
        if len(curve.times) != len(curve.values) or not curve.times:
            raise TraceError(
                f"{where} has {format_count(len(curve.times), 'time')} and {format_count(len(curve.values), 'value')}: "
                "give one of each"
            )
        if list(curve.times) != sorted(curve.times) or max(map(abs, curve.times)) > _LONGEST:
            raise TraceError(f"{where}.times are not ascending, or beyond {_LONGEST:g} seconds")


def _make_timeline(step: _Step, where: str, title: str, recording: _Recording | None = None) -> Timeline:
    """Return the timeline of ``step``; of the measured one, with the other steps and memory of ``recording``."""
    _check_spans(step.actions, f"{where}.actions")
    _check_spans(step.transfers, f"{where}.transfers")
    _check_spans(step.stage_events, f"{where}.stage_events")
    events = tuple(
        Event(Action(e.stage, e.kind, e.micro_batch), e.replica, e.device, e.start, e.end, e.version)
        for e in step.actions
    )
    if not events:
        raise TraceError(f"{where}.actions is empty: a step has at least one action")
    actions = name_input_halves(event.action for event in events)
    events = tuple(replace(event, action=action) for event, action in zip(events, actions, strict=True))
    known: dict[tuple[Action, int], int] = {}
    for index, event in enumerate(events):
        first = known.setdefault((event.action, event.replica), index)
        if first != index:
            raise TraceError(
                f"{where}.actions[{index}] is {event}, and so is {where}.actions[{first}]: an action runs once in a "
                "step"
            )
    stages = {event.action.stage for event in events}
    if stages != set(range(len(stages))):
        raise TraceError(
            f"{where}.actions has stages {quote(sorted(stages))}; they must be numbered from 0 without gaps"
        )
    micro_batches = len({action.micro_batch for action in actions})
    for index, transfer in enumerate(step.transfers):
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
    stage_events = tuple(
        StageEvent(e.kind, e.stage, e.replica, e.device, e.start, e.end, e.micro_batch) for e in step.stage_events
    )
    for index, found in enumerate(stage_events):
        if found.stage is not None and found.stage not in stages:
            raise TraceError(
                f"{where}.stage_events[{index}] is of stage {found.stage}; the step has stages {quote(sorted(stages))}"
            )
    for index, action in enumerate(step.together):
        for each in (action, replace(action, micro_batch=action.micro_batch + 1)):
            if each not in actions:
                raise TraceError(
                    f"{where}.together[{index}] is {action}, whose result travels with the result of the next "
                    f"micro-batch: there is no action {each}"
                )
    window = None
    if step.window is not None:
        window = _make_window(step.window, where)
        _check_window(window, events, stage_events, where)
    timeline = Timeline(
        events,
        step.transfers,
        stage_events,
        title=title,
        together=step.together,
        window=window,
        earlier=() if recording is None else _make_earlier(recording),
        memory_curves=() if recording is None else recording.memory_curves,
        ops=_check_ops(step.ops, known, f"{where}.ops"),
    )
    if not timeline.step_seconds:
        raise TraceError(f"{where} has no duration: all its events end at 0")
    return timeline


def _make_window(found: _Window, where: str) -> Window:
    if found.minibatches * found.micro_batches * len(found.replicas) > _MOST_ACTIONS:
        raise TraceError(f"{where}.window has more than {_MOST_ACTIONS} micro-batches on its stages")
    try:
        return Window(**asdict(found))
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


def _check_spans(events: Sequence[_Action | Transfer | _StageEvent], where: str) -> None:
    """Raise TraceError unless each event ends after it starts, and within a plausible time."""
    for index, event in enumerate(events):
        if event.end < event.start:
            raise TraceError(f"{where}[{index}].end is {event.end}, before its start, {event.start}")
        if event.end > _LONGEST:
            raise TraceError(f"{where}[{index}].end is {event.end}, more than {_LONGEST:g} seconds")
