"""The tutorials: notebooks whose cells run in order, and print what the notebooks hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS
from tests.processes import needs_horovod, run_python


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "name", ["from_fit_to_four_devices", pytest.param("plan_simulate_launch", marks=needs_horovod)]
)
def test_a_notebook_prints_what_it_holds(name: str, tmp_path: Path) -> None:
    """In a process of its own, as a notebook runs."""
    path = DOCS / "tutorials" / f"{name}.ipynb"
    done = run_python("-m", "tests.docs.notebooks", path, tmp_path, timeout_seconds=600)
    cells = json.loads(path.read_text("utf-8"))["cells"]
    held = ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells if _is_code(cell)]
    assert json.loads(done.stdout.splitlines()[-1]) == held


def _is_code(cell: dict[str, Any]) -> bool:
    return bool(cell["cell_type"] == "code")
