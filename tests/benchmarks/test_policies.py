"""Pipelines of known costs: the simulator's predictions, and what is computed from a recorded step."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.emulated_hosts import _burst
from benchmarks.papers.table4 import LINKED, UNEVEN
from benchmarks.policies import Case, overlapped_share
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.profiler.cluster import Link
from dapple_tf.timeline.events import Event, Transfer
from dapple_tf.timeline.timeline import Timeline


def test_a_case_has_the_requested_ratio() -> None:
    for case in LINKED:
        assert case.predict("dapple-a").acr == pytest.approx(case.ratio, rel=0.01)


def test_predicted_gains_of_policy_b_rise_with_the_ratio() -> None:
    gains = [c.predict("dapple-a").step_seconds / c.predict("dapple-b").step_seconds for c in LINKED]
    assert all(before < after for before, after in itertools.pairwise(gains))
    # Two stages, eight micro-batches: A waits six more transfers of 9 ms (BaPipe, Table 2); B takes 9 x 60 + 2 x 9 ms.
    assert gains[2] == pytest.approx(1 + 6 * 9 / 558, rel=1e-3)


def test_auto_takes_b_for_wide_boundaries_and_a_for_a_heavy_first_stage() -> None:
    """B holds more stashes, so it must gain 2% of the step, which it does not at the smallest ratio."""
    gains = [case.predict("dapple-a").step_seconds / case.predict("dapple-b").step_seconds for case in LINKED]
    assert 1 < gains[0] < 1.02 < gains[1]
    assert [case.choose().schedule for case in LINKED] == ["dapple-a", "dapple-b", "dapple-b", "dapple-b"]
    assert UNEVEN.choose().schedule == "dapple-a"
    # With F = B = 1: A 16, B 18 of 20 ms.
    assert UNEVEN.predict("dapple-a").step_seconds == pytest.approx(0.32, rel=1e-6)
    assert UNEVEN.predict("dapple-b").step_seconds == pytest.approx(0.36, rel=1e-6)


def test_stages_hold_their_layers_in_order() -> None:
    stages = Case((2, 1), 1.0, 1.0, 2, Link(1.0, 0.0)).stages
    assert [(s.first_layer, s.last_layer, s.devices) for s in stages] == [(0, 1, (0,)), (2, 2, (1,))]


def test_the_share_of_a_transfer_in_which_both_ends_compute() -> None:
    def event(stage: int, start: float, end: float) -> Event:
        return Event(Action(stage, "F", 0), 0, f"rank:{stage}", start, end)

    # The exchange goes on from 2 to 6; stage 0 works until 3 and again from 5, stage 1 from 1 to 7: half of it.
    events = (event(0, 0, 3), event(1, 1, 7), event(0, 5, 8))
    assert overlapped_share(Timeline(events, (Transfer(0, 1, 0, 2, 6),))) == 0.5
    assert overlapped_share(Timeline(events)) == 0


def test_bursts_are_bytes() -> None:
    assert _burst("200mbit", 0.005) == "125000"
    assert _burst("1gbit", 0.001) == "125000"
