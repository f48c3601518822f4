"""Every benchmark can be imported; one whose requirements are missing is left out with the reason."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.emulated_hosts import find_missing_requirement
from benchmarks.needs import NEEDS
from tests.paths import ROOT
from tests.processes import run_python

LEFT_OUT = "left out: it needs Horovod and Open MPI: make horovod"
NAMES = ["hosts", "ranks", "startup"]
WANTED = "".join(f"### {name}\n\n`python -m benchmarks {name}`\n\n{LEFT_OUT}\n\n" for name in NAMES)


@pytest.mark.parametrize(
    "path",
    sorted([*(ROOT / "benchmarks").glob("[a-z]*.py"), *(ROOT / "benchmarks" / "papers").glob("[a-z]*.py")]),
    ids=lambda path: path.stem,
)
def test_every_file_can_be_imported(path: Path) -> None:
    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_every_benchmark_has_its_file_and_its_section_in_the_readme() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    for name, module in BENCHMARKS.items():
        assert module.__name__ in (f"benchmarks.{name}", f"benchmarks.papers.{name}")
        assert callable(module.run)
        assert re.search(rf"\n### {name}\n\n(Measured on commit `\w+`\.\n\n)?`python -m benchmarks {name}`", readme), (
            name
        )
    assert set(NEEDS) <= set(BENCHMARKS)


def test_an_unknown_name_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "tabel5"])
    assert main() == 2
    assert "no benchmark is called 'tabel5'; there are pipelining, profile, " in capsys.readouterr().err


def test_a_benchmark_that_cannot_run_here_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no mpirun
    monkeypatch.setattr(sys, "argv", ["benchmarks", *NAMES])
    assert main() == 0
    assert capsys.readouterr().out.endswith(WANTED)


def test_the_benchmarks_start_as_a_module(tmp_path: Path) -> None:
    done = run_python("-m", "benchmarks", *NAMES, variables={"PATH": str(tmp_path)})
    assert done.stdout.endswith(WANTED)


def test_programs_that_hosts_need_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_missing_requirement() == "hosts on one machine need ip and tc and mpirun (iproute2, Open MPI)"
