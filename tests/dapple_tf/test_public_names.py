"""What ``import dapple_tf as dapple`` gives does not depend on which modules have been imported."""

from __future__ import annotations

import importlib.metadata
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
