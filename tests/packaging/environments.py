"""Virtual environments that have dapple_tf installed from its wheel, and that the tests run programs in.

They take TensorFlow and the other requirements from the environment that runs the tests, so nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

INSTALLED = Path(sysconfig.get_paths()["purelib"])
"""The site-packages folder of the environment that runs the tests."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in ``folder``."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def run(
        self, program: str, *arguments: str, folder: Path, timeout: float, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment, such as ``python`` or ``dapple``, in a working folder."""
        return run([str(self.folder / "bin" / program), *arguments], folder, timeout, variables)


def run(
    command: Sequence[str], folder: Path, timeout: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a working folder, with no PYTHONPATH that would find the checkout."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        command,
        cwd=folder,
        env={**inherited, "TF_CPP_MIN_LOG_LEVEL": "3", **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def check(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command printed to stdout; fail with all its output unless it exited with 0."""
    assert done.returncode == 0, f"{done.args} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_source(folder: Path) -> None:
    """Copy the checkout, so that a build leaves nothing in it; without .git and what earlier builds and runs wrote."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "out", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=left_out)


def make_environment(folder: Path, wheel: Path, requirements: Path) -> None:
    """Make a virtual environment, install the wheel, and add the folder that holds what dapple_tf requires.

    A line of a .pth file adds a folder to sys.path without the .pth files in it: an editable installation of the
    checkout in that folder is not found.
    """
    check(run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent, 60))
    environment = Environment(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(environment.python), "--disable-pip-version-check"]
    check(run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], folder.parent, 60))
    (environment.site_packages / "requirements.pth").write_text(f"{requirements}\n")


def link_all_but_tensorflow(folder: Path) -> None:
    """Fill a folder with links to all that is installed, except TensorFlow and what needs it or this checkout."""
    folder.mkdir()
    for entry in INSTALLED.iterdir():
        if not entry.name.startswith(("tensorflow", "horovod", "dapple_tf", "__editable__")):
            (folder / entry.name).symlink_to(entry)
