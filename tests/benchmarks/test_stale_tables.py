"""``scripts/stale_tables.py``, and the commits in benchmarks/README.md that it reads."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.paths import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stale_tables", ROOT / "scripts" / "stale_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_of_the_benchmarks_names_the_commit_that_it_was_measured_on(script: ModuleType) -> None:
    sections = dict(script.find_sections((ROOT / "benchmarks" / "README.md").read_text()))
    assert len(sections) > 40
    assert [name for name, text in sections.items() if not script._COMMIT.search(text)] == []


def test_a_section_without_a_table_has_no_commit(script: ModuleType) -> None:
    text = "# A\n\n### one\n\ntext\n\n### two\n\nMeasured on commit `1a2b3c4`.\n\n| a |\n|---|\n| 1 |\n"
    assert [name for name, _ in script.find_sections(text)] == ["two"]


def test_an_unknown_commit_is_found(script: ModuleType) -> None:
    assert script.list_changes("0" * 40, {"benchmarks.papers.table5"}) is None
