"""Timelines on disk: a picture that is one, a trace that others can read, and no half-written files."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path

import pytest

from dapple_tf.errors import UsageError
from dapple_tf.runtime.picture import check_path, save_timeline, trace_events
from dapple_tf.runtime.timeline import Timeline
from tests.dapple_tf.test_timeline import TWO, event

REPLICATED = Timeline((*TWO.events, event("0F0", 2, 0.0, 1.5, replica=1), event("0B0", 2, 4.0, 5.0, replica=1)))


def chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """The chunks of a PNG, each with its checksum checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    found, position = [], 8
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        kind, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        (checksum,) = struct.unpack(">I", data[position + 8 + length : position + 12 + length])
        assert checksum == zlib.crc32(kind + body)
        found.append((kind, body))
        position += 12 + length
    return found


@pytest.mark.parametrize("timeline", [TWO, REPLICATED])
def test_a_png_is_a_real_one_with_the_papers_colours(tmp_path: Path, timeline: Timeline) -> None:
    save_timeline(timeline, tmp_path / "t.png", "a title")
    found = chunks((tmp_path / "t.png").read_bytes())
    width, height, depth = struct.unpack(">IIB", found[0][1][:9])
    assert found[0][0] == b"IHDR"
    assert found[-1] == (b"IEND", b"")
    assert (width > 1000, height > 150, depth) == (True, True, 8)
    pixels = zlib.decompress(b"".join(body for kind, body in found if kind == b"IDAT"))
    assert len(pixels) == height * (1 + 4 * width)  # a filter byte and RGBA
    assert len(set(pixels)) > 2, "something is drawn"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.png"]


def test_a_trace_has_an_event_an_action_in_microseconds() -> None:
    rows = trace_events(REPLICATED)["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert names == {0: "/device:CPU:0", 1: "/device:CPU:1", 2: "/device:CPU:2"}
    events = [row for row in rows if row["ph"] == "X"]
    assert len(events) == len(REPLICATED.events)
    backward = next(row for row in events if row["name"] == "1B0")
    assert (backward["ts"], backward["dur"], backward["tid"], backward["cat"]) == (2e6, 2e6, 1, "backward")
    assert {row["args"]["replica"] for row in events if row["tid"] == 2} == {1}


def test_devices_are_in_the_order_of_their_numbers() -> None:
    timeline = Timeline(tuple(event("0F0", device, 0, 1) for device in (10, 9, 2)))
    rows = trace_events(timeline)["traceEvents"]
    assert [row["args"]["name"] for row in rows if row["ph"] == "M"] == [f"/device:CPU:{i}" for i in (2, 9, 10)]


def test_a_trace_file_is_json(tmp_path: Path) -> None:
    save_timeline(TWO, tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    assert data == json.loads(json.dumps(trace_events(TWO)))
    assert data["displayTimeUnit"] == "ms"


def test_folders_are_made(tmp_path: Path) -> None:
    assert check_path(tmp_path / "a" / "b" / "t.png") == tmp_path / "a" / "b" / "t.png"
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("name", ["t.gif", "t", "t.png.txt"])
def test_other_kinds_of_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: a timeline is saved as .png or .json"):
        check_path(tmp_path / name)


def test_a_folder_in_the_files_place(tmp_path: Path) -> None:
    (tmp_path / "t.png").mkdir()
    with pytest.raises(UsageError, match=r"t\.png cannot be written"):
        check_path(tmp_path / "t.png")


@pytest.mark.parametrize("place", ["file/t.png", "file/below/t.png"])
def test_a_file_in_the_folders_place(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"{place}: its folder cannot be made: "):
        check_path(tmp_path / place)


@pytest.mark.parametrize(
    ("refused", "message"), [("t.png", r"t\.png cannot be written"), ("", "the folder of .*t.png")]
)
def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, message: str) -> None:
    (tmp_path / "t.png").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / refused)  # root may write anything
    with pytest.raises(UsageError, match=message):
        check_path(tmp_path / "t.png")


@pytest.mark.parametrize("name", ["t.png", "t.json"])
def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    target = tmp_path / name
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        save_timeline(TWO, target)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "old")]
