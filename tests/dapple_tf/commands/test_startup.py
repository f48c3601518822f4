"""The start of TensorFlow: its libraries' messages are hidden, unless the start fails."""

from __future__ import annotations

import logging
import os
import sys

import pytest

from dapple_tf.commands.startup import hide_startup_messages
from dapple_tf.distributed.process_exit import print_line


def test_messages_of_a_start_that_succeeds_are_hidden(capfd: pytest.CaptureFixture[str]) -> None:
    with hide_startup_messages():
        os.write(2, b"a note on the processor\n")
        print("a result")
    os.write(2, b"afterwards\n")
    assert capfd.readouterr() == ("a result\n", "afterwards\n")


def test_what_python_says_during_the_start_is_shown_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """The watch of the start ends the process past all handlers, so that nothing could show it later."""
    before = sys.stderr
    with hide_startup_messages():
        os.write(2, b"a note on the processor\n")
        print_line("rank 2 has been stopped")
        kept = logging.StreamHandler()
        assert capfd.readouterr().err == "dapple: rank 2 has been stopped\n"
    assert sys.stderr is before
    kept.emit(logging.makeLogRecord({"msg": "a later message"}))
    assert capfd.readouterr().err == "a later message\n"


def test_messages_of_a_start_that_fails_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        os.write(2, b"the reason\n")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), hide_startup_messages():
        fail()
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "the reason\nafterwards\n"
