"""The tutorials: notebooks whose cells run in order, and print what the notebooks hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS
from tests.paths import ROOT
from tests.processes import environment_without_launchers, needs_horovod


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "name", ["from_fit_to_four_devices", pytest.param("plan_simulate_launch", marks=needs_horovod)]
)
def test_a_notebook_prints_what_it_holds(name: str, tmp_path: Path) -> None:
    """In a process of its own, as a notebook runs."""
    path = DOCS / "tutorials" / f"{name}.ipynb"
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.notebooks", str(path), str(tmp_path)],
        cwd=ROOT,
        env=environment_without_launchers(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads(path.read_text("utf-8"))["cells"]
    held = ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells if _is_code(cell)]
    assert json.loads(done.stdout.splitlines()[-1]) == held


def _is_code(cell: dict[str, Any]) -> bool:
    return bool(cell["cell_type"] == "code")
