"""Run examples in a process of their own, as users do."""

from __future__ import annotations

import json
from pathlib import Path

from tests.processes import run_python


def run_examples(folder: Path, *programs: str) -> dict[str, str]:
    """Run programs of ``examples/`` in one new process; return what each printed, by its path in ``examples/``."""
    paths = [f"examples/{program}" for program in programs]
    words = ("-W", "error::UserWarning", "-m", "tests.examples.run_examples", folder, *paths)
    run = run_python(*words, timeout_seconds=240)
    printed: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return {path.removeprefix("examples/"): text for path, text in printed.items()}
