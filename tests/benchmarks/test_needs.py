"""A benchmark that cannot run on this machine says why, and is no failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.emulated_hosts import find_hindrance
from tests.paths import ROOT


def test_what_cannot_run_here_is_left_out_with_the_reason(tmp_path: Path) -> None:
    """There is no mpirun, nor any other program, where it looks for them."""
    names = ["hosts", "ranks", "startup"]
    environment = {**os.environ, "PATH": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "benchmarks", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    told = "left out: it needs Horovod and Open MPI: make horovod"
    assert done.stdout.endswith("".join(f"### {n}\n\n`python -m benchmarks {n}`\n\n{told}\n\n" for n in names))
    assert done.returncode == 0


def test_programs_that_hosts_need_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_hindrance() == "hosts on one machine need ip and tc and mpirun (iproute2, Open MPI)"
