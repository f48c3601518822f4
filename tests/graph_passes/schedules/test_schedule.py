"""Schedules as tables, K_i as in the paper, and schedules that cannot run."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.schedules.schedule import (
    Action,
    Kind,
    Schedule,
    check,
    dependencies,
    groups_together,
    run_schedule,
)
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, early_backward, parse_schedule, warm_up
from dapple_tf.graph_passes.schedules.zero_bubble import zero_bubble
from tests.graph_passes.builders import refused
from tests.graph_passes.schedules.tables import read_tables

KINDS_OF_BACKWARD: tuple[Kind, Kind] = ("B", "I")

TABLES = read_tables(
    """
    gpipe 1 2
    0F0 0F1 0B0 0B1

    gpipe 2 3
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1F1 1F2 1B0 1B1 1B2

    gpipe 3 1
    0F0 0B0
    1F0 1B0
    2F0 2B0

    gpipe:D=2 1 2
    0F0 0F1 0B0 0B1

    dapple-a 1 3
    0F0 0B0 0F1 0B1 0F2 0B2

    dapple-a 2 1
    0F0 0B0
    1F0 1B0

    dapple-a 2 3
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

    dapple-a 3 4
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    dapple-a 4 4
    0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
    2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3
    3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3

    dapple-a:D=2 4 3
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1F1 1B0 1F2 1B1 1B2
    2F0 2F1 2B0 2F2 2B1 2B2
    3F0 3B0 3F1 3B1 3F2 3B2

    dapple-a:D=1 2 2
    0F0 0B0 0F1 0B1
    1F0 1B0 1F1 1B1

    zb-h1 1 2
    0F0 0I0 0W0 0F1 0I1 0W1

    zb-h1 3 4
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    zb-h2 2 4
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3

    zb-h1:D=2 3 3
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1F1 1I0 1W0 1F2 1I1 1W1 1I2 1W2
    2F0 2I0 2F1 2I1 2W0 2F2 2I2 2W1 2W2

    dapple-b 1 2
    0F0 0B0 0F1 0B1

    dapple-b 2 4
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    dapple-b 3 6
    0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5
    1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5

    dapple-b:D=2 4 3
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1F1 1B0 1F2 1B1 1B2
    2F0 2F1 2B0 2F2 2B1 2B2
    3F0 3B0 3F1 3B1 3F2 3B2
    """
)


@pytest.mark.parametrize(("name", "stages", "micro_batches", "table"), TABLES)
def test_the_table_of_a_schedule(name: str, stages: int, micro_batches: int, table: str) -> None:
    assert str(ScheduleSpec.parse(name).build(stages, micro_batches)) == table


@pytest.mark.parametrize(("name", "stages", "micro_batches", "table"), TABLES)
def test_a_table_parses_to_its_schedule(name: str, stages: int, micro_batches: int, table: str) -> None:
    assert parse_schedule(table) == ScheduleSpec.parse(name).build(stages, micro_batches)


@pytest.mark.parametrize(
    ("policy", "stages", "micro_batches", "limit", "k"),
    [
        ("gpipe", 3, 8, None, (8, 8, 8)),
        ("gpipe", 3, 8, 8, (8, 8, 8)),
        ("dapple-a", 4, 8, None, (4, 3, 2, 1)),
        ("dapple-a", 4, 8, 3, (3, 3, 2, 1)),
        ("dapple-a", 4, 2, None, (2, 2, 2, 1)),
        ("dapple-a", 1, 8, None, (1,)),
        ("dapple-b", 4, 16, None, (7, 5, 3, 1)),
        ("dapple-b", 4, 16, 4, (4, 4, 3, 1)),
        ("dapple-b", 4, 6, None, (6, 5, 3, 1)),
        ("dapple-b", 1, 8, None, (1,)),
        ("1f1b", 3, 8, None, (3, 2, 1)),
        ("1f1b-sno", 3, 8, None, (3, 2, 1)),  # BaPipe, Fig. 6 (a)
        ("1f1b-so", 3, 8, None, (6, 4, 2)),  # and (b): twice the warm-up
        ("1f1b-so", 3, 8, 5, (5, 4, 2)),
    ],
)
def test_warm_up_forwards(policy: str, stages: int, micro_batches: int, limit: int | None, k: tuple[int, ...]) -> None:
    assert warm_up(policy, stages, micro_batches, limit) == k
    name = policy if limit is None else f"{policy}:D={limit}"
    assert ScheduleSpec.parse(name).build(stages, micro_batches).warm_up == k


def test_warm_up_forwards_of_each_stage_can_be_given() -> None:
    assert ScheduleSpec.parse("K=3,3,1").build(3, 4) == early_backward((3, 3, 1), 4)
    assert str(ScheduleSpec.parse("K=3,3,1").truncate(2)) == "K=2,2,1"
    assert str(ScheduleSpec.parse("dapple-a:D=3").truncate(2)) == "dapple-a:D=3"


def test_two_micro_batches_on_two_stages_are_figure_11_b() -> None:
    first, last = ScheduleSpec.parse("dapple-a").build(2, 2).stages
    assert first.index(Action(0, "F", 1)) == first.index(Action(0, "F", 0)) + 1  # stage 0: F0 -> F1
    assert last.index(Action(1, "F", 1)) == last.index(Action(1, "B", 0)) + 1  # last stage: B0 -> F1


def test_what_an_action_waits_for() -> None:
    assert dependencies(Action(0, "F", 3), 3) == ()
    assert dependencies(Action(1, "F", 3), 3) == (Action(0, "F", 3),)
    assert dependencies(Action(2, "B", 3), 3) == (Action(2, "F", 3),)
    assert dependencies(Action(2, "I", 3), 3) == (Action(2, "F", 3),)
    assert dependencies(Action(1, "W", 3), 3) == (Action(1, "I", 3),)
    for kind in KINDS_OF_BACKWARD:  # of the next stage's B and I, a schedule has one
        assert dependencies(Action(0, kind, 3), 3) == (Action(0, "F", 3), Action(1, "B", 3), Action(1, "I", 3))


shapes = st.tuples(st.integers(1, 5), st.integers(1, 9))
policies = st.one_of(
    st.just("gpipe"),
    st.sampled_from(["dapple-a", "dapple-b", "zb-h1", "zb-h2"]),
    st.builds("{}:D={}".format, st.sampled_from(["dapple-a", "dapple-b", "zb-h1", "zb-h2"]), st.integers(1, 9)),
)


@given(policies, shapes)
def test_every_schedule_runs_to_its_end_and_its_stash_is_as_large_as_computed(
    name: str, shape: tuple[int, int]
) -> None:
    stages, micro_batches = shape
    schedule = ScheduleSpec.parse(name).build(stages, micro_batches)
    policy, _, limit = name.partition(":D=")
    bound = int(limit) if limit else None
    k = warm_up(policy, stages, micro_batches, bound)
    most, frees = max(k), "B"
    if policy in ("zb-h1", "zb-h2"):
        held = stages if policy == "zb-h1" else 2 * stages - 1
        most, frees = min(held, bound or held), "W"
    waiting, stashed, peaks = [list(actions) for actions in schedule.stages], [0] * stages, [0] * stages
    done: set[Action] = set()
    while any(waiting):
        before = len(done)
        for stage, actions in enumerate(waiting):
            while actions and can_run(actions[0], done, stages):
                action = actions.pop(0)
                assert action not in done
                done.add(action)
                stashed[stage] += (action.kind == "F") - (action.kind == frees)
                assert 0 <= stashed[stage] <= most
                peaks[stage] = max(peaks[stage], stashed[stage])
        assert len(done) > before, "deadlock"
    assert len(done) == (2 + (frees == "W")) * stages * micro_batches
    assert schedule.in_flight == tuple(peaks)
    assert schedule.warm_up == k
    assert frees == "W" or peaks == list(k)
    assert schedule.micro_batches == micro_batches


def can_run(action: Action, done: set[Action], stages: int) -> bool:
    """Whether the stage before (of F) or the stage after and the own F (of B and I) have run."""
    stage, m = action.stage, action.micro_batch
    if action.kind == "F":
        return stage == 0 or Action(stage - 1, "F", m) in done
    if action.kind == "W":
        return Action(stage, "I", m) in done
    after = {Action(stage + 1, kind, m) for kind in KINDS_OF_BACKWARD}
    return Action(stage, "F", m) in done and (stage == stages - 1 or not after.isdisjoint(done))


@given(policies, shapes)
def test_a_schedule_prints_and_parses(name: str, shape: tuple[int, int]) -> None:
    schedule = ScheduleSpec.parse(name).build(*shape)
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "said"),
    [
        (
            "dapple-c",
            2,
            2,
            "no schedule is called 'dapple-c' (did you mean 'dapple-b'?); there are gpipe, dapple-a (1f1b), "
            "dapple-b, zb-h1, zb-h2, 1f1b-sno, "
            "1f1b-so (and :D=n), interleaved-1f1b:v=2, interleaved-zb:v=2, looped-bfs:v=2, zb-v, dualpipe-v, "
            "hanayo:w=1, zb-auto:v=1, K=3,2,1, and the actions of every worker: 0F0 0B0; "
            "1F0 1B0",
        ),
        ("K=2,1", 3, 4, "K=2,1 gives K of 2 stages, but there are 3"),
        ("K=0,1", 2, 4, "K_0 = 0 is not between 1 and M = 4"),
        ("K=5,1", 2, 4, "K_0 = 5 is not between 1 and M = 4"),
        ("K=1,2", 2, 3, "the schedule deadlocks; blocked actions are marked:\nstage 0: 0F0   0B0!"),
        ("K=2,", 2, 4, "'K=2,' is not a schedule such as"),
        ("dapple-a:D=0", 2, 2, "D=0: a stage must hold at least one micro-batch"),
        ("gpipe:D=3", 2, 4, "gpipe holds all M=4 micro-batches, but D=3: use dapple-a"),
        ("dapple-a:3", 2, 2, "'dapple-a:3' is not a schedule such as 'dapple-a', 'dapple-b:D=4' or 'K=3,2,1'"),
        ("Dapple A", 2, 2, "'Dapple A' is not a schedule"),
        ("dapple-a", 2, 0, "K_0 = 0 is not between 1 and M = 0"),
        ("dapple-a", 0, 2, "each worker of a schedule must have at least one action"),
    ],
)
def test_a_schedule_that_cannot_be_built_is_refused(name: str, stages: int, micro_batches: int, said: str) -> None:
    with refused(ScheduleError, said):
        ScheduleSpec.parse(name).build(stages, micro_batches)


@pytest.mark.parametrize("k", [(2, 0), (2, 4)])
def test_a_warm_up_out_of_range_is_refused(k: tuple[int, ...]) -> None:
    with refused(ScheduleError, f"K_1 = {k[1]} is not between 1 and M = 3"):
        early_backward(k, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0 0X0", "'0X0' is not an action such as 2F0"),
        ("0F0 0B0\n0F1 0B1", "stage 0 is on workers 0 and 1: a stage is on one worker"),
        ("0F0 0B0\n2F0 2B0", "stage 1 is on no worker, but stage 2 is on worker 1"),
        ("", "each worker of a schedule must have at least one action"),
        (
            "0F0 0B0\n1F0 1B0 1F1 1B1",
            "stage 1 must run F and B of each micro-batch once; missing or unexpected: 1B1 1F1",
        ),
        (
            "0F0 1F0 1B0 0B0 1F1 1B1",
            "worker 0 (stages [0, 1]) must run F and B of each micro-batch once; missing or unexpected: 1B1 1F1",
        ),
        ("0F0 0F0", "stage 0 must run F and B of each micro-batch once; missing or unexpected: 0B0"),
        (
            "0F0 0I0 0W0\n1F0 1B0 1F1",
            "stage 1 must run F, and B or both I and W, of each micro-batch once; missing or unexpected: 1F1",
        ),
        ("0F0 0B0\n1F0 1B1", "stage 1 must run F and B of each micro-batch once; missing or unexpected: 1B0"),
        ("0F0 0B0 0F1", "missing or unexpected: 0B1"),
        (
            "0F0+ 0B0 0F1 0B1\n1F0 1B0 1F1 1B1",
            "the result of 0F0+ travels with the result of 0F1, so stage 0 must run 0F1 next, not 0B0",
        ),
        (
            "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1+",
            "the result of 1B1+ travels with the result of 1B2, so stage 1 must run 1B2 next, not end there",
        ),
        (
            "0F0 0F1 0B0 0B1\n1F0 1F1 1I0 1I1 1W0+ 1W1",
            "1W0+ has no meaning: gradients of weights stay on stage 1, so no result travels: write 1W0",
        ),
        (
            "0F0 0F1 0B0+ 0B1\n1F0 1F1 1B0 1B1",
            "0B0+ has no meaning: no stage takes the gradients of stage 0, so no result travels: write 0B0",
        ),
        ("0F0 0F1 0I0+ 0I1 0W0 0W1\n1F0 1F1 1B0 1B1", "0I0+ has no meaning: no stage takes the gradients of stage 0"),
        (
            "0F0 0F1 0B0 0B1\n1F0+ 1F1 1B0 1B1",
            "1F0+ has no meaning: no stage takes the activations of stage 1, so no result travels: write 1F0",
        ),
        (
            "0F0+ 0F1 1F0 1F1 1B0 1B1 0B0 0B1",
            "0F0+ has no meaning: stage 1, which takes its result, is on the same worker",
        ),
        (
            "0F0 0F1 1F0 1F1 1B0+ 1B1 0B0 0B1",
            "1B0+ has no meaning: stage 0, which takes its result, is on the same worker",
        ),
    ],
)
def test_a_text_that_is_no_schedule_is_refused(text: str, said: str) -> None:
    with refused(ScheduleError, said):
        parse_schedule(text)


def test_an_action_of_another_stage_is_refused() -> None:
    with refused(ScheduleError, "stage 0 is on no worker, but stage 1 is on worker 0"):
        check(Schedule(((Action(1, "F", 0), Action(1, "B", 0)),)))


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("0B0 0F0", "stage 0: 0B0!  0F0"),
        ("0F0 0W0 0I0", "stage 0: 0F0   0W0!  0I0"),
        (
            "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1",
            "stage 0: 0F0   0B0!  0F1   0B1\nstage 1: 1F0   1F1!  1B0   1B1",
        ),
        (
            "0F0 0F1 0B0 0B1\n1F0 1F1 1B1 1B0\n2F1 2B1 2B0 2F0",
            "stage 0: 0F0   0F1   0B0!  0B1\nstage 1: 1F0   1F1   1B1   1B0!\nstage 2: 2F1   2B1   2B0!  2F0",
        ),
        (  # the backward waits for a forward that waits for the forward behind it
            "0F0+ 0F1 0B0 0B1\n1F0 1B0+ 1B1 1F1",
            "stage 0: 0F0+  0F1   0B0!  0B1\nstage 1: 1F0   1B0+  1B1!  1F1",
        ),
    ],
)
def test_the_error_of_a_deadlock_shows_the_blocked_action_of_each_stage(text: str, grid: str) -> None:
    with refused(ScheduleError, f"the schedule deadlocks; blocked actions are marked:\n{grid}"):
        parse_schedule(text)


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1",
        "0F0 0F1 0B0 0B1 ;\n\n1F0 1B0 1F1 1B1;",
        "  0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n",
    ],
)
def test_the_text_of_a_schedule_can_be_used_as_its_name(text: str) -> None:
    ScheduleSpec.parse(text)
    schedule = ScheduleSpec.parse(text).build(2, 2)
    assert schedule == ScheduleSpec.parse("dapple-a").build(2, 2)
    assert not ScheduleSpec.parse(text).splits_backward
    assert ScheduleSpec.parse(text).warm_up(2, 2) is None


def test_a_text_may_say_what_travels_together() -> None:
    text = "0F0+ 0F1 0B0 0B1\n1F0 1F1 1I0+ 1B1 1W0"
    assert str(parse_schedule("0F0+ 0F1 0B0 0B1\n1F0 1F1 1B0+ 1B1")) == "0F0+ 0F1 0B0 0B1\n1F0 1F1 1B0+ 1B1"
    with refused(ScheduleError, "travels with the result of 1I1, so stage 1 must run 1I1 next, not 1B1"):
        parse_schedule(text)
    halves = parse_schedule("0F0 0F1 0B0 0B1\n1F0 1F1 1B0+ 1B1 1W0 1W1")  # as earlier versions wrote I
    assert halves.together == {Action(1, "I", 0)}
    three = parse_schedule("0F0+ 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2")
    assert three.first_micro_batches(1).together == frozenset()
    assert three.first_micro_batches(2).together == {Action(0, "F", 0)}


def test_a_schedule_that_follows_another_is_for_further_micro_batches() -> None:
    first, second = parse_schedule("0F0 0B0; 1F0 1B0"), parse_schedule("0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0 1B1")
    joined = first.followed_by(second)
    assert str(joined) == "0F0 0B0 0F1+ 0F2 0B1 0B2\n1F0 1B0 1F1 1F2 1B1 1B2"
    assert Schedule(((), ())).followed_by(first) == first


def test_three_results_can_travel_together() -> None:
    schedule = parse_schedule("0F0+ 0F1+ 0F2 0B0 0B1 0B2; 1F0 1F1 1F2 1B0 1B1 1B2")
    assert list(groups_together(schedule)) == [(Action(0, "F", 0), Action(0, "F", 1), Action(0, "F", 2))]


def test_a_text_may_delay_the_gradients_of_weights() -> None:
    text = "0F0 0F1 0I1 0I0 0W0 0W1"
    schedule = ScheduleSpec.parse(text).build(1, 2)
    assert (str(schedule), schedule.in_flight, ScheduleSpec.parse(text).splits_backward) == (text, (2,), True)


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "said"),
    [
        ("0F0 0B0; 1F0 1B0", 3, 1, "the schedule's text is for 2 stages x 1 micro-batch, but there are 3 x 1: write"),
        ("0F0 0B0", 1, 2, "the schedule's text is for 1 stage x 1 micro-batch, but there are 1 x 2: write a line"),
        ("0F0 0X0", 1, 1, "'0X0' is not an action such as 2F0"),
        ("0X0 0F0", 1, 1, "'0X0' is not an action such as 2F0"),
        ("dapple-a 0F0", 1, 1, "'dapple-a' is not an action such as 2F0"),
        ("0B0 0F0", 1, 1, "the schedule deadlocks; blocked actions are marked:\nstage 0: 0B0!  0F0"),
    ],
)
def test_a_text_for_other_stages_or_micro_batches_is_refused(
    name: str, stages: int, micro_batches: int, said: str
) -> None:
    with refused(ScheduleError, said):
        ScheduleSpec.parse(name).build(stages, micro_batches)


@given(policies, shapes, st.integers(1, 9))
def test_a_text_for_fewer_micro_batches_keeps_its_order(name: str, shape: tuple[int, int], fewer: int) -> None:
    schedule = ScheduleSpec.parse(name).build(*shape)
    fewer = min(fewer, shape[1])
    found = ScheduleSpec.parse(str(schedule)).truncate(fewer).build(shape[0], fewer)
    for before, after in zip(schedule.stages, found.stages, strict=True):
        assert [a for a in before if a in after] == list(after)


def test_zb_h1_refuses_a_warm_up_above_the_memory_limit() -> None:
    for warm, most in (((2, 1), 1), ((3, 1), 2), ((1, 0), 2)):
        with refused(ScheduleError, "is not between 1 and M = 2 and D = "):
            zero_bubble(warm, (0, 1), 2, most)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (2, 2, 1), (3, 2, 1), (2, 3, 2)])
def test_the_bubbles_of_zero_bubble_schedules_are_the_paper_s(stages: int, f: int, b: int, w: int) -> None:
    """Qi et al., 2023, section 2: the idle time of the first stage, between its first and its last action."""
    seconds = {"F": f, "I": b, "W": w}
    for name, share, held in (("zb-h1", 1, stages), ("zb-h2", 2, 2 * stages - 1)):
        for micro_batches in (2 * stages, 3 * stages + 1):
            schedule = ScheduleSpec.parse(name).build(stages, micro_batches)
            ends = run_schedule(schedule, lambda action: seconds[action.kind])
            assert max(own[-1] - own[0] + f for own in ends) - micro_batches * (f + b + w) == (stages - 1) * (
                f + b - share * w
            )
            assert set(schedule.in_flight) == {held}


def test_a_long_text_is_abbreviated() -> None:
    assert ScheduleSpec.parse("zb-h1:D=3").short == "zb-h1:D=3"
    assert ScheduleSpec.parse("0F0 0B0").short == "0F0 0B0"
    assert ScheduleSpec.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1").short == "given (0F0 0F1 0B0 0B1 ...)"


def test_any_order_that_does_not_deadlock_is_a_schedule() -> None:
    text = "0F1 0F0 0B0 0B1\n1F1 1F0 1B0 1B1"
    assert str(parse_schedule(text)) == text


def test_the_error_of_a_long_deadlock_shows_the_actions_around_the_blocked_ones() -> None:
    """Stage 1 has the last micro-batch's backward before its forward."""
    first = [f"0F{m}" for m in range(100)] + [f"0B{m}" for m in range(100)]
    second = [f"1F{m} 1B{m}" for m in range(99)] + ["1B99 1F99"]
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(" ".join(first) + "\n" + " ".join(second))
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert re.fullmatch(r"stage 1: \(168 before\) .* 1F98 +1B98 +1B99!  *1F99", lines[2])
    assert lines[1].endswith("0B98  0B99!")
    assert all(len(line) < 300 for line in lines)


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches"),
    [
        ("dapple-b:D=2", None, None),
        ("K=3,2,1", 3, None),
        ("K=1", 1, None),
        ("0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1", 2, 2),
    ],
)
def test_the_stages_and_micro_batches_that_a_name_is_for(
    name: str, stages: int | None, micro_batches: int | None
) -> None:
    spec = ScheduleSpec.parse(name)
    assert (spec.stages, spec.micro_batches) == (stages, micro_batches)


