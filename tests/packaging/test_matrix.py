"""The script of `make matrix`: what it says before it makes an environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT


def run_matrix(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script where there is no Python but the system's tools."""
    tools = folder / "bin"
    tools.mkdir()
    (tools / "dirname").symlink_to("/usr/bin/dirname")
    return subprocess.run(
        ["/bin/bash", ROOT / "scripts" / "matrix.sh", *arguments],
        env={"PATH": str(tools), "PYENV_ROOT": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("options", [[], ["--jobs"]], ids=str)
def test_a_corner_whose_python_is_not_found_is_skipped_and_a_run_without_corners_fails(
    options: list[str], tmp_path: Path
) -> None:
    run = run_matrix(tmp_path, *options, "python3.13")
    assert run.stderr.splitlines() == [
        "corner python3.13 is skipped: python3.13 with the module venv is neither on PATH nor one of pyenv's",
        "no corner was tested",
    ]
    assert run.returncode == 1


def test_a_corner_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    run = run_matrix(tmp_path, "python2.7")
    assert run.stderr == "there is no corner python2.7; there are oldest python3.10 python3.12 python3.13\n"
    assert run.returncode == 2
