"""Memory of a job: every rank measures its own, and each has the report of all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dapple_tf.distributed.launches import Launches
from tests.dapple_tf.distributed.native.peers import needs_library
from tests.processes import needs_horovod

pytestmark = needs_horovod


TENSOR = 1024 * 256 * 4  # bytes of a micro-batch between the stages


@pytest.fixture
def reports(launches: Launches) -> list[dict[str, Any]]:
    """The reports of two ranks."""
    return [result["report"] for result in launches.results("two ranks", "memory_report")]


def test_every_rank_has_the_same_report(reports: list[dict[str, Any]]) -> None:
    assert reports[0] == reports[1]
    assert reports[0]["measured"] is None  # each stage is measured by itself


def test_stages_are_observed_to_hold_k_micro_batches(reports: list[dict[str, Any]]) -> None:
    assert [(stage["most_held"], stage["seen"]) for stage in reports[0]["stages"]] == [(9, 9), (8, 8)]


def test_the_memory_of_each_rank_is_predicted_within_a_tenth(reports: list[dict[str, Any]]) -> None:
    """K stashes of four tensors of 1 MB, and the tensors of the micro-batch at work."""
    for stage, held in zip(reports[0]["stages"], (9, 8), strict=True):
        assert stage["in_step"] > held * 4 * TENSOR
        assert stage["in_step"] == pytest.approx(stage["measured"]["above_start"], rel=0.1)


def test_the_report_says_what_each_process_held_before_any_model(reports: list[dict[str, Any]]) -> None:
    bases = reports[0]["before_model"]
    assert len(bases) == 2
    assert all(100e6 < size < 2e9 for size in bases)  # TensorFlow alone takes some hundred MB
    assert f"each process held before any model, beside the above: {round(bases[0] / 1e6)}" in reports[0]["text"]


@needs_library
def test_messages_in_flight_are_bounded_by_the_schedule(launches: Launches) -> None:
    """Stage 0 is at most K_0 = 9 micro-batches ahead, so at most 9 activations and 9 gradients are in flight."""
    for result in launches.results("two ranks", "memory_report"):
        assert TENSOR <= result["in_flight"] <= (9 + 9) * TENSOR
