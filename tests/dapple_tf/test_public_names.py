"""What ``import dapple_tf as dapple`` gives does not depend on which modules have been imported."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dapple_tf as dapple
from tests.paths import ROOT


@pytest.mark.parametrize("name", dapple.__all__)
def test_every_public_name_is_loaded(name: str) -> None:
    assert isinstance(getattr(dapple, name), ModuleType) == (name in ("errors", "keras"))


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Python sets an imported module as an attribute of its package, in place of the function."""
    modules = {path.stem for path in (ROOT / "dapple_tf").iterdir()} - {"errors", "keras"}
    assert not modules & set(dapple.__all__)


def test_dir_lists_the_public_names() -> None:
    assert set(dir(dapple)) == {*dapple.__all__, "__version__"}


def test_the_version_is_that_of_the_installed_package() -> None:
    assert dapple.__version__ == importlib.metadata.version("dapple_tf")


USES = """
import dapple_tf as dapple

def loss(x: object) -> object: ...

reveal_type(dapple.pipeline(loss, optimizer="adam", stages=2))
reveal_type(dapple.pipeline(optimizer="adam"))
dapple.pipeline(loss, optimizer="adam", mode="sink")
dapple.pipeline(loss, optimizer="adam", stage=3)
"""


def test_type_checkers_know_options_and_results(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text(USES)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent", str(tmp_path / "uses.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    found = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert 'note: Revealed type is "dapple_tf.runtime.step.PipelinedStep"' in found
    assert any(line.endswith('-> dapple_tf.runtime.step.PipelinedStep"') for line in found)
    assert any('Unexpected keyword argument "stage"' in line for line in found)
    assert sum("error: No overload variant" in line for line in found) == 2
