"""Schedules in which a stage runs the backward of some micro-batches whole, and that of others as I and W."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action, Kind, Schedule, check, name_input_halves, run_schedule
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, parse_schedule
from tests.graph_passes.builders import refused
from tests.graph_passes.schedules.mixed import mixed

TEXT = "0F0 0F1 0I0 0F2 0B1 0W0 0I2 0W2\n1F0 1B0 1F1 1I1 1F2 1W1 1B2"


def test_a_mixed_schedule_is_read_and_printed() -> None:
    schedule = parse_schedule(TEXT)
    assert str(schedule) == TEXT
    assert schedule.split == {(0, 0), (0, 2), (1, 1)}
    assert schedule.micro_batches == 3
    assert schedule.warm_up == (2, 1)
    assert schedule.in_flight == schedule.stashes == (3, 2)
    assert ScheduleSpec.parse(TEXT).splits_backward
    ScheduleSpec.parse(TEXT).check(2, 3)


def test_a_schedule_without_halves_splits_nothing() -> None:
    assert ScheduleSpec.parse("dapple-a").build(2, 3).split == frozenset()
    assert ScheduleSpec.parse("zb-h1").build(2, 2).split == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_warm_up_ends_at_the_first_half_of_a_backward_too() -> None:
    assert parse_schedule("0F0 0F1 0I0 0B1 0W0; 1F0 1F1 1B0 1B1").warm_up == (2, 2)


def test_when_the_actions_of_a_mixed_schedule_end() -> None:
    """Forward 1, backward 3, of which W is 2; a hand-over takes 1. Laid out by hand.

    Stage 1: F0 2-3, B0 3-6, F1 6-7, I1 7-8, W1 8-10. Stage 0: B0's gradients arrive at 7, and those of I1 at 9.
    """
    seconds: dict[Kind, float] = {"F": 1, "B": 3, "I": 1, "W": 2}
    schedule = parse_schedule("0F0 0F1 0I0 0B1 0W0; 1F0 1B0 1F1 1I1 1W1")
    ends = run_schedule(schedule, lambda action: seconds[action.kind], lambda action: 1)
    assert ends == ((1, 2, 8, 12, 14), (3, 6, 7, 8, 10))


def test_both_kinds_of_backward_send_through_one_channel() -> None:
    """Stage 1 ends I0 at 9 and B1 at 10; each result travels for 3, one at a time: they arrive at 12 and 15."""
    schedule = parse_schedule("0F0 0F1 0B0 0I1 0W1; 1F0 1F1 1I0 1B1 1W0")
    ends = run_schedule(schedule, lambda action: 1, lambda action: 3)
    assert ends == ((1, 2, 13, 16, 17), (5, 8, 9, 10, 11))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0 0I0", "stage 0 must run F, and B or both I and W, of each micro-batch once; missing or unexpected: 0W0"),
        ("0F0 0W0", "stage 0 must run F, and B or both I and W, of each micro-batch once; missing or unexpected: 0I0"),
        ("0F0 0B0; 1F0 1I0", "stage 1 must run F, and B or both I and W, of each micro-batch once; missing or"),
        ("0F0 0B0; 1F0 1B0 1I0", "of each micro-batch once; missing or unexpected: 1B0 1W0"),
        ("0F0 0B0; 1F0 1B0 1I0 1W0", "of each micro-batch once; missing or unexpected: repeated actions"),
        ("0F0 0B0; 1F0 1I0 1W0 1W0", "of each micro-batch once; missing or unexpected: repeated actions"),
        ("0F0 0B0 0F1 0I0 0B1", "stage 0 must run F, and B or both I and W, of each micro-batch once"),
        ("0F0 0F1 0I0 0W0 0B1; 1F0 1F1 1I0 1B1", "stage 1 must run F, and B or both I and W, of each micro-batch once"),
        ("0F0 1F0 1I0 0B0", "worker 0 (stages [0, 1]) must run F, and B or both I and W, of each micro-batch once"),
        ("0F0 0F1 0W0 0I0 0B1", "stage 0: 0F0   0F1   0W0!  0I0   0B1"),
        (
            "0F0 0I0 0F1 0B1 0W0; 1F0 1F1 1I0 1B1 1W0",
            "blocked actions are marked:\nstage 0: 0F0   0I0!  0F1   0B1   0W0\nstage 1: 1F0   1F1!  1I0   1B1   1W0",
        ),
    ],
)
def test_a_wrong_mixture_is_refused(text: str, said: str) -> None:
    with refused(ScheduleError, said):
        parse_schedule(text)


def test_a_whole_backward_beside_its_halves_is_refused_in_a_schedule_that_is_not_read() -> None:
    kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
    with refused(ScheduleError, "once; missing or unexpected:", "0B0"):
        check(Schedule((tuple(Action(0, kind, 0) for kind in kinds),)))


def test_b_beside_w_is_read_as_i() -> None:
    """As texts of earlier versions have it, in which every backward of a schedule is split."""
    old = "0F0 0F1 0B0 0W0 0B1 0W1; 1F0 1B0 1F1 1B1 1W0 1W1"
    assert parse_schedule(old) == parse_schedule(old.replace("B", "I"))
    assert ScheduleSpec.parse(old).build(2, 2) == ScheduleSpec.parse("zb-h1").build(2, 2)
    assert parse_schedule("0F0 0F1 0B0 0B1 0W1") == parse_schedule("0F0 0F1 0B0 0I1 0W1")  # of its micro-batch only
    text = "0F0 1F0 1B0 0B0 0W0"  # and of its stage only
    assert str(parse_schedule(text)) == "0F0 1F0 1B0 0I0 0W0"


def test_actions_that_are_in_no_order_are_read_alike() -> None:
    found = name_input_halves([Action(0, "W", 1), Action(0, "B", 0), Action(0, "B", 1), Action(1, "B", 1)])
    assert list(map(str, found)) == ["0W1", "0B0", "0I1", "1B1"]


def test_the_stages_whose_last_micro_batch_is_split() -> None:
    text = "0F0 0F1 0B0 0I1 0W1; 1F0 1I0 1F1 1B1 1W0"
    assert ScheduleSpec.parse(text).ends_split(2, 2) == {0}
    assert ScheduleSpec.parse("zb-h1").ends_split(3, 4) == {0, 1, 2}
    assert ScheduleSpec.parse("dapple-a").ends_split(3, 4) == frozenset()
    with refused(ScheduleError, "the schedule's text is for 2 stages x 2 micro-batches, but there are 2 x 3"):
        ScheduleSpec.parse(text).ends_split(2, 3)


def test_a_text_for_fewer_micro_batches_keeps_its_kinds() -> None:
    assert str(ScheduleSpec.parse(TEXT).truncate(2)) == "0F0 0F1 0I0 0B1 0W0\n1F0 1B0 1F1 1I1 1W1"


names = st.sampled_from(["gpipe", "dapple-a", "dapple-b", "zb-h1", "interleaved-1f1b", "looped-bfs"])
schedules = st.builds(
    lambda name, *counts: ScheduleSpec.parse(name).build(*counts), names, st.sampled_from([2, 4]), st.integers(1, 6)
).flatmap(mixed)


@given(schedules)
def test_any_mixture_runs_to_its_end_and_prints_and_parses(schedule: Schedule) -> None:
    check(schedule)
    assert parse_schedule(str(schedule)) == schedule
    earlier = str(schedule).replace("I", "B")  # texts of earlier versions
    assert parse_schedule(earlier) == schedule


@given(schedules)
def test_the_stashes_of_any_mixture_are_those_that_are_counted(schedule: Schedule) -> None:
    for worker, actions in enumerate(schedule.workers):
        held: set[tuple[int, int]] = set()
        most = 0
        for action in actions:
            change = {(action.stage, action.micro_batch)}
            held = held | change if action.kind == "F" else held - change if action.kind != "I" else held
            most = max(most, len(held))
        assert schedule.stashes[worker] == most


@given(schedules)
def test_an_action_ends_after_what_it_takes(schedule: Schedule) -> None:
    seconds: dict[Kind, float] = {"F": 2, "B": 5, "I": 3, "W": 2}
    ends = run_schedule(schedule, lambda action: seconds[action.kind], lambda action: 1)
    of = {
        action: end
        for actions, own in zip(schedule.workers, ends, strict=True)
        for action, end in zip(actions, own, strict=True)
    }
    worker_of = schedule.worker_map.worker_of
    for action, end in of.items():
        start, stage, m = end - seconds[action.kind], action.stage, action.micro_batch
        if action.kind == "W":
            assert of[Action(stage, "I", m)] <= start
            continue
        if action.kind in "BI":
            assert of[Action(stage, "F", m)] <= start
        there = stage + (-1 if action.kind == "F" else 1)
        if 0 <= there < len(worker_of):
            kinds = "F" if action.kind == "F" else "BI"
            (source,) = (a for a in of if (a.stage, a.micro_batch) == (there, m) and a.kind in kinds)
            assert of[source] + (worker_of[there] != worker_of[stage]) <= start
