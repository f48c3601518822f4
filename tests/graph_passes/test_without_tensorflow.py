"""The tests of the middle end are found without TensorFlow being imported, which takes seconds."""

from __future__ import annotations

import subprocess
import sys

from tests.paths import ROOT

COLLECT = """
import sys
import pytest
code = pytest.main(["-q", "-p", "no:cacheprovider", "--collect-only", "tests/graph_passes"])
imported = sorted({"tensorflow", "keras", "horovod"} & sys.modules.keys())
sys.exit(code or (f"imported: {imported}" if imported else 0))
"""


def test_the_tests_of_graph_passes_are_collected_without_tensorflow() -> None:
    run = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passes/test_order.py" in run.stdout
