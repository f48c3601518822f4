"""The wheel and the environments, made once a run: by one process of pytest-xdist, for which the others wait."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.environments import (
    INSTALLED,
    Environment,
    check,
    copy_source,
    link_all_but_tensorflow,
    make_environment,
    run,
)

LIBRARY = "dapple_tf/simulator/native/library.py"  # it has the options of the planner's compiler

Make = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that has a folder of the given name made, unless another test process has made it."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def make_once(name: str, make: Callable[[Path], None]) -> Path:
        folder, made = shared / name, shared / f"{name}.made"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # half made, by a process that failed
                make(folder)
                made.touch()
        return folder

    return make_once


@pytest.fixture(scope="session")
def wheel(make_once: Make) -> Path:
    """The wheel, built from the source distribution, which is built from a copy of the checkout."""

    def build(folder: Path) -> None:
        copy_source(folder)
        compile_quickly(folder / LIBRARY)
        check(run([sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."], folder, 120))

    (found,) = (make_once("build", build) / "dist").glob("*.whl")
    return found


def compile_quickly(library: Path) -> None:
    """Have the planner's library compiled without optimisation, which takes most of the time of a build."""
    text = library.read_text(encoding="utf-8")
    assert '"-O3"' in text
    library.write_text(text.replace('"-O3"', '"-O0"'), encoding="utf-8")


@pytest.fixture(scope="session")
def environment(make_once: Make, wheel: Path) -> Environment:
    """An environment with dapple_tf from the wheel, and TensorFlow."""
    return Environment(make_once("environment", lambda folder: make_environment(folder, wheel, INSTALLED)))


@pytest.fixture(scope="session")
def environment_without_tensorflow(make_once: Make, wheel: Path) -> Environment:
    """An environment with dapple_tf from the wheel and all that it requires, but no TensorFlow."""
    requirements = make_once("requirements-without-tensorflow", link_all_but_tensorflow)
    return Environment(
        make_once("environment-without-tensorflow", lambda folder: make_environment(folder, wheel, requirements))
    )
