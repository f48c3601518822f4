"""The site builds without a warning, is searched when it is opened from the folder, and fits the window."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.browser import find_cut_pages, needs_chromium, show_page
from tests.processes import run_python

needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings_handlers")),
    reason="mkdocs is not installed: make docs",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    words = ("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder)
    run = run_python(*words, variables={"NO_MKDOCS_2_WARNING": "1"})  # a notice of the theme about its successor
    warnings = [line for line in run.stderr.splitlines() if "absl::InitializeLog" not in line and "oneDNN" not in line]
    assert (run.stdout, warnings) == ("", [])
    return folder


@needs_mkdocs
def test_the_generated_pages_are_in_the_site(site: Path) -> None:
    for page, text in [
        ("architecture/ops.html", "forward"),
        ("reference/cli.html", "--micro-batches"),
        ("reference/api.html", "DappleWarning"),
        ("tutorials/plan_simulate_launch.html", "analytic_profile"),
    ]:
        assert text in (site / page).read_text("utf-8")
    assert (site / "tutorials" / "plan_simulate_launch.ipynb").exists()


@needs_mkdocs
def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\s\">]+)", path.read_text("utf-8"))
        loaded += re.findall(r"<link[^>]* rel=\"?stylesheet[^>]* href=\"?(https?:[^\s\">]+)", path.read_text("utf-8"))
        assert not loaded, path


@needs_mkdocs
@needs_chromium
def test_a_page_that_is_opened_from_the_folder_can_be_searched(site: Path, tmp_path: Path) -> None:
    page = show_page(f"{(site / 'index.html').as_uri()}?q=stash", tmp_path)
    results = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', page)
    assert any("memory.html" in result for result in results)


@needs_mkdocs
@needs_chromium
def test_no_page_is_wider_than_its_window(site: Path, tmp_path: Path) -> None:
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    assert find_cut_pages(pages, [1280, 400], tmp_path) == []
