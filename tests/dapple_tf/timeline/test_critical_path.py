"""The critical path of a recorded step, by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.graph_passes.schedules.schedule import Action, Kind
from dapple_tf.timeline.critical_path import critical_stage, sum_by_kind
from dapple_tf.timeline.events import Event, StageEvent, Transfer
from dapple_tf.timeline.timeline import Timeline
from tests.dapple_tf.timeline.test_timeline import TWO, event, events


def path_of(timeline: Timeline) -> list[tuple[str, float, float]]:
    return [(str(part), part.start, part.end) for part in timeline.critical_path]


def summed(kind: str, stage: int | None, device: int, start: float, end: float) -> StageEvent:
    assert kind in ("allreduce", "update")
    return StageEvent("allreduce" if kind == "allreduce" else "update", stage, 0, f"/device:CPU:{device}", start, end)


def test_a_path_without_gaps_is_all_compute() -> None:
    assert path_of(TWO) == [("0F0", 0, 1), ("1F0", 1, 2), ("1B0", 2, 4), ("0B0", 4, 6)]
    assert sum_by_kind(TWO.critical_path) == {"compute": 6, "transfer": 0, "allreduce": 0, "update": 0, "waiting": 0}
    assert TWO.critical_stage == 0  # 1 + 2 seconds, as stage 1: the first of several


def test_a_gap_is_waiting_for_what_comes_after_it() -> None:
    late = Timeline((*TWO.events[:3], event("0B0", 0, 4.5, 6.0)))
    assert path_of(late)[-2:] == [("wait before 0B0", 4, 4.5), ("0B0", 4.5, 6)]
    assert sum_by_kind(late.critical_path)["waiting"] == 0.5


def test_the_path_goes_on_with_the_input_that_ended_last_of_the_device_or_of_another_stage() -> None:
    # 0F1 holds stage 0 until 3, 1B0 has ended at 2.5: 0B0 waited for its device. 1F1 waited for 0F1, not for 1B0.
    timeline = Timeline(events("0F0 0-1, 0F1 1-3, 1F0 1-1.5, 1B0 1.5-2.5, 0B0 3-4, 1F1 3-3.5, 1B1 3.5-4.5, 0B1 4.5-5"))
    assert [name for name, _, _ in path_of(timeline)] == ["0F0", "0F1", "1F1", "1B1", "0B1"]
    assert timeline.critical_stage == 0  # 3.5 seconds to 1.5


def test_a_transfer_that_waits_for_its_channel_follows_the_transfer_before_it() -> None:
    # 0>1 1 could start when 0F1 ended at 2, but its channel was busy until 4.
    timeline = Timeline(
        events("0F0 0-1, 0F1 1-2, 1F0 4-5, 1F1 7.25-8"),
        (Transfer(0, 1, 0, 1.0, 4.0), Transfer(0, 1, 1, 4.0, 7.0)),
    )
    assert path_of(timeline) == [
        ("0F0", 0, 1),
        ("0>1 F0", 1, 4),
        ("0>1 F1", 4, 7),
        ("wait before 1F1", 7, 7.25),
        ("1F1", 7.25, 8),
    ]
    assert sum_by_kind(timeline.critical_path)["transfer"] == 6


@pytest.mark.parametrize("is_known", [True, False])
def test_without_transfers_a_stage_waits_for_the_last_result_that_travels_with_what_it_takes(is_known: bool) -> None:
    """As in one process, where no transfer is recorded: what travels together is known from the schedule."""
    timeline = Timeline(
        events("0F0 0-1, 0F1 1-2, 1F0 2.25-3, 1F1 3-4"),
        together=[Action(0, "F", 0)] if is_known else [],
    )
    first = [("0F0", 0, 1), ("0F1", 1, 2), ("wait before 1F0", 2, 2.25)]
    unknown = [("0F0", 0, 1), ("wait before 1F0", 1, 2.25)]
    assert path_of(timeline) == [*(first if is_known else unknown), ("1F0", 2.25, 3), ("1F1", 3, 4)]


def test_a_transfer_of_several_results_waits_for_the_last_one() -> None:
    timeline = Timeline(
        events("0F0 0-1, 0F1 1-2, 1F0 4-5, 1F1 5-6"),
        (Transfer(0, 1, 1, 2.0, 4.0, count=2),),
        together=[Action(0, "F", 0)],
    )
    assert path_of(timeline) == [("0F0", 0, 1), ("0F1", 1, 2), ("0>1 F0+F1", 2, 4), ("1F0", 4, 5), ("1F1", 5, 6)]


def test_an_allreduce_starts_when_the_last_replica_reaches_it() -> None:
    # Replica 0 has waited in it since 2; replica 1 comes at 5, and both go on at 6.
    timeline = Timeline(
        (
            event("0F0", 0, 0.0, 1.0),
            event("0B0", 0, 1.0, 2.0),
            event("0F0", 1, 0.0, 2.0, 1),
            event("0B0", 1, 2.0, 5.0, 1),
        ),
        (),
        (summed("allreduce", 0, 0, 2.0, 6.0), summed("allreduce", 0, 1, 5.0, 6.0), summed("update", 0, 1, 6.0, 7.0)),
    )
    assert path_of(timeline) == [
        ("0F0 of replica 1", 0, 2),
        ("0B0 of replica 1", 2, 5),
        ("AllReduce of stage 0", 5, 6),
        ("update of stage 0", 6, 7),
    ]


def test_an_allreduce_that_overlaps_a_backward_shortens_its_part_of_the_path() -> None:
    parts = (summed("allreduce", 0, 0, 2.0, 3.0), summed("allreduce", 0, 0, 2.5, 4.0))
    timeline = Timeline(events("0F0 0-1, 0B0 1-3.5"), (), parts)
    assert path_of(timeline) == [("0F0", 0, 1), ("0B0", 1, 2.5), ("AllReduce of stage 0", 2.5, 4)]


def test_a_weight_update_waits_for_the_last_event_of_every_stage() -> None:
    timeline = Timeline(TWO.events, (), (summed("update", 1, 1, 6.5, 7.0), summed("update", None, 0, 6.5, 6.6)))
    assert path_of(timeline)[-3:] == [
        ("0B0", 4, 6),
        ("wait before update of stage 1", 6, 6.5),
        ("update of stage 1", 6.5, 7),
    ]


def test_the_critical_stage_has_most_of_the_compute_on_the_path() -> None:
    timeline = Timeline((*TWO.events[:2], event("1B0", 1, 2.0, 5.0), event("0B0", 0, 5.0, 7.0)))
    assert critical_stage(timeline.critical_path) == timeline.critical_stage == 1


def test_events_that_take_no_time_are_not_on_the_path() -> None:
    timeline = Timeline(events("0F0 0-0, 0B0 0-0, 1F0 0-1"))
    assert path_of(timeline) == [("1F0", 0, 1)]


def test_the_path_goes_on_before_events_shorter_than_the_resolution_of_the_clock() -> None:
    """0I0 and 0I1 are of no length, and begin with the weights' gradients behind them."""
    timeline = Timeline(events("0F0 0-1, 0F1 1-2, 0I0 2-2, 0W0 2-3, 0I1 3-3, 0W1 3-4"))
    assert path_of(timeline) == [("0F0", 0, 1), ("0F1", 1, 2), ("0W0", 2, 3), ("0W1", 3, 4)]


