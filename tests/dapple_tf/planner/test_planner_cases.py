"""Planner "best" on problems for which another search once found a faster plan."""

from __future__ import annotations

from pathlib import Path

import pytest

import dapple_tf as dapple
from tests.paths import SHARED_PLANNER_CASES

CASES = sorted(SHARED_PLANNER_CASES.iterdir()) if SHARED_PLANNER_CASES.is_dir() else []

pytestmark = pytest.mark.skipif(not CASES, reason="the planner cases (../shared/planner-cases) are not here")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_best_is_within_one_percent_of_the_faster_plan(case: Path) -> None:
    profile, cluster = dapple.Profile.load(case / "profile.json"), dapple.Cluster.load(case / "cluster.json")
    others = [dapple.Plan.load(path) for path in case.glob("*.json") if path.stem not in ("profile", "cluster")]
    batch, overlap = others[0].global_batch_size, others[0].overlap
    found = dapple.plan(profile, cluster, global_batch_size=batch, overlap=overlap)
    known = min(dapple.simulate(other, profile, cluster).step_seconds for other in others)
    assert dapple.simulate(found, profile, cluster).step_seconds <= 1.01 * known
