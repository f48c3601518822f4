"""The tests of the middle end are found without TensorFlow being imported, which takes seconds."""

from __future__ import annotations

from tests.processes import run_python

COLLECT = """
import sys
import pytest
code = pytest.main(["-q", "-p", "no:cacheprovider", "--collect-only", "tests/graph_passes"])
imported = sorted({"tensorflow", "keras", "horovod"} & sys.modules.keys())
sys.exit(code or (f"imported: {imported}" if imported else 0))
"""


def test_the_tests_of_graph_passes_are_collected_without_tensorflow() -> None:
    assert "passes/test_order.py" in run_python("-c", COLLECT).stdout