@pytest.mark.parametrize("transfers", [(), (Transfer(1, 0, 0, 5.0, 6.0),)])
@pytest.mark.parametrize("kind", ["I", "B"])
def test_weight_gradients_of_the_first_stage_wait_for_the_gradient_from_the_next_stage(
    transfers: tuple[Transfer, ...], kind: str
) -> None:
    """0I0 has nothing to do, so it has run long before the backward of stage 1, or its part that gives gradients."""
    timeline = Timeline(
        (
            event("0F0", 0, 0.0, 1.0),
            event("0I0", 0, 1.0, 1.1),
            event("1F0", 1, 1.0, 3.0),
            event(f"1{kind}0", 1, 3.0, 5.0),
            *([event("1W0", 1, 5.0, 5.5)] if kind == "I" else []),
            event("0W0", 0, 6.0, 7.0),
        ),
        transfers,
    )
    between = [("1>0 B0", 5, 6)] if transfers else [("wait before 0W0", 5, 6)]
    assert path_of(timeline) == [("0F0", 0, 1), ("1F0", 1, 3), (f"1{kind}0", 3, 5), *between, ("0W0", 6, 7)]


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any events whatever: even where they overlap or contradict each other the parts must add up."""
    seconds = st.floats(0, 9).map(lambda value: round(value, 3))
    stages, replicas, m = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    events, transfers = [], []
    for stage in range(stages):
        for b in range(m):
            for replica in range(replicas):
                kinds: tuple[Kind, ...] = ("F", "I", "W") if draw(st.booleans()) else ("F", "B")
                for kind in kinds:
                    start = draw(seconds)
                    action = Action(stage, kind, b)
                    events.append(Event(action, replica, f"d:{stage}{replica}", start, start + draw(seconds)))
            if stage and draw(st.booleans()):
                start = draw(seconds)
                transfers.append(Transfer(stage - 1, stage, b, start, start + draw(seconds)))
    more = []
    for stage in range(stages):
        for kind in draw(st.lists(st.sampled_from(["allreduce", "update"]), max_size=3)):
            start = draw(seconds)
            more.append(summed(kind, stage, stage, start, start + draw(seconds)))
    return Timeline(tuple(events), tuple(transfers), tuple(more))


@given(timelines())
def test_the_parts_fill_the_step_from_its_start_to_its_end(timeline: Timeline) -> None:
    path = timeline.critical_path
    assert all(before.end == after.start for before, after in pairwise(path))
    if timeline.seconds:
        assert (path[0].start, path[-1].end) == (0, timeline.seconds)
    assert sum(sum_by_kind(path).values()) == pytest.approx(timeline.seconds, abs=1e-9)
