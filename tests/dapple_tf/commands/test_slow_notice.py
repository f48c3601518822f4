"""The notice that something takes long is printed while it runs, and only then."""

import time

import pytest

from dapple_tf.commands.plan import tell_if_slow


def test_what_takes_longer_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with tell_if_slow("still busy", 0.05):
        end = time.monotonic() + 10
        found = ""
        while not found and time.monotonic() < end:
            time.sleep(0.01)
            found = capsys.readouterr().err
    assert found == "dapple: still busy\n"


def test_what_is_quick_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with tell_if_slow("still busy", 0.2):
        pass
    time.sleep(0.4)
    assert capsys.readouterr().err == ""
