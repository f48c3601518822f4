"""Saved timelines: valid pictures, traces and pages, and no half-written files."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path

import pytest

from dapple_tf.drawing.save import check_path
from dapple_tf.errors import OutputError
from dapple_tf.timeline.events import StageEvent, Transfer
from dapple_tf.timeline.picture import make_chart
from dapple_tf.timeline.timeline import Timeline
from tests.dapple_tf.timeline.test_timeline import TWO, event

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
def test_a_png_has_valid_chunks_and_is_not_blank(tmp_path: Path, timeline: Timeline) -> None:
    timeline.save(tmp_path / "t.png")
    found = chunks((tmp_path / "t.png").read_bytes())
    width, height, depth = struct.unpack(">IIB", found[0][1][:9])
    assert found[0][0] == b"IHDR"
    assert found[-1] == (b"IEND", b"")
    assert (width > 1000, height > 150, depth) == (True, True, 8)
    pixels = zlib.decompress(b"".join(body for kind, body in found if kind == b"IDAT"))
    assert len(pixels) == height * (1 + 4 * width)  # a filter byte and RGBA
    assert len(set(pixels)) > 2, "something is drawn"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.png"]


def test_each_replica_of_a_stage_has_a_row() -> None:
    chart = make_chart(REPLICATED, "a title")
    assert [(row.name, row.detail, row.network) for row in chart.rows] == [
        ("stage 0, replica 0", "/device:CPU:0", False),
        ("stage 0, replica 1", "/device:CPU:2", False),
        ("stage 1, replica 0", "/device:CPU:1", False),
    ]
    assert [(span.row, span.name, span.kind, span.start, span.end, span.micro_batch) for span in chart.spans] == [
        (0, "0F0", "forward", 0, 1, 0),
        (2, "1F0", "forward", 1, 2, 0),
        (2, "1B0", "backward", 2, 4, 0),
        (0, "0B0", "backward", 4, 6, 0),
        (1, "0F0", "forward", 0, 1.5, 0),
        (1, "0B0", "backward", 4, 5, 0),
    ]
    assert (chart.title, chart.seconds, chart.curves) == ("a title", 6, ())
    assert {row.until for row in chart.rows} == {6}
    marked = [(span.name, span.row) for span in chart.spans if span.critical]
    assert marked == [("0F0", 0), ("1F0", 2), ("1B0", 2), ("0B0", 0)]
    assert [row.name for row in make_chart(TWO).rows] == ["stage 0", "stage 1"]


def test_each_direction_of_a_boundary_with_transfers_has_a_row() -> None:
    more = (StageEvent("allreduce", 1, 0, "/device:CPU:1", 4.0, 5.0), StageEvent("update", None, 0, "CPU:0", 6.0, 7.0))
    timeline = Timeline(TWO.events, (Transfer(1, 0, 0, 4.0, 4.5), Transfer(0, 1, 0, 1.0, 1.5)), more)
    chart = make_chart(timeline)
    assert [(row.name, row.network) for row in chart.rows] == [
        ("stage 0", False),
        ("0 to 1", True),
        ("1 to 0", True),
        ("stage 1", False),
    ]
    assert [(span.row, span.kind, span.start) for span in chart.spans[4:]] == [
        (2, "send-backward", 4.0),
        (1, "send-forward", 1.0),
        (3, "allreduce", 4.0),
    ]


def test_rows_are_in_the_order_of_device_numbers() -> None:
    timeline = Timeline(tuple(event("0F0", device, 0, 1) for device in (10, 9, 2)))
    assert [row.detail for row in make_chart(timeline).rows] == [f"/device:CPU:{i}" for i in (2, 9, 10)]


def test_a_trace_file_is_json(tmp_path: Path) -> None:
    TWO.save(tmp_path / "t.json")
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert names == {2: "stage 0 (/device:CPU:0)", 3: "stage 1 (/device:CPU:1)"}
    assert [(row["name"], row["ts"], row["dur"]) for row in rows if row["ph"] == "X"] == [
        ("0F0", 0, 1e6),
        ("1F0", 1e6, 1e6),
        ("1B0", 2e6, 2e6),
        ("0B0", 4e6, 2e6),
    ]


def test_a_page_is_html(tmp_path: Path) -> None:
    Timeline(TWO.events, title="a title").save(tmp_path / "t.html")
    text = (tmp_path / "t.html").read_text()
    assert "<h1>a title · 6 s, bubble 50.0%</h1>" in text
    assert text.count("<rect class=") == 4


def test_a_suffix_may_have_capital_letters(tmp_path: Path) -> None:
    TWO.save(tmp_path / "T.HTML")
    assert (tmp_path / "T.HTML").read_text().startswith("<!")


def test_a_missing_folder_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"a/t\.png: its folder is missing: make .*/a, or correct the path"):
        TWO.save(tmp_path / "a" / "t.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["t.gif", "t", "t.png.txt"])
def test_other_suffixes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match=f"{name}: a timeline is saved as .png, .html or .json"):
        check_path(tmp_path / name)


def test_a_path_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.png").mkdir()
    with pytest.raises(OutputError, match=r"t\.png is a folder"):
        check_path(tmp_path / "t.png")


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/t\.png: .*/file is a file, not a folder"):
        check_path(tmp_path / "file" / "t.png")


@pytest.mark.parametrize(
    ("refused", "message"), [("t.png", r"t\.png cannot be written"), ("", "the folder of .*t.png")]
)
def test_a_path_without_write_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, message: str
) -> None:
    (tmp_path / "t.png").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / refused)  # root may write anything
    with pytest.raises(OutputError, match=message):
        check_path(tmp_path / "t.png")


@pytest.mark.parametrize("name", ["t.png", "t.json", "t.html"])
def test_a_failure_leaves_the_old_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    target = tmp_path / name
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        TWO.save(target)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "old")]
