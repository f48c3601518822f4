"""Installations as users do them, with all requirements from the package index: minutes, and some 2 GB of disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.packaging.environments import Environment, check, copy_source, run
from tests.packaging.test_wheel import PROGRAM

pytestmark = pytest.mark.timeout(2400)


def test_pip_installs_the_extra_cpu_into_an_empty_environment_that_then_trains(tmp_path: Path) -> None:
    copy_source(tmp_path / "source")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tiny.py").write_text(PROGRAM, encoding="utf-8")
    check(run([sys.executable, "-m", "venv", str(tmp_path / "environment")], tmp_path, 120))
    environment = Environment(tmp_path / "environment")
    check(environment.run("pip", "install", "--quiet", ".[cpu]", folder=tmp_path / "source", timeout=1800))
    check(environment.run("pip", "check", folder=tmp_path, timeout=60))
    done = environment.run("python", "tiny.py", folder=tmp_path / "elsewhere", timeout=300)
    origin, losses = check(done).splitlines()[-2:]
    assert Path(origin).is_relative_to(environment.site_packages)
    first, last = map(float, losses.split())
    assert last < first / 2


def test_the_wheel_is_built_in_an_environment_of_its_own(tmp_path: Path) -> None:
    copy_source(tmp_path / "source")
    check(run([sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), "."], tmp_path / "source", 600))
    assert [path.suffix for path in sorted((tmp_path / "dist").iterdir())] == [".whl", ".gz"]
