"""When each action of a schedule ends, laid out by hand."""

from __future__ import annotations

import pytest

from dapple_tf.graph_passes.schedules.schedule import Action, Kind, Schedule, most_in_flight, run_schedule
from dapple_tf.graph_passes.schedules.spec import parse_schedule


def test_each_action_starts_when_its_inputs_and_its_stage_are_ready() -> None:
    schedule = parse_schedule("0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1")
    ends = run_schedule(schedule, lambda action: 2 if action.kind == "B" else 1)
    assert ends == ((1, 2, 6, 9), (2, 4, 5, 7))


def test_a_channel_sends_one_result_after_the_other() -> None:
    # Stage 0 ends its forwards at 1, 2 and 3; each travels for 3 s, one at a time: they arrive at 4, 7 and 10.
    schedule = parse_schedule("0F0 0F1 0F2 0B0 0B1 0B2; 1F0 1F1 1F2 1B0 1B1 1B2")
    ends = run_schedule(schedule, lambda action: 1, lambda action: 3 if action.kind == "F" else 0)
    assert ends == ((1, 2, 3, 13, 14, 15), (5, 8, 11, 12, 13, 14))


def test_results_travel_together_when_the_last_is_there() -> None:
    # Forwards end at 1 and 2; both travel from 2 on, for 3 s each. Backwards end at 10 and 11, and travel from 11 on.
    schedule = parse_schedule("0F0+ 0F1 0F2 0B0 0B1 0B2; 1F0 1F1 1B0+ 1B1 1F2 1B2")
    ends = run_schedule(schedule, lambda action: 1, lambda action: 3 if action.kind == "F" else 0)
    assert ends == ((1, 2, 3, 13, 14, 15), (9, 10, 11, 12, 13, 14))


def test_weight_gradients_wait_for_the_backward_of_their_stage_only() -> None:
    schedule = parse_schedule("0F0 0I0 0W0; 1F0 1I0 1W0")
    ends = run_schedule(schedule, lambda action: {"F": 1, "I": 2, "W": 4}[action.kind])
    assert ends == ((1, 6, 10), (2, 4, 8))


def test_seconds_may_differ_by_stage() -> None:
    schedule = parse_schedule("0F0 0B0; 1F0 1B0")
    assert run_schedule(schedule, lambda action: 1 + 9 * action.stage) == ((1, 22), (11, 21))


@pytest.mark.parametrize(
    ("kinds", "most"),
    [("FFBB", 2), ("FBFB", 1), ("FIFIWW", 2), ("FIFBW", 2), ("FBFIW", 1), ("FIFBFBW", 2), ("", 0)],
)
def test_the_most_micro_batches_in_flight(kinds: list[Kind], most: int) -> None:
    """W frees what I has not, and B frees at once."""
    assert most_in_flight(iter(kinds)) == most


def test_an_action_whose_inputs_never_arrive_has_no_end() -> None:
    first = (Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1))
    second = (Action(1, "F", 1), Action(1, "F", 0), Action(1, "B", 0), Action(1, "B", 1))
    assert run_schedule(Schedule((first, second)), lambda action: 1) == ((1,), ())
