"""The tests of the middle end are found where TensorFlow cannot be imported."""

from __future__ import annotations

import subprocess
import sys

from tests.paths import ROOT

COLLECT = """
import sys
for name in ("tensorflow", "keras", "horovod"):
    sys.modules[name] = None  # importing it raises ImportError
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--collect-only", "tests/graph_passes"]))
"""


def test_the_tests_of_graph_passes_are_collected_without_tensorflow() -> None:
    run = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passes/test_order.py" in run.stdout
