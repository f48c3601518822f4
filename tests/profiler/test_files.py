"""Files are replaced completely or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dapple_tf.profiler.files import atomic_replacement, find_folder_problem, find_write_problem, write_atomically


def test_a_file_is_written_and_no_other_file_is_left(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.txt", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "new")]


def fail_half_way(part: Path) -> None:
    part.write_text("half of the n")
    raise ZeroDivisionError


def test_a_failure_while_writing_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_replacement(target) as part:
        fail_half_way(part)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "old")]


def test_a_text_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(target, "half \ud800")  # a lone surrogate has no encoding
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "old")]


def test_the_old_file_exists_until_the_new_one_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with atomic_replacement(target) as part:
        part.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"


def test_a_link_in_place_of_the_part_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / f"a.txt.{os.getpid()}.part").symlink_to(precious)
    write_atomically(tmp_path / "a.txt", "new")
    assert precious.read_text() == "keep"
    assert (tmp_path / "a.txt").read_text() == "new"


def test_a_link_stays_and_the_file_that_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "link").symlink_to("a.txt")
    (tmp_path / "new").symlink_to("b.txt")
    write_atomically(tmp_path / "link", "new")
    write_atomically(tmp_path / "new", "another")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a.txt").read_text() == "new"
    assert (tmp_path / "b.txt").read_text() == "another"


@pytest.mark.parametrize("name", ["pipe", "link to a pipe"])
def test_a_pipe_is_never_replaced(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to a pipe").symlink_to("pipe")
    with pytest.raises(OSError, match="it is a device or a pipe, not a file"):
        write_atomically(tmp_path / name, "text")
    assert (
        find_write_problem(tmp_path / name)
        == f"{tmp_path / name} cannot be written: it is a device or a pipe, not a file"
    )
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("path", ["", ".", "/", "folder"])
def test_a_folder_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(Path(path), "text")


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 254 + "\u00e4")[:254]
    assert find_write_problem(target) == ""
    write_atomically(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def describe_null(call: Callable[[str], object]) -> str:
    """Return how this Python refuses a path with a null character."""
    with pytest.raises(ValueError, match="embedded null") as caught:
        call("\0")
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("", "the path of the file to write is empty"),
        ("folder", "folder is a folder"),
        ("file/a", "file/a: file is a file, not a folder"),
        ("absent/b/a", "absent/b/a: its folder is missing: make absent/b, or correct the path"),
        ("n" * 256, "n cannot be written: File name too long"),
        ("a\0b", f"cannot be written: {describe_null(os.lstat)}"),
        ("loop", "loop cannot be written: Too many levels of symbolic links"),
        ("/proc/a.txt", "/proc/a.txt cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_told_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("")
    Path("loop").symlink_to("loop")
    assert find_write_problem(path).endswith(told)
    assert sorted(os.listdir()) == ["file", "folder", "loop"]


def test_a_check_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    assert find_write_problem(tmp_path / "a.txt") == ""
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "old")]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("file", "it is a file, not a folder"),
        ("file/below", "Not a directory"),
        ("a\0b", describe_null(os.mkdir)),
        ("/proc", "No such file or directory"),
    ],
)
def test_what_cannot_be_a_folder_is_told_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert find_folder_problem(path) == told


def test_a_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    assert find_folder_problem(tmp_path / "a" / "b") == ""
    assert list((tmp_path / "a" / "b").iterdir()) == []
