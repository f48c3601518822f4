"""Micro-batches in flight on each stage, against tables laid out by hand."""

from __future__ import annotations

import pytest

from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.memory.in_flight import nominal_ends, stage_states

MIXED = "0F0 0F1 0I0 0B1 0W0; 1F0 1B0 1F1 1I1 1W1"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gpipe", [8, 8, 8, 8]),
        ("dapple-a", [4, 3, 2, 1]),
        ("dapple-b", [7, 5, 3, 1]),
        ("dapple-a:D=2", [2, 2, 2, 1]),
        ("K=5,3,3,2", [5, 3, 3, 2]),
        ("zb-h1", [4, 4, 4, 4]),  # a stash is released after W
    ],
)
def test_the_largest_number_of_micro_batches_in_flight_is_k(name: str, wanted: list[int]) -> None:
    """DAPPLE, section V.C: K_i warm-up forwards, then one backward for each forward."""
    schedule = ScheduleSpec.parse(name).build(4, 8)
    assert list(schedule.in_flight) == wanted


def test_stash_and_queue_at_each_action_of_two_stages() -> None:
    """dapple-a, K = 2, 1: micro-batches stashed from forward to backward, and received but not used yet.

    Forward takes 1, backward 2: stage 0 runs F0 to 1, F1 to 2, B0 from 4 to 6, F2 to 7, B1 to 9; stage 1 F0 from 1 to
    2, B0 to 4, F1 to 5, B1 to 7, F2 to 8, B2 to 10.
    """
    schedule = ScheduleSpec.parse("dapple-a").build(2, 3)
    first = [
        (str(state.action), state.stashed("F", "B"), state.queued("next stage")) for state in stage_states(schedule, 0)
    ]
    assert first == [("0F0", 1, 0), ("0F1", 2, 0), ("0B0", 2, 0), ("0F2", 2, 0), ("0B1", 2, 0), ("0B2", 1, 0)]
    second = [
        (str(state.action), state.stashed("F", "B"), state.queued("previous stage"))
        for state in stage_states(schedule, 1)
    ]
    assert second == [
        ("1F0", 1, 0),
        ("1B0", 1, 1),  # F1 has been received
        ("1F1", 1, 0),
        ("1B1", 1, 0),  # F2 is received as it ends
        ("1F2", 1, 0),
        ("1B2", 1, 0),
    ]


def test_stash_and_queue_where_some_backwards_are_split() -> None:
    """Forward takes 1, a whole backward 2, and each half 1. What I passes to W is there while B runs, too.

    Stage 0 runs F0 to 1, F1 to 2, I0 from 4 to 5, B1 from 6 to 8, W0 to 9; stage 1 F0 from 1 to 2, B0 to 4, F1 to 5,
    I1 to 6, W1 to 7.
    """
    schedule = ScheduleSpec.parse(MIXED).build(2, 2)
    assert schedule.in_flight == (2, 1)
    names = ["0F0", "0F1", "0I0", "0B1", "0W0"]
    found = stage_states(schedule, 0)
    assert [str(state.action) for state in found] == names
    assert [state.stashed("F", "W") for state in found] == [1, 2, 2, 2, 1]
    assert [state.stashed("F", "I") for state in found] == [1, 2, 2, 1, 0]
    assert [state.stashed("I", "W") for state in found] == [0, 0, 1, 2, 1]
    assert [state.stashed("next stage", "I") for state in found] == [0, 0, 1, 1, 0]
    assert [state.stashed("next stage", "W") for state in found] == [0, 0, 1, 2, 1]
    found = stage_states(schedule, 1)
    assert [state.stashed("F", "W") for state in found] == [1, 1, 1, 1, 1]
    assert [state.stashed("I", "W") for state in found] == [0, 1, 0, 1, 1]
    assert [state.stashed("previous stage", "W") for state in found] == [1, 2, 1, 1, 1]  # 0F1 ends while 1B0 runs


def test_gradients_of_both_kinds_of_backward_queue() -> None:
    """Stage 1 sends those of I0 at 4 and of I1 at 5, while stage 0 runs B0 (from 4 to 6) and F2; then those of B2."""
    schedule = ScheduleSpec.parse("0F0 0F1 0B0 0F2 0I1 0I2 0W1 0W2; 1F0 1F1 1I0 1I1 1W0 1F2 1W1 1B2").build(2, 3)
    found = [(str(state.action), state.queued("next stage")) for state in stage_states(schedule, 0)]
    assert found == [
        *(("0F0", 0), ("0F1", 0), ("0B0", 1), ("0F2", 1)),
        *(("0I1", 0), ("0I2", 0), ("0W1", 0), ("0W2", 0)),
    ]


def test_a_boundary_tensor_is_stashed_from_when_it_is_received() -> None:
    schedule = ScheduleSpec.parse("gpipe").build(2, 3)
    assert [state.stashed("previous stage", "F") for state in stage_states(schedule, 1)][:3] == [1, 1, 1]
    assert [state.stashed("previous stage", "B") for state in stage_states(schedule, 1)] == [1, 2, 3, 3, 2, 1]


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        ("dapple-a", "0F0 1, 0F1 2, 1F0 2, 1B0 4, 1F1 5, 0B0 6, 1B1 7, 0B1 9"),
        (MIXED, "0F0 1, 0F1 2, 1F0 2, 1B0 4, 0I0 5, 1F1 5, 1I1 6, 1W1 7, 0B1 8, 0W0 9"),
    ],
    ids=["dependencies and durations", "a backward takes as long as its halves"],
)
def test_nominal_ends(schedule: str, ends: str) -> None:
    found = nominal_ends(ScheduleSpec.parse(schedule).build(2, 2))
    assert {f"{action} {end:g}" for action, end in found.items()} == set(ends.split(", "))


def test_the_first_stage_receives_no_activations_and_the_last_no_gradients() -> None:
    schedule = ScheduleSpec.parse("dapple-b").build(2, 4)
    assert {state.queued("previous stage") for state in stage_states(schedule, 0)} == {0}
    assert {state.queued("next stage") for state in stage_states(schedule, 1)} == {0}


def test_a_stage_is_ending_from_its_last_backward_on() -> None:
    schedule = ScheduleSpec.parse(MIXED).build(2, 2)
    for stage, last in ((0, "0W0"), (1, "1W1")):
        states = stage_states(schedule, stage)
        assert [str(state.action) for state in states if state.ending] == [last]
    chunked = ScheduleSpec.parse("0F0 2F0 2B0 0B0; 1F0 1B0").build(3, 1)
    assert [str(state.action) for state in stage_states(chunked, 2) if state.ending] == ["2B0", "0B0"]
