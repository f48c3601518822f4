"""Names in the pages exist: modules, functions, attributes, files, make targets, and arguments."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

import pytest

import dapple_tf as dapple
from dapple_tf.graph_passes.ir.graph import Graph, Node
from dapple_tf.planner.api import plan
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.runtime.step import pipeline
from tests.docs.pages import Page, all_paths, read_page, read_source
from tests.paths import ROOT

# The changelog tells of names that are gone.
PATHS = [path for path in all_paths() if path != "CHANGELOG.md"]
PACKAGES = ("dapple_tf", "models", "benchmarks", "tests")
FOLDERS = (*PACKAGES, "graph_passes", "profiler", "docs", "examples", "scripts")
SUFFIXES = {"html", "json", "png", "py", "txt"}  # `timeline.png` is a file
INSTANCES: dict[str, type] = {
    "step": dapple.PipelinedStep,
    "timeline": dapple.Timeline,
    "checkpoints": dapple.Checkpoints,
    "problem": PlanningProblem,
    "node": Node,
    "graph": Graph,
}


@pytest.fixture(params=PATHS)
def page(request: pytest.FixtureRequest) -> Page:
    return read_page(request.param)


def test_every_dotted_name_can_be_imported(page: Page) -> None:
    names = {match[0] for span in page.spans for match in re.finditer(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+", span)}
    names |= set(re.findall(r"^::: ([\w.]+)", page.text, re.MULTILINE))
    missing = sorted(name for name in names if "/" not in name and not _exists(name))
    assert not missing


def test_every_name_of_the_public_api_exists(page: Page) -> None:
    text = page.prose + "".join(block.text for block in page.blocks)
    names = set(re.findall(r"\bdapple\.(\w+)", text)) - {"keras"} - SUFFIXES
    missing = sorted(names - set(dir(dapple)))
    assert not missing


def test_every_attribute_of_a_step_a_timeline_or_a_problem_exists(page: Page) -> None:
    text = "\n".join([*page.spans, *(block.text for block in page.blocks if block.language == "python")])
    found = re.findall(rf"\b({'|'.join(INSTANCES)})\.([a-z]\w*)", text)
    members = {(name, member) for name, member in found if member not in SUFFIXES}
    assert not sorted(f"{name}.{member}" for name, member in members if not _has(INSTANCES[name], member))


def test_every_path_of_the_project_exists(page: Page) -> None:
    missing = []
    for span in page.spans:
        match = re.fullmatch(rf"((?:{'|'.join(FOLDERS)})/[\w./-]*)(?::(\w+))?", span)
        if match and not _is_file_with(match[1], match[2]):
            missing.append(span)
    assert not missing


def test_every_make_target_exists(page: Page) -> None:
    text = "\n".join([*page.spans, *(block.text for block in page.blocks if not block.language)])
    targets = set(re.findall(r"^\.?([\w-]+):(?!=)", read_source("Makefile"), re.MULTILINE))
    called = set(re.findall(r"^\s*make ([a-z][\w-]*)", text, re.MULTILINE))
    assert called <= targets


@pytest.mark.parametrize(("path", "function"), [("docs/reference/options.md", pipeline), ("docs/guide/plan.md", plan)])
def test_the_guide_lists_every_argument(path: str, function: Any) -> None:
    listed = re.findall(r"^\| `(\w+)`", read_page(path).text, re.MULTILINE)
    others = (
        {"profile", "cluster", "planner", "options"} if function is plan else {"loss_fn", "optimizer", "example_batch"}
    )
    assert set(inspect.signature(function).parameters) - others <= set(listed)


def test_every_error_has_a_place_in_the_reference() -> None:
    assert "::: dapple_tf.errors" in read_page("docs/reference/api.md").text


def _exists(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not _has(found, part):
                return False
            found = getattr(found, part, None)
        return True
    return False


def _has(owner: Any, name: str) -> bool:
    """Whether an object, or an instance of a class, has the attribute."""
    if hasattr(owner, name):
        return True
    if dataclasses.is_dataclass(owner):
        return name in {field.name for field in dataclasses.fields(owner)}
    return inspect.isclass(owner) and f"self.{name} =" in inspect.getsource(owner)


def _is_file_with(path: str, name: str | None) -> bool:
    found = ROOT / path
    if not found.exists():
        return False
    return name is None or re.search(rf"^def {name}\b", found.read_text("utf-8"), re.MULTILINE) is not None
