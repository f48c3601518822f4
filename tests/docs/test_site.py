"""The site builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings_handlers")),
    reason="mkdocs is not installed: make docs",
)


@needs_mkdocs
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # a notice of the theme about its successor
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    for page, text in [("architecture/ops.html", "forward"), ("reference/cli.html", "--micro-batches")]:
        assert text in (tmp_path / page).read_text("utf-8")
    assert "DappleWarning" in (tmp_path / "reference" / "api.html").read_text("utf-8")
