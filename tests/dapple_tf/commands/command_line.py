"""Run the command line, in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
