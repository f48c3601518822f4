"""Planners that are written in C++, where there is no compiler."""

from __future__ import annotations

import pytest

import dapple_tf as dapple
from dapple_tf.errors import PlanError
from dapple_tf.planner import registry
from tests.dapple_tf.planner.builders import make_cluster, make_profile
from tests.graph_passes.builders import refused


@pytest.mark.parametrize("planner", ["dapple", "autopipe"])
def test_a_planner_in_cpp_is_refused_without_a_compiler(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "load_library", lambda: None)
    with refused(PlanError, f"planner {planner!r} is written in C++", "install g++", "planner 'best'"):
        dapple.plan(make_profile((1, 2, 1, 1, 1)), make_cluster(2), global_batch_size=4, planner=planner)
