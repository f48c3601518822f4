"""Run the command line, in this process or in one of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dapple_tf.cli import main
from tests.paths import ROOT

TINY_MODEL = f"{Path(__file__).with_name('tiny_model.py')}:tiny"


@dataclass(frozen=True)
class Outcome:
    """What a command returned and printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The JSON object on the last line of stdout, of a command that succeeded."""
        assert self.code == 0, self.stderr
        found = json.loads(self.stdout.splitlines()[-1])
        assert isinstance(found, dict)
        return found


Run = Callable[..., Outcome]


def run_process(*words: object, folder: Path = ROOT) -> Outcome:
    """Run ``dapple`` with these words as a new process, as a user does."""
    command = [sys.executable, "-m", "dapple_tf", *map(str, words)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def run_in_process(*words: object) -> Outcome:
    """Run ``dapple`` with these words in this process; the outcome has what Python wrote, not the libraries in C++.

    Unlike the fixture ``run_here`` it can be called by fixtures that several tests share.
    """
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["dapple", *map(str, words)])
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Outcome(code, stdout.getvalue(), stderr.getvalue())
