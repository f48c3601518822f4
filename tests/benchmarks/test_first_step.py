"""The benchmark of the first step: its rows, and a measurement of a small BERT."""

from __future__ import annotations

import pytest

from benchmarks.first_step import PLAIN, Cost, Size, compare, measure_in_process
from dapple_tf.backend.build_times import PHASES
from tests.requirements import needs_keras_hub

PLAIN_COST = Cost({"trace": 20.0, "first run": 20.0}, memory=2_000_000_000, step=1.0)


def test_a_row_has_the_ratios_and_the_phases() -> None:
    row = compare("S = 2", Cost({"trace": 10.0, "first run": 50.0}, 2_200_000_000, 1.5), PLAIN_COST, 1.5)
    phases = "60.0 s (trace 10.0, first run 50.0), 2.20 GB, later steps 1.5 s"
    assert row.measured == f"CPU 1.50x, memory 1.10x: {phases}"
    assert row.wanted == "CPU at most 1.5x, memory at most 1.3x"
    assert row.ok


@pytest.mark.parametrize(("seconds", "memory"), [(60.1, 2_000_000_000), (40.0, 2_700_000_000)])
def test_too_many_seconds_or_bytes_miss_the_target(seconds: float, memory: int) -> None:
    assert not compare("S = 2", Cost({"trace": seconds}, memory, 1.0), PLAIN_COST, 1.5).ok


@needs_keras_hub
@pytest.mark.parametrize("stages", [PLAIN, "2"])
def test_a_small_bert_is_measured_in_a_process_of_its_own(stages: str) -> None:
    cost = measure_in_process(stages, 2, Size(layers=2, width=64, words=50, length=4))
    phases = {*PHASES, "rest"} if stages != PLAIN else {"trace", "first run"}
    assert set(cost.seconds) == phases
    assert min(cost.seconds.values()) >= 0
    assert cost.total > cost.step > 0
    assert cost.memory > 100_000_000
