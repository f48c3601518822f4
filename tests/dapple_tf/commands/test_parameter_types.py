"""``--schedule``: a name, the actions, or a file that contains them."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from dapple_tf.commands.parameter_types import read_schedule
from dapple_tf.errors import ScheduleError

TEXT = "0F0 0B0; 1F0 1B0"


def test_names_and_actions_are_returned_unchanged() -> None:
    for value in ("auto", "zb-h1:D=3", "K=2,1", TEXT, "zigzag"):  # unknown names are refused later
        assert read_schedule(value) == value


def test_a_file_is_read_unless_it_has_the_name_of_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "dapple-a", "auto"):
        Path(name).write_text(TEXT + "\n")
    assert [read_schedule(name) for name in ("mine", "dapple-a", "auto")] == [TEXT, "dapple-a", "auto"]


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match=r"there is no file /absent\.txt"):
        read_schedule("/absent.txt")
    broken = tmp_path / "broken"
    broken.write_text("0F0 0X0")
    with pytest.raises(ScheduleError, match="broken: '0X0' is not an action"):
        read_schedule(str(broken))
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(click.BadParameter, match="cannot be read as text"):
        read_schedule(str(broken))
