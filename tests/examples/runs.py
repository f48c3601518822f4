"""Run examples in a process of their own, as users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT


def run_examples(folder: Path, *programs: str) -> dict[str, str]:
    """Run programs of ``examples/`` in one new process; return what each printed, by its path in ``examples/``."""
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-m", "tests.examples.run_examples", str(folder)]
        + [f"examples/{program}" for program in programs],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    printed: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return {path.removeprefix("examples/"): text for path, text in printed.items()}
