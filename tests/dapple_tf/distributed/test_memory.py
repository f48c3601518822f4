"""Memory of a job: every rank measures its own, and each finds that of all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import needs_horovod, run_ranks

pytestmark = needs_horovod


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return [
        json.loads(rank.stdout) for rank in run_ranks(["-m", "tests.dapple_tf.distributed.programs.memory_ranks"], 2)
    ]


def test_every_rank_finds_the_same_report(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0] == ranks[1]
    assert ranks[0]["measured"] is None  # each stage is measured by itself


def test_stages_are_seen_to_hold_k_micro_batches(ranks: list[dict[str, Any]]) -> None:
    assert [(stage["most_held"], stage["seen"]) for stage in ranks[0]["stages"]] == [(9, 9), (8, 8)]


def test_each_rank_is_predicted_within_a_tenth(ranks: list[dict[str, Any]]) -> None:
    """K stashes of four tensors of 1 MB, and what runs beside."""
    for stage, held in zip(ranks[0]["stages"], (9, 8), strict=True):
        assert stage["in_step"] > held * 4 * 1024 * 256 * 4
        assert stage["in_step"] == pytest.approx(stage["measured"]["above_start"], rel=0.1)
