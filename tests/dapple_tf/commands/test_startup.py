"""The start of TensorFlow: its libraries' messages are hidden, unless the start fails."""

from __future__ import annotations

import os

import pytest

from dapple_tf.commands.startup import hide_startup_messages


def test_messages_of_a_start_that_succeeds_are_hidden(capfd: pytest.CaptureFixture[str]) -> None:
    with hide_startup_messages():
        os.write(2, b"a note on the processor\n")
        print("a result")
    os.write(2, b"afterwards\n")
    assert capfd.readouterr() == ("a result\n", "afterwards\n")


def test_messages_of_a_start_that_fails_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        os.write(2, b"the reason\n")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), hide_startup_messages():
        fail()
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "the reason\nafterwards\n"
