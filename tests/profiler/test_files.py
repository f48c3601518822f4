"""Files are replaced completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from profiler.files import atomic_replacement, write_atomically


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
