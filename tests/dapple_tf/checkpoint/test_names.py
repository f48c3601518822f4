"""The number of steps of the newest checkpoint in a folder is read without starting TensorFlow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dapple_tf.checkpoint.names import checkpoint_name, last_steps


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\xff" * 16, id="a head longer than any number of bytes"),
        pytest.param((2**45).to_bytes(8, "little") + b"{}", id="a head longer than the memory"),
        pytest.param((200_000).to_bytes(8, "little") + b"[" * 200_000, id="a head nested too deeply"),
    ],
)
def test_a_damaged_file_has_no_steps(tmp_path: Path, content: bytes) -> None:
    (tmp_path / checkpoint_name(5)).write_bytes(content)
    assert last_steps(str(tmp_path)) == 0


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / checkpoint_name(5))
    assert last_steps(str(tmp_path)) == 0
