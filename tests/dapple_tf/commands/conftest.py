"""The fixture ``run_here``: the command line in the process of the tests, which has TensorFlow already."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from dapple_tf.cli import main
from dapple_tf.messages import LOGGER
from tests.dapple_tf.commands.command_line import Outcome, Run


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run ``dapple`` with these words in this process: exit code, stdout and stderr. The logger keeps its level."""
    level = LOGGER.level

    def run(*words: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["dapple", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Outcome(code, *capfd.readouterr())

    yield run
    LOGGER.setLevel(level)
