"""Asynchronous windows: the order of each replica, beside the figures of PipeDream (SOSP 2019), and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.window import Window, depth_warm_up, round_robin_warm_up
from dapple_tf.wording import format_count
from tests.graph_passes.builders import refused


def rows(window: Window) -> list[str]:
    """The actions of each replica as text, stage by stage, without the number of the stage."""
    return [" ".join(f"{a.kind}{a.micro_batch}" for a in actions) for _, actions in sorted(window.rows.items())]


def forward(stage: int, m: int) -> Action:
    return Action(stage, "F", m)


def backward(stage: int, m: int) -> Action:
    return Action(stage, "B", m)


def test_figure_4_four_workers_admit_four_minibatches_and_alternate() -> None:
    assert rows(Window(7, (1, 1, 1, 1), (4, 3, 2, 1))) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 B4 B5 B6",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 B5 B6",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 B6",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6",
    ]


def test_figure_8_even_minibatches_are_on_the_first_worker_and_odd_ones_on_the_second() -> None:
    """Its configuration 2-1; minibatches are counted from 0 here."""
    assert rows(Window(8, (2, 1), (2, 1))) == [
        "F0 F2 B0 F4 B2 F6 B4 B6",
        "F1 F3 B1 F5 B3 F7 B5 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_a_window_that_is_shorter_than_the_warm_up_ends_drained() -> None:
    assert rows(Window(2, (1, 1, 1, 1), (4, 3, 2, 1))) == ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"]
    assert rows(Window(1, (1,), (1,))) == ["F0 B0"]


def test_replicas_that_share_micro_batches_have_the_same_order() -> None:
    """Two minibatches of two micro-batches on a stage of two replicas and one of one."""
    assert rows(Window(2, (2, 1), (2, 1), 2, in_turn=False)) == ["F0 F1 B0 F2 B1 F3 B2 B3"] * 2 + [
        "F0 B0 F1 B1 F2 B2 F3 B3"
    ]


@pytest.mark.parametrize(
    ("replicas", "warm_up"),
    [
        ((1, 1, 1, 1), (4, 3, 2, 1)),  # Fig. 4: NOAM is 4
        ((2, 1), (2, 1)),  # Fig. 8: 3 workers, 2 of them in the input stage
        ((15, 1), (2, 1)),  # VGG-16 in Table 1: 16 workers, 15 of them in the input stage
        ((2, 1, 1), (2, 2, 1)),
        ((1, 2), (3, 1)),
        ((3, 2), (2, 1)),
        ((4,), (1,)),
    ],
)
def test_noam_keeps_all_workers_busy(replicas: tuple[int, ...], warm_up: tuple[int, ...]) -> None:
    assert round_robin_warm_up(replicas) == warm_up


@pytest.mark.parametrize(
    ("depth", "warm_up"),
    [
        (1, (1, 1, 1, 1)),
        (2, (2, 1, 1, 1)),
        (4, (4, 3, 2, 1)),  # NOAM
        (5, (5, 4, 3, 1)),
        (6, (6, 5, 3, 1)),
        (7, (7, 5, 3, 1)),  # 2 (S - s) - 1: the most that a stage can use
        (9, (7, 5, 3, 1)),
    ],
)
def test_a_depth_bounds_the_minibatches_in_flight(depth: int, warm_up: tuple[int, ...]) -> None:
    assert depth_warm_up(4, depth) == warm_up


def test_replicas_take_minibatches_in_turn_and_update_after_each_group() -> None:
    window = Window(6, (3, 1), (2, 1))
    assert (window.stages, window.size) == (2, 6)
    assert [window.replicas_of(0, m) for m in range(6)] == [(0,), (1,), (2,), (0,), (1,), (2,)]
    assert window.updates == (((0, 1, 2), (3, 4, 5)), ((0,), (1,), (2,), (3,), (4,), (5,)))
    assert [window.update_of(0, m) for m in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [window.update_of(1, m) for m in range(6)] == [0, 1, 2, 3, 4, 5]
    assert [window.last_minibatch(0, update) for update in (0, 1)] == [2, 5]
    assert window.ends_update(backward(0, 1))
    assert not window.ends_update(forward(0, 1))


def test_all_replicas_share_the_micro_batches_of_a_minibatch_and_update_after_it() -> None:
    window = Window(2, (2, 1), (2, 1), 3, in_turn=False)
    assert (window.stages, window.size) == (2, 6)
    assert window.replicas_of(0, 4) == (0, 1)
    assert window.updates == (((0, 1, 2), (3, 4, 5)),) * 2
    assert [window.update_of(1, m) for m in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [window.last_minibatch(1, update) for update in (0, 1)] == [0, 1]
    assert [window.ends_update(backward(0, m)) for m in range(6)] == [False, False, True, False, False, True]


@pytest.mark.parametrize(("minibatches", "micro_batches"), [(0, 1), (-1, 1), (1, 0)])
def test_a_window_has_minibatches_and_micro_batches(minibatches: int, micro_batches: int) -> None:
    said = f"{format_count(micro_batches, 'micro-batch')}: there must be at least one"
    with refused(ScheduleError, said):
        Window(minibatches, (1,), (1,), micro_batches, in_turn=False)


def test_minibatches_that_replicas_take_in_turn_are_whole() -> None:
    with refused(ScheduleError, "replicas take whole minibatches in turn, not 2 micro-batches each"):
        Window(4, (1,), (1,), 2)


@pytest.mark.parametrize("warm_up", [(2,), (2, 1, 1), (2, 0), (-1, 1), ()])
def test_each_stage_has_a_warm_up_from_1_on(warm_up: tuple[int, ...]) -> None:
    with refused(ScheduleError, f"K = {list(warm_up)}: give a number from 1 on for each of 2 stages"):
        Window(4, (1, 1), warm_up)


@pytest.mark.parametrize(("replicas", "stage", "count"), [((2, 1), 0, 2), ((1, 3), 1, 3)])
def test_minibatches_are_a_multiple_of_every_stage_s_replicas(
    replicas: tuple[int, int], stage: int, count: int
) -> None:
    said = f"minibatches=5 is no multiple of the {count} replicas of stage {stage}, which take minibatches in turn"
    with refused(ScheduleError, said, "use a multiple"):
        Window(5, replicas, round_robin_warm_up(replicas))
    Window(5, replicas, (2, 1), 2, in_turn=False)  # which share each of them


def test_a_stage_that_waits_for_more_forwards_than_the_one_before_runs_deadlocks() -> None:
    """1B0 comes after 1F1, which needs 0F1, which comes after 0B0, which needs 1B0."""
    said = "a window of 4 minibatches with K = [1, 2] on [1, 1] replicas deadlocks at 0B0 1F1: use a larger depth"
    with refused(ScheduleError, said):
        Window(4, (1, 1), (1, 2))
    Window(1, (1, 1), (1, 2))  # there is no second forward to wait for


def test_a_forward_that_waits_for_an_update_of_all_replicas_can_deadlock() -> None:
    """Stage 0 admits minibatch 0 and waits for its backward, which stage 1 runs after the forward of minibatch 2."""
    with refused(ScheduleError, "with K = [1, 2] on [1, 2] replicas deadlocks at 0B0 1F2 1F1"):
        Window(4, (1, 2), (1, 2))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 4))
def test_no_window_of_the_usual_warm_up_deadlocks(replicas: list[int], groups: int) -> None:
    minibatches = groups * math.lcm(*replicas)
    window = Window(minibatches, tuple(replicas), round_robin_warm_up(replicas))
    for (stage, replica), actions in window.rows.items():
        own = range(replica, minibatches, replicas[stage])
        assert sorted(actions) == sorted([*(forward(stage, m) for m in own), *(backward(stage, m) for m in own)])


@given(stages=st.integers(1, 6), depth=st.integers(1, 13), minibatches=st.integers(1, 20))
def test_no_depth_deadlocks(stages: int, depth: int, minibatches: int) -> None:
    """In flight on a stage are at most ``depth`` minibatches."""
    window = Window(minibatches, (1,) * stages, depth_warm_up(stages, depth))
    for actions in window.rows.values():
        flying = [sum(1 if a.kind == "F" else -1 for a in actions[: i + 1]) for i in range(len(actions))]
        assert max(flying) <= depth
        assert flying[-1] == 0
