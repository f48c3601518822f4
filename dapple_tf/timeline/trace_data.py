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
            {**asdict(e.action), "replica": e.replica, "device": e.device, "start": e.start, "end": e.end}
            for e in timeline.events
        ],
        "transfers": [_transfer_data(transfer) for transfer in timeline.transfers],
        "stage_events": [asdict(event) for event in timeline.stage_events],
        **({"together": [asdict(action) for action in sorted(together)]} if together else {}),
    }


def _transfer_data(transfer: Transfer) -> dict[str, Any]:
    data = asdict(transfer)
    if transfer.count == 1:  # earlier versions know no other number
        del data["count"]
    return data
