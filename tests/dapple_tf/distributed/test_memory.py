"""Memory of a job: every rank measures its own, and each has the report of all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dapple_tf.distributed.launches import Launches
from tests.processes import needs_horovod

pytestmark = needs_horovod


@pytest.fixture
def reports(launches: Launches) -> list[dict[str, Any]]:
    """The reports of two ranks."""
    return launches.results("two ranks", "memory_report")


def test_every_rank_has_the_same_report(reports: list[dict[str, Any]]) -> None:
    assert reports[0] == reports[1]
    assert reports[0]["measured"] is None  # each stage is measured by itself


def test_stages_are_observed_to_hold_k_micro_batches(reports: list[dict[str, Any]]) -> None:
    assert [(stage["most_held"], stage["seen"]) for stage in reports[0]["stages"]] == [(9, 9), (8, 8)]


def test_the_memory_of_each_rank_is_predicted_within_a_tenth(reports: list[dict[str, Any]]) -> None:
    """K stashes of four tensors of 1 MB, and the tensors of the micro-batch at work."""
    for stage, held in zip(reports[0]["stages"], (9, 8), strict=True):
        assert stage["in_step"] > held * 4 * 1024 * 256 * 4
        assert stage["in_step"] == pytest.approx(stage["measured"]["above_start"], rel=0.1)
