"""Recordings as JSON values, format ``dapple-timeline/1``: what a trace file holds in its field ``dapple``.

All times are seconds as they were recorded, so that the recording can be read again to the last bit. Viewers of traces
ignore the field.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dapple_tf.timeline.events import Transfer

if TYPE_CHECKING:
    from dapple_tf.timeline.recording import Recording
    from dapple_tf.timeline.timeline import Timeline

FORMAT = "dapple-timeline/1"
_OF_EVENTS = ("replica", "device", "start", "end", "version")


def recording_data(recording: Recording) -> dict[str, Any]:
    """Return the recording as JSON values, from which ``trace_file.read_recording`` makes an equal one."""
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


def _timeline_data(timeline: Timeline) -> dict[str, Any]:
    together = timeline.step.together
    return {
        "actions": [
            _without_none({**asdict(e.action), **{key: getattr(e, key) for key in _OF_EVENTS}}) for e in timeline.events
        ],
        "transfers": [_transfer_data(transfer) for transfer in timeline.transfers],
        "stage_events": [_without_none(asdict(event)) for event in timeline.stage_events],
        **({"together": [asdict(action) for action in sorted(together)]} if together else {}),
        **({} if timeline.window is None else {"window": asdict(timeline.window)}),
    }


def _without_none(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value: only those of windows have versions, and updates with a micro-batch."""
    return {key: value for key, value in data.items() if value is not None}


def _transfer_data(transfer: Transfer) -> dict[str, Any]:
    data = asdict(transfer)
    if transfer.count == 1:  # earlier versions know no other number
        del data["count"]
    return data
