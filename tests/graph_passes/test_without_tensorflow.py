"""The tests of the middle end run where TensorFlow cannot be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.paths import ROOT

COLLECT = """
import sys
for name in ("tensorflow", "keras", "horovod"):
    sys.modules[name] = None  # importing it raises ImportError
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("arguments", [["--collect-only", "tests/graph_passes"], ["tests/graph_passes/ir"]])
def test_the_tests_of_graph_passes_need_no_tensorflow(arguments: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", COLLECT, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_graph.py" in run.stdout or "passed" in run.stdout