@pytest.mark.parametrize("name", ["dapple", "dapple-a:D=0", "K=", "K=1,", "dapple-a:M=3", ""])
def test_a_name_that_is_no_schedule_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError):
        ScheduleSpec.parse(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "gpipe",
            "dapple-a",
            "dapple-b:D=2",
            "gpipe:D=2",
            "zb-h1",
            "zb-h1:D=1",
            "1f1b-so",
            "dapple-a:D=0",
            "dapple-c",
        ),
        *("K=1", "K=2,1", "K=1,2", "K=3,3,1", "K=0,1", "K=2,1,2", "K=4,4"),
        *("0F0 0B0", "0F0 0B0; 1F0 1B0", "0B0 0F0"),
    ],
)
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_a_schedule_is_checked_as_if_it_was_built(name: str, stages: int, micro_batches: int) -> None:
    try:
        ScheduleSpec.parse(name).build(stages, micro_batches)
    except ScheduleError as error:
        with refused(ScheduleError, str(error)[:20]):
            ScheduleSpec.parse(name).check(stages, micro_batches)
    else:
        ScheduleSpec.parse(name).check(stages, micro_batches)


@pytest.mark.parametrize("text", ["0F" + "9" * 5000, "9" * 5000 + "F0", "K=" + "9" * 5000, "dapple-a:D=" + "9" * 5000])
def test_a_number_of_thousands_of_digits_is_refused(text: str) -> None:
    """Python itself refuses to read it, with a plain ValueError."""
    with pytest.raises(ScheduleError):
        ScheduleSpec.parse(text).build(1, 1)
    with pytest.raises(ScheduleError):
        parse_schedule(text)


def test_the_error_of_wrong_actions_names_only_some() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(" ".join(f"0F{number}" for number in range(10_000)))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("written", "known"), [("GPipe", "gpipe"), ("1F1B:D=2", "1f1b:D=2"), ("ZB-V", "zb-v")])
def test_a_name_may_be_written_in_any_case(written: str, known: str) -> None:
    assert ScheduleSpec.parse(written) == ScheduleSpec.parse(known)
