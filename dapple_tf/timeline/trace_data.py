"""Recordings as JSON values, format ``dapple-timeline/1``: what a trace file holds in its field ``dapple``.

All times are seconds as they were recorded, so that the recording can be read again to the last bit. Viewers of traces
ignore the field.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from dapple_tf.profiler.records import write_record
from dapple_tf.timeline.events import Event, Transfer
from dapple_tf.timeline.figures import StepFigures
from dapple_tf.timeline.recording import Recording

FORMAT = "dapple-timeline/1"
_OF_TRANSFERS = tuple(field.name for field in fields(Transfer) if field.name != "count")


def recording_data(recording: Recording) -> dict[str, Any]:
    """Return the recording as JSON values, from which ``trace_file.read_recording`` makes an equal one."""
    data: dict[str, Any] = {"format": FORMAT, "title": recording.title}
    if recording.measured is not None:
        data["measured"] = _timeline_data(recording.measured)
        if recording.measured.earlier:
            data["earlier"] = [
                {"seconds": step.seconds, "timeline": _timeline_data(step.timeline)}
                for step in recording.measured.earlier
            ]
        if recording.measured.memory_curves:
            data["memory_curves"] = [asdict(curve) for curve in recording.measured.memory_curves]
    if recording.predicted is not None:
        data["predicted"] = {
            "source": recording.predicted.source,
            "timeline": _timeline_data(recording.predicted.timeline),
        }
    if recording.planned_seconds is not None:
        data["planned_seconds"] = recording.planned_seconds
    return data


def _timeline_data(timeline: StepFigures) -> dict[str, Any]:
    together = timeline.step.together
    return {
        "actions": [_event_data(event) for event in timeline.events],
        "transfers": [_transfer_data(transfer) for transfer in timeline.transfers],
        "stage_events": [write_record(event) for event in timeline.stage_events],
        **({"together": [asdict(action) for action in sorted(together)]} if together else {}),
        **({} if timeline.window is None else {"window": asdict(timeline.window)}),
        **({"ops": [asdict(op) for op in timeline.ops]} if timeline.ops else {}),
    }


# ``dataclasses.asdict`` copies every value; for the many events and transfers that would take most of the time.
def _event_data(event: Event) -> dict[str, Any]:
    action = event.action
    data = {
        "stage": action.stage,
        "kind": action.kind,
        "micro_batch": action.micro_batch,
        "replica": event.replica,
        "device": event.device,
        "start": event.start,
        "end": event.end,
    }
    return data if event.version is None else {**data, "version": event.version}


def _transfer_data(transfer: Transfer) -> dict[str, Any]:
    data = {name: getattr(transfer, name) for name in _OF_TRANSFERS}
    return data if transfer.count == 1 else {**data, "count": transfer.count}  # earlier versions know no other number
