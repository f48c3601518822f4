"""Timelines: their figures, made from time stamps, and of real steps."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import dapple_tf as dapple
from dapple_tf.errors import UsageError
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.timeline.events import Event, MemoryCurve, StageEvent, Transfer
from dapple_tf.timeline.picture import make_chart
from dapple_tf.timeline.stamps import Stamp, make_timeline, read_timeline
from dapple_tf.timeline.timeline import PhasesTimeline, Timeline
from dapple_tf.timeline.trace_file import read_recording
from tests.dapple_tf.builders import X, chain, step_of
from tests.dapple_tf.simulator.builders import cost
from tests.dapple_tf.simulator.builders import make_timeline as make_timeline_of_costs


def event(text: str, device: int, start: float, end: float, replica: int = 0) -> Event:
    stage, kind, micro_batch = text
    return Event(Action(int(stage), kind, int(micro_batch)), replica, f"/device:CPU:{device}", start, end)


def events(text: str) -> tuple[Event, ...]:
    """Events such as ``0F0 0-1.5, 1F0 2-3``, each on the device with the number of its stage."""
    found = []
    for action, span in (entry.split() for entry in text.split(", ")):
        start, end = map(float, span.split("-"))
        found.append(event(action, int(action[0]), start, end))
    return tuple(found)


TWO = Timeline(events("0F0 0-1, 1F0 1-2, 1B0 2-4, 0B0 4-6"))


def test_seconds_and_bubble() -> None:
    assert TWO.seconds == 6
    assert TWO.bubble == pytest.approx(0.5)  # 6 of 12 device seconds


def test_utilisation_is_by_stage_and_by_device() -> None:
    assert TWO.utilisation == TWO.stage_utilisation == (0.5, 0.5)
    assert TWO.device_utilisation["/device:CPU:1"] == 0.5


def test_recorded_and_simulated_steps_are_timelines() -> None:
    simulated = make_timeline_of_costs("dapple-a", 2, [cost(1, 2), cost(1, 2)])
    assert isinstance(simulated, dapple.Timeline)
    assert type(TWO) is dapple.Timeline
    for timeline, seconds in ((simulated, 9), (TWO, 6)):
        assert timeline.step_seconds == timeline.seconds == seconds
        assert str(timeline).startswith(f"{seconds} s, bubble {timeline.bubble:.1%}")
        assert sum(part.seconds for part in timeline.critical_path) == seconds
        assert {"step_seconds", "bubble", "critical_stage", "critical_path", "stages"} <= set(timeline.to_json())
    assert simulated.devices == ("device:0", "device:1")
    assert simulated.device_utilisation["device:1"] == simulated.utilisation[1] == pytest.approx(6 / 9)


def test_the_stages_of_a_recorded_step_have_median_seconds() -> None:
    second = event("0F0", 1, 0, 1, replica=1), event("0F1", 1, 1, 2, replica=1)
    reductions = (StageEvent("allreduce", 0, 0, "/device:CPU:0", 5.0, 7.0),)
    (stage,) = Timeline((*events("0F0 0-1, 0F1 1-4, 0B0 4-6, 0B1 6-8"), *second), (), reductions).stages
    assert (stage.stage, stage.devices) == (0, ("/device:CPU:0", "/device:CPU:1"))
    assert (stage.forward_seconds, stage.backward_seconds, stage.weights_seconds) == (1, 2, None)
    assert (stage.allreduce_seconds, stage.peak_memory_bytes) == (2, None)
    assert stage.actions == "0F0 0F1 0B0 0B1"
    assert stage.to_json()["actions"] == stage.actions


@pytest.mark.parametrize("name", ["plan", "speedup", "acr", "peak_memory_bytes", "fits"])
def test_figures_of_the_cost_model_are_refused_for_a_recorded_step(name: str) -> None:
    with pytest.raises(UsageError, match=f"only the timeline of a simulated step has '{name}'"):
        getattr(TWO, name)
    with pytest.raises(UsageError, match="only the timeline of a simulated step has 'memory'"):
        TWO.memory(0)
    assert not hasattr(TWO, name)  # as of an attribute that a class does not have


def test_a_device_that_is_always_busy_has_no_bubble() -> None:
    assert Timeline(events("0F0 0-1, 0B0 1-3")).bubble == 0


def test_the_order_of_each_replica() -> None:
    second = event("0F0", 1, 0.5, 1, replica=1)
    timeline = Timeline((*events("0F0 0-1, 0B0 1-2"), second, TWO.events[1]))
    assert [str(action) for action in timeline.order(0)] == ["0F0", "0B0"]
    assert [str(action) for action in timeline.order(0, 1)] == ["0F0"]
    assert [str(action) for action in timeline.order(1)] == ["1F0"]


@pytest.mark.parametrize("schedule", ["dapple-a", "dapple-b", "gpipe", "dapple-a:D=1"])
def test_a_recorded_step_ran_in_the_schedules_order(schedule: str) -> None:
    _, loss = chain(3)
    step = step_of(loss, stages=3, micro_batches=4, schedule=schedule)
    step.record(X)
    wanted = ScheduleSpec.parse(schedule).build(3, 4).stages
    assert [step.timeline.order(stage) for stage in range(3)] == [tuple(actions) for actions in wanted]


def test_a_recorded_step_trains_and_returns_the_loss() -> None:
    losses = []
    for record in (False, True):
        _, loss = chain(2)
        step = step_of(loss)
        losses.append([float(step.record(X) if record else step(X)) for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][1] < losses[0][0]


def test_events_of_a_recorded_step_have_replicas_and_devices() -> None:
    _, loss = chain(2)
    step = step_of(loss, replicas=[2, 1])
    step.record(X)
    events = step.timeline.events
    assert {(e.action.stage, e.replica, e.device) for e in events} == {
        (0, 0, "/device:CPU:0"),
        (0, 1, "/device:CPU:1"),
        (1, 0, "/device:CPU:2"),
    }
    assert len(events) == 3 * 2 * 2  # places, micro-batches, F and B
    assert min(e.start for e in events) == 0
    assert all(e.start <= e.end for e in events)
    assert [e.start for e in events] == sorted(e.start for e in events)
    assert 0 <= step.timeline.bubble < 1


def test_start_and_end_stamps_are_paired_with_their_calls() -> None:
    _, loss = chain(2)
    step = step_of(loss, micro_batches=1)
    step.record(X)
    found = read_timeline(step.graph, np.arange(10.0, 24.0))
    assert [(e.start, e.end) for e in found.events] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {str(e.action) for e in found.events} == {"0F0", "1F0", "1B0", "0B0"}
    updates = [(e.kind, e.stage, e.end - e.start) for e in found.stage_events]
    assert sorted(updates, key=str) == [("update", 0, 1), ("update", 1, 1), ("update", None, 1)]


def test_weight_gradients_have_actions_and_spans_of_their_own() -> None:
    calls = [
        ("forward", 0, 0, 1),
        ("inputs", 0, 1, 3),
        ("forward", 1, 3, 4),
        ("backward", 1, 4, 6),
        ("weights", 0, 6, 7),
    ]
    stamps = [stamp(op, f"stage0/replica0/mb{m}/{op}", (0, 0, m), 0, start, end) for op, m, start, end in calls]
    found = make_timeline(stamps)
    assert found.actions(0) == "0F0 0I0 0F1 0B1 0W0"
    assert [(span.name, span.kind) for span in make_chart(found).spans] == [
        ("0F0", "forward"),
        ("0I0", "inputs"),
        ("0F1", "forward"),
        ("0B1", "backward"),
        ("0W0", "weights"),
    ]
    (stage,) = found.stages
    assert (stage.forward_seconds, stage.backward_seconds, stage.weights_seconds) == (1, 3, 1)  # of the split one


def stamp(op: str, name: str, place: tuple[int | None, int | None, int | None], rank: int, *times: float) -> Stamp:
    return Stamp(op, name, *place, f"rank:{rank}", *times)


def test_times_of_several_ranks_become_one_timeline() -> None:
    there = "exchange/stage0_to_stage1/mb0/forward"
    found = make_timeline(
        [
            stamp("forward", "stage0/replica0/mb0/forward", (0, 0, 0), 0, 10.0, 11.0),
            stamp("exchange", there, (None, None, None), 0, 11.0, 12.0),
            stamp("exchange", "exchange/outputs", (None, None, None), 0, 11.5, 15.0),
            stamp("exchange", there, (None, None, None), 1, 9.0, 12.5),  # rank 1 waits from the start of the step
            stamp("forward", "stage1/replica0/mb0/forward", (1, 0, 0), 1, 12.5, 13.0),
            stamp("allreduce", "stage0/allreduce", (0, None, None), 0, 14.0, 16.0),
            stamp("update", "update/shared", (None, None, None), 1, 16.0, 16.5),
        ]
    )
    assert [(str(e.action), e.device, e.start, e.end) for e in found.events] == [
        ("0F0", "rank:0", 0, 1),
        ("1F0", "rank:1", 2.5, 3),
    ]
    assert found.transfers == (Transfer(0, 1, 0, 1.0, 2.5),)
    assert [(e.kind, e.stage, e.start, e.end) for e in found.stage_events] == [
        ("allreduce", 0, 4, 6),
        ("update", None, 6, 6.5),
    ]
    assert found.seconds == 6.5
    assert found.device_utilisation["rank:1"] == pytest.approx(0.5 / 6.5)
    assert found.bubble == pytest.approx(1 - 1.5 / 13)


def test_an_exchange_of_several_micro_batches_is_one_transfer() -> None:
    there = "exchange/stage0_to_stage1/mb0-1/forward"
    found = make_timeline(
        [
            stamp("forward", "stage0/replica0/mb0/forward", (0, 0, 0), 0, 10.0, 11.0),
            stamp("forward", "stage0/replica0/mb1/forward", (0, 0, 1), 0, 11.0, 12.0),
            stamp("exchange", there, (None, None, None), 0, 12.0, 12.25),
            stamp("exchange", there, (None, None, None), 1, 10.0, 13.0),
            stamp("forward", "stage1/replica0/mb0/forward", (1, 0, 0), 1, 13.0, 14.0),
            stamp("forward", "stage1/replica0/mb1/forward", (1, 0, 1), 1, 14.0, 15.0),
        ],
        together=[Action(0, "F", 0)],
    )
    assert found.transfers == (Transfer(0, 1, 1, 2.0, 3.0, count=2),)
    assert [str(part) for part in found.critical_path] == ["0F0", "0F1", "0>1 F0+F1", "1F0", "1F1"]


def test_a_recorded_step_of_one_process_knows_what_travels_together() -> None:
    _, loss = chain(2)
    step = step_of(loss, micro_batches=2, schedule="0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0+ 1B1")
    step.record(X)
    assert step.timeline.step.together == {Action(0, "F", 0), Action(1, "B", 0)}
    ends = {str(event.action): (event.start, event.end) for event in step.timeline.events}
    assert ends["1F0"][0] >= ends["0F1"][1]
    assert ends["0B0"][0] >= ends["1B1"][1]
    predicted = step.recording.predicted
    assert predicted.timeline.step.together == step.timeline.step.together


def test_a_timeline_can_be_copied() -> None:
    assert TWO.device_utilisation["/device:CPU:0"] == 0.5  # computed before it is copied
    copied = pickle.loads(pickle.dumps(TWO))
    assert copied == TWO
    assert copied.device_utilisation["/device:CPU:0"] == 0.5


def test_a_transfer_has_started_before_the_first_of_its_receivers_goes_on() -> None:
    there = "exchange/stage0_to_stage1/mb0/forward"
    found = make_timeline(
        [
            stamp("forward", "stage0/replica0/mb0/forward", (0, 0, 0), 0, 10.0, 11.0),
            stamp("exchange", there, (None, None, None), 0, 11.0, 11.5),
            stamp("exchange", there, (None, None, None), 1, 10.5, 11.25),
            stamp("forward", "stage1/replica0/mb0/forward", (1, 0, 0), 1, 11.25, 13.0),
            stamp("exchange", there, (None, None, None), 2, 12.0, 12.25),  # a receiver that comes late
            stamp("forward", "stage1/replica1/mb0/forward", (1, 1, 0), 2, 12.25, 14.0),
        ]
    )
    assert found.transfers == (Transfer(0, 1, 0, 1.25, 2.25),)


def test_a_transfer_of_two_senders_starts_when_the_last_of_them_has_its_tensor() -> None:
    back = "exchange/stage1_to_stage0/mb0/backward"
    found = make_timeline(
        [
            stamp("backward", "stage1/replica0/mb0/backward", (1, 0, 0), 1, 9.0, 10.0),
            stamp("exchange", back, (None, None, None), 1, 10.0, 10.25),  # it queues its rows and goes on
            stamp("backward", "stage1/replica1/mb0/backward", (1, 1, 0), 2, 9.0, 12.0),
            stamp("exchange", back, (None, None, None), 2, 12.0, 12.25),
            stamp("exchange", back, (None, None, None), 0, 9.5, 12.5),
            stamp("backward", "stage0/replica0/mb0/backward", (0, 0, 0), 0, 12.5, 13.0),
        ]
    )
    assert found.transfers == (Transfer(1, 0, 0, 3.0, 3.5),)


def test_the_memory_of_phases_that_overlap_is_that_of_the_largest_and_can_be_read_again(tmp_path: Path) -> None:
    curves = [
        MemoryCurve("CPU", (0.0, 2.0, 3.0), (5.0, 9.0, 1.0)),
        MemoryCurve("CPU", (0.0, 1.5, 3.0), (4.0, 7.0, 2.0)),
    ]
    first, second = (Timeline((event("0F0", 0, 0.0, 3.0),), (), (), memory_curves=[curve]) for curve in curves)
    PhasesTimeline((first, second), (0.0, 1.0)).save(tmp_path / "step.json")
    measured = read_recording(tmp_path / "step.json").measured
    # The second phase begins after a second; times count from there.
    assert measured.memory_curves == (
        MemoryCurve("CPU", (-1.0, 0.0, 1.0, 1.5, 2.0, 3.0), (5.0, 5.0, 9.0, 9.0, 7.0, 2.0)),
    )
