"""What ``import dapple_tf as dapple`` gives does not depend on which modules have been imported."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from types import ModuleType

import pytest

import dapple_tf as dapple
from tests.paths import ROOT


@pytest.mark.parametrize("name", dapple.__all__)
def test_every_public_name_is_loaded(name: str) -> None:
    assert isinstance(getattr(dapple, name), ModuleType) == (name in ("errors", "keras"))


def test_plan_is_a_function_after_the_module_of_that_name_was_imported() -> None:
    program = "import dapple_tf.plan, dapple_tf; print(type(dapple_tf.plan).__name__, dapple_tf.plan.__module__)"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["function", "dapple_tf.planner.api"]


def test_dir_lists_the_public_names() -> None:
    assert set(dir(dapple)) == {*dapple.__all__, "__version__"}


def test_the_version_is_that_of_the_installed_package() -> None:
    assert dapple.__version__ == importlib.metadata.version("dapple_tf")
