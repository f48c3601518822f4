"""Save a measured timeline: a PNG to look at, or a JSON for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dapple_tf.errors import UsageError
from dapple_tf.files import replacing, write_atomically
from dapple_tf.runtime.timeline import Timeline

_COLOURS = {"F": "#4f81bd", "B": "#6aa84f"}  # forward blue, backward green, as in the DAPPLE paper's figures
_SUFFIXES = (".png", ".json")


def check_path(path: str | os.PathLike[str]) -> Path:
    """The path, if a timeline can be saved there; UsageError before any work is done if not."""
    target = Path(path)
    if target.suffix not in _SUFFIXES:
        raise UsageError(f"{target}: a timeline is saved as {' or '.join(_SUFFIXES)}")
    if target.is_dir() or (target.exists() and not os.access(target, os.W_OK)):
        raise UsageError(f"{target} cannot be written")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target}: its folder cannot be made: {error}") from error
    if not os.access(target.parent, os.W_OK):
        raise UsageError(f"the folder of {target} cannot be written")
    return target


def save_timeline(timeline: Timeline, path: str | os.PathLike[str], title: str = "") -> None:
    """Save as the path's suffix says (.png or .json)."""
    target = check_path(path)
    if target.suffix == ".json":
        write_atomically(target, json.dumps(trace_events(timeline)))
    else:
        _draw(timeline, target, title)


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The Chrome trace format: one row a device, times in microseconds."""
    devices = sorted({event.device for event in timeline.events}, key=_device_order)
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": device}}
        for i, device in enumerate(devices)
    ]
    for event in timeline.events:
        rows.append(
            {
                "ph": "X",
                "name": str(event.action),
                "cat": "forward" if event.action.kind == "F" else "backward",
                "pid": 0,
                "tid": devices.index(event.device),
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
                "args": {"replica": event.replica},
            }
        )
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _device_order(name: str) -> tuple[str, int]:
    kind, _, index = name.rpartition(":")
    return kind, int(index)


def _draw(timeline: Timeline, path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    places = sorted({(e.action.stage, e.replica) for e in timeline.events})
    figure, axes = plt.subplots(figsize=(12, 1.2 + 0.6 * len(places)))
    for event in timeline.events:
        row, width = places.index((event.action.stage, event.replica)), (event.end - event.start) * 1e3
        colour = _COLOURS[event.action.kind]
        axes.barh(row, width, left=event.start * 1e3, height=0.8, color=colour, edgecolor="white", linewidth=0.8)
        if width > timeline.seconds * 1e3 / 90:
            middle = event.start * 1e3 + width / 2
            axes.text(
                middle,
                row,
                str(event.action.micro_batch),
                ha="center",
                va="center",
                color="white",
                fontsize=9,
            )
    many = len({replica for _, replica in places}) > 1
    names = [f"stage {stage}" + (f", replica {replica}" if many else "") for stage, replica in places]
    axes.set_yticks(range(len(places)), names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the step's first forward (numbers are micro-batches)")
    axes.set_xlim(0, timeline.seconds * 1e3)
    axes.set_title(title + f"   {timeline.seconds * 1e3:.0f} ms, {timeline.bubble:.0%} idle", fontsize=11, loc="left")
    axes.legend(
        handles=[Patch(color=_COLOURS["F"], label="forward"), Patch(color=_COLOURS["B"], label="backward")],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=2,
        frameon=False,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    with replacing(path) as part:
        figure.savefig(part, dpi=130, format="png")
    plt.close(figure)
