"""Recordings: a measured step beside its prediction; saved, and read again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dapple_tf.errors import TraceError, UsageError
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, parse_schedule
from dapple_tf.runtime.recorder import pair_with_prediction, predict_from_times, predict_phases
from dapple_tf.simulator.execution import execute
from dapple_tf.simulator.order import encode
from dapple_tf.simulator.simulated_step import execution_events
from dapple_tf.timeline.describe import find_slowest
from dapple_tf.timeline.events import Event, StageEvent, StepEvents, Transfer
from dapple_tf.timeline.picture import draw_recording, save_recording
from dapple_tf.timeline.recording import BY_PROFILE, BY_TIMES, Prediction, Recording
from dapple_tf.timeline.timeline import SimulatedTimeline, Timeline
from dapple_tf.timeline.trace_file import read_recording
from tests.dapple_tf.builders import X, chain, make_plan, step_of
from tests.dapple_tf.simulator.builders import cost, make_step
from tests.dapple_tf.simulator.builders import make_timeline as simulated
from tests.dapple_tf.timeline.test_timeline import TWO, event, events

# Two stages, two micro-batches of dapple-a: forwards take 1 s, backwards 2 s, but 0F1 and 1B1 a second longer.
# Activations travel for half a second, and stage 1's gradients are summed for 1 s after its last backward.
MEASURED = Timeline(
    events("0F0 0-1, 0F1 1-3, 1F0 1.5-2.5, 1B0 2.5-4.5, 0B0 4.5-6.5, 1F1 4.5-5.5, 1B1 5.5-8.5, 0B1 8.5-10.5"),
    (Transfer(0, 1, 0, 1.0, 1.5), Transfer(0, 1, 1, 3.0, 3.5)),
    (
        StageEvent("allreduce", 1, 0, "/device:CPU:1", 8.5, 9.5),
        StageEvent("update", 0, 0, "/device:CPU:0", 11.0, 11.25),
        StageEvent("update", None, 0, "/device:CPU:0", 11.25, 11.5),
    ),
)


def timeline_of(step: StepEvents) -> Timeline:
    return Timeline.of_step(step)


def test_phases_are_simulated_as_one_schedule_by_hand() -> None:
    """Nothing trains stage 0 in the first phase, so it begins the second one when its two forwards have ended, at 2."""
    first = Timeline(events("0F0 0-1, 0F1 1-2, 1F0 1-2, 1B0 2-4, 1F1 4-5, 1B1 5-7"))
    second = Timeline(events("0F0 0-3, 1F0 3-4, 1B0 4-5, 0B0 5-7"))
    of_first, of_second = parse_schedule("0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1"), parse_schedule("0F0 0B0; 1F0 1B0")
    idle = dataclasses.replace(of_first, workers=(of_first.workers[0][:2], of_first.workers[1]))
    # 0F0 of the second phase runs from 2 to 5. Stage 1 is in the first phase until 7: 1F0 to 8, 1B0 to 9, 0B0 to 11.
    assert predict_phases([first, second], [idle, of_second], [(), ()]) == 11
    assert predict_phases([MEASURED, second], [of_first, of_second], [(), ()]) is None  # it sums over replicas


def test_the_schedule_is_simulated_with_the_measured_medians_by_hand() -> None:
    found = predict_from_times(MEASURED, ScheduleSpec.parse("dapple-a").build(2, 2))
    # Medians: F 1.5 and 1 s, B 2 and 2.5 s. 1F0 from 2 to 3, 1B0 to 5.5, 1F1 to 6.5, 1B1 to 9, 0B1 to 11.
    assert {str(e.action): (e.start, e.end) for e in found.timeline.events} == {
        "0F0": (0, 1.5),
        "0F1": (1.5, 3),
        "1F0": (2, 3),
        "1B0": (3, 5.5),
        "0B0": (5.5, 7.5),
        "1F1": (5.5, 6.5),
        "1B1": (6.5, 9),
        "0B1": (9, 11),
    }
    assert found.timeline.transfers == (Transfer(0, 1, 0, 1.5, 2), Transfer(0, 1, 1, 3, 3.5))
    assert [(e.kind, e.stage, e.start, e.end) for e in found.timeline.stage_events] == [
        ("allreduce", 1, 9, 10),
        ("update", 0, 11, 11.25),
        ("update", None, 11.25, 11.5),
    ]
    assert found.source == BY_TIMES


def test_i_and_w_of_a_split_backward_are_simulated_with_their_own_medians() -> None:
    """Backwards of 1 and gradients of weights of 2 s: a step that went by the schedule is what is simulated of it."""
    run = make_step("zb-h1", 3, [cost(1, 3, weights_seconds=2)] * 2)
    measured = timeline_of(execution_events(run.execution, ((0, 0, "a:0"), (1, 0, "a:1"))))
    assert {e.end - e.start for e in measured.events if e.action.kind == "W"} == {2}
    assert predict_from_times(measured, ScheduleSpec.parse("zb-h1").build(2, 3)).timeline == measured


def test_a_step_with_whole_and_split_backwards_is_simulated_with_the_medians_of_each_kind() -> None:
    schedule = "0F0 0F1 0I0 0B1 0W0; 1F0 1B0 1F1 1I1 1W1"
    run = make_step(schedule, 2, [cost(1, 4, weights_seconds=3), cost(1, 3, weights_seconds=1)])
    measured = timeline_of(execution_events(run.execution, ((0, 0, "a:0"), (1, 0, "a:1"))))
    assert [(s.backward_seconds, s.weights_seconds) for s in measured.stages] == [(4, 3), (3, 1)]
    assert predict_from_times(measured, ScheduleSpec.parse(schedule).build(2, 2)).timeline == measured


def test_micro_batches_of_given_sizes_have_medians_of_their_own() -> None:
    """Each size occurs once, so the measured step is what is simulated of it: 0F1 and 1B1 take a second longer."""
    found = predict_from_times(MEASURED, ScheduleSpec.parse("dapple-a").build(2, 2), (1, 3))
    assert set(found.timeline.events) == set(MEASURED.events)
    found = predict_from_times(MEASURED, ScheduleSpec.parse("dapple-a").build(2, 2), (2, 2))
    assert found.timeline == predict_from_times(MEASURED, ScheduleSpec.parse("dapple-a").build(2, 2)).timeline


def test_the_seconds_of_a_transfer_are_divided_among_the_micro_batches_that_it_carries() -> None:
    """Two forwards travel for 1 s each in one transfer of 2 s, and backwards alone: as measured, so simulated."""
    schedule = parse_schedule("0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0 1B1")
    costs = [cost(1, 2, 1, 3)] * 2
    step = execution_events(
        execute(encode(schedule), costs, together=schedule.together), ((0, 0, "a:0"), (1, 0, "a:1"))
    )
    assert [t.end - t.start for t in step.transfers] == [2, 3, 3]
    measured = timeline_of(step)
    assert (measured.costs[0].send_forward_seconds, measured.costs[0].send_backward_seconds) == (1, 3)
    assert predict_from_times(measured, schedule).timeline == measured
    assert predict_from_times(measured, schedule, (2, 2)).timeline == measured


def test_time_that_a_transfer_waits_for_its_channel_does_not_count_as_its_duration() -> None:
    # All come at 1 and go one after the other: 1, 1 and 2 seconds, whatever their own length.
    sent = tuple(Transfer(0, 1, m, 1.0, end) for m, end in enumerate((2.0, 3.0, 5.0)))
    events = tuple(event(f"{s}{k}{m}", s, 0.0, 1.0) for s in range(2) for k in "FB" for m in range(3))
    found = predict_from_times(Timeline(events, sent), ScheduleSpec.parse("gpipe").build(2, 3))
    assert [t.end - t.start for t in found.timeline.transfers] == [1, 1, 1]


def test_events_of_a_simulated_step_can_be_placed_on_the_devices_of_a_measured_one() -> None:
    run = make_step("gpipe", 2, [cost(1, 2, exposed_seconds=1), cost(1, 1)], (2, 1))
    places = ((0, 0, "a:0"), (0, 1, "a:1"), (1, 0, "a:2"))
    found = timeline_of(execution_events(run.execution, places))
    assert found.places == places
    assert found.seconds == run.step_seconds
    assert [e.device for e in found.stage_events] == ["a:0", "a:1"]
    for device in ("a:0", "a:1"):
        assert [str(e.action) for e in found.events if e.device == device] == ["0F0", "0F1", "0B0", "0B1"]
    assert found.bubble == pytest.approx(SimulatedTimeline(run).bubble)
    assert found.stage_utilisation == pytest.approx(run.stage_utilisation)


def test_the_error_of_the_planner_is_in_headline_text_and_json() -> None:
    plan = make_plan((0, 0, (0,)), (1, 1, (1,)), model="net", micro_batches=2, predicted={"step_seconds": 9.2})
    recording = pair_with_prediction(MEASURED, plan)
    assert recording.planner_error == pytest.approx(-0.2)
    assert recording.prediction_error == 0
    assert recording.headline == "net: dapple-a, M = 2 · 11.5 s, bubble 39.1% · planner said 9.2 s (-20.0%)"
    lines = str(recording).splitlines()
    assert lines[0] == "measured: 11.5 s, bubble 39.1%; busy: stage 0 61%, stage 1 61%"
    assert lines[-1] == "the planner predicted 9.2 s, 20.0% less than measured"
    found = recording.to_json()
    assert (found["planned_step_seconds"], found["planner_error"]) == (9.2, pytest.approx(-0.2))
    assert found["predicted"]["source"] == BY_TIMES


def test_a_step_is_compared_with_the_simulation_of_its_plan_if_there_is_one() -> None:
    run = simulated("dapple-a", 2, [cost(1, 2), cost(1, 2)])
    plan = dataclasses.replace(run.plan, predicted={"step_seconds": run.step_seconds})
    recording = pair_with_prediction(MEASURED, plan, run)
    assert recording.predicted.source == BY_PROFILE
    assert recording.predicted.timeline.seconds == run.step_seconds == 9
    assert str(recording).count("9 s") == 2, "what is known is not told again"


def test_the_text_has_the_parts_of_the_critical_path() -> None:
    assert str(MEASURED).splitlines()[1] == (
        "critical path: compute 10 s (87%), transfers 500 ms (4%), weight update 500 ms (4%), waiting 500 ms (4%); "
        "critical stage 1; longest wait 500 ms, before update of stage 0"
    )


def test_slow_actions_are_found_in_proportion_to_the_median_of_their_kind() -> None:
    found = find_slowest(MEASURED, 2)
    assert [(str(slow.event), slow.seconds) for slow in found] == [("0F1", 2), ("1B1", 3)]
    assert [slow.times for slow in found] == pytest.approx([2 / 1.5, 3 / 2.5])


def test_the_predicted_step_is_drawn_above_the_measured_one() -> None:
    recording = pair_with_prediction(MEASURED, make_plan((0, 0, (0,)), (1, 1, (1,)), micro_batches=2))
    chart = draw_recording(recording)
    assert [(row.group, row.name) for row in chart.rows] == [
        ("predicted", "stage 0"),
        ("predicted", "0 to 1"),
        ("predicted", "stage 1"),
        ("measured", "stage 0"),
        ("measured", "0 to 1"),
        ("measured", "stage 1"),
    ]
    assert chart.title == recording.headline
    assert dict(chart.captions)["predicted"] == f"predicted: 11.5 s, bubble 39.1% ({BY_TIMES})"


def test_a_recorded_step_has_a_prediction_and_a_cost() -> None:
    _, loss = chain(2)
    step = step_of(loss, replicas=[2, 1])
    with pytest.raises(UsageError, match=r"no step was recorded: call step\.record"):
        _ = step.recording
    step.record(X)
    recording = step.recording
    assert recording.measured == step.timeline
    assert recording.predicted.timeline.places == step.timeline.places
    assert recording.predicted.timeline.order(0, 1) == step.timeline.order(0, 1)
    assert recording.planned_seconds is None
    assert step.recording_seconds > 0
    step.record(X[:3])  # too few for two replicas of two micro-batches
    assert step.recording.predicted.timeline.places == step.timeline.places


def test_the_recorded_step_can_be_built_before_it_runs() -> None:
    _, loss = chain(2)
    step = step_of(loss)
    step.build(X, record=True)
    built = step.graph
    assert any(node.op == "timestamp" for node in built.nodes)
    step.record(X)
    assert step.graph is built
    step.build(X)
    assert not any(node.op == "timestamp" for node in step.graph.nodes)


# --- files


def predicted(timeline: Timeline) -> Recording:
    """The recording of a step that was only simulated."""
    return Recording(timeline.title, predicted=Prediction(timeline, BY_PROFILE))


TOGETHER = Timeline(MEASURED.events, (Transfer(0, 1, 1, 3.0, 3.5, count=2),), together=[Action(0, "F", 0)])
RECORDING = Recording("net", MEASURED, predict_from_times(MEASURED, ScheduleSpec.parse("dapple-a").build(2, 2)), 9.2)


@pytest.mark.parametrize(
    "recording",
    [
        RECORDING,
        Recording("", TWO),
        predicted(simulated("dapple-b", 3, [cost(1 / 3, 0.7, 0.1), cost(1, 2)], (2, 1))),
        predicted(simulated("zb-h1", 3, [cost(1, 2, weights_seconds=1)] * 2)),
        predicted(simulated("0F0 0F1 0I0 0B1 0W0; 1F0 1B0 1F1 1I1 1W1", 2, [cost(1, 2, weights_seconds=1)] * 2)),
        Recording("", TOGETHER),
    ],
)
def test_reading_a_saved_recording_gives_an_equal_one(tmp_path: Path, recording: Recording) -> None:
    save_recording(recording, tmp_path / "t.json")
    found = read_recording(tmp_path / "t.json")
    assert found == recording
    assert str(found) == str(recording)


def test_a_trace_of_an_earlier_version_is_read_with_i_for_b_beside_w(tmp_path: Path) -> None:
    """There every backward of a schedule was split, or none, and B was the half for gradients of inputs."""
    recording = predicted(simulated("zb-h1", 3, [cost(1, 2, weights_seconds=1)] * 2, (2, 1)))
    save_recording(recording, tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    actions = data["dapple"]["predicted"]["timeline"]["actions"]
    halves = [action for action in actions if action["kind"] == "I"]
    assert len(halves) == 3 * 3  # of three devices
    for action in halves:
        action["kind"] = "B"
    (tmp_path / "t.json").write_text(json.dumps(data))
    assert read_recording(tmp_path / "t.json") == recording


def test_reading_a_measured_step_gives_the_same_times_to_the_last_bit(tmp_path: Path) -> None:
    _, loss = chain(2)
    step = step_of(loss)
    step.record(X)
    save_recording(step.recording, tmp_path / "t.json")
    assert read_recording(tmp_path / "t.json") == step.recording


def test_the_trace_of_a_simulated_step_can_be_read(tmp_path: Path) -> None:
    run = simulated("dapple-a", 4, [cost(1, 1, 1), cost(1, 1)])
    run.save(tmp_path / "t.json")
    found = read_recording(tmp_path / "t.json")
    assert found.measured is None
    assert found.shown.seconds == run.step_seconds
    assert found.shown.critical_stage == run.critical_stage


def test_a_trace_without_results_that_travel_together_has_no_fields_for_them(tmp_path: Path) -> None:
    """Earlier versions can read it: they refuse fields that they do not know."""
    save_recording(RECORDING, tmp_path / "t.json")
    measured = json.loads((tmp_path / "t.json").read_text())["dapple"]["measured"]
    assert set(measured) == {"actions", "transfers", "stage_events"}
    assert set(measured["transfers"][0]) == {"source", "target", "micro_batch", "start", "end"}


def change(place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set (None: remove) what stands at ``place``, such as ``measured.actions.0.start``."""

    def apply(data: dict[str, Any]) -> None:
        *path, last = [int(word) if word.isdecimal() else word for word in place.split(".")]
        inner: Any = data["dapple"]
        for word in path:
            inner = inner[word]
        if value is None:
            del inner[last]
        else:
            inner[last] = value

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("format", "dapple-timeline/9"), r"dapple: format is 'dapple-timeline/9', not 'dapple-timeline/1'"),
        (change("title", None), r"dapple: title is missing"),
        (change("measured.actions.3.kind", "X"), r"dapple: measured\.actions\[3\]\.kind is 'X'; known are F, B, I, W"),
        (change("measured.actions.3.start", None), r"dapple: measured\.actions\[3\]\.start is missing"),
        (change("measured.actions.3.end", 0.5), r"measured\.actions\[3\]\.end is 0\.5, before its start, 2\.5"),
        (
            change("measured.actions.1.micro_batch", 0),
            r"actions\[1\] is 0F0, and so is measured\.actions\[0\]: an action",
        ),
        (
            change("measured.actions.7.stage", 5),
            r"measured\.actions has stages \[0, 1, 5\]; they must be",
        ),
        (change("measured.actions", []), r"measured\.actions is empty"),
        (
            change("measured.transfers.1.target", 2),
            r"transfers\[1\] goes 0>2; it must connect two different stages of \[0, 1\]",
        ),
        (change("measured.actions.3.end", 1e300), r"measured\.actions\[3\]\.end is 1e\+300, more than 1e\+09 seconds"),
        (change("measured.stage_events.0.stage", 9), r"stage_events\[0\] is of stage 9; the step has stages \[0, 1\]"),
        (change("measured.transfers.1.target", 0), r"measured\.transfers\[1\] goes 0>0; it must connect two different"),
        (
            change("measured.transfers.1.count", 3),
            r"transfers\[1\]\.count is 3; a transfer carries the results of 1 to 2 micro-batches, the last of which",
        ),
        (change("measured.transfers.0.count", 2), r"transfers\[0\]\.count is 2; a transfer carries .* 1 to 1 micro"),
        (change("measured.transfers.1.count", 0), r"transfers\[1\]\.count is 0"),
        (
            change("measured.together", [{"stage": 0, "kind": "F", "micro_batch": 1}]),
            r"measured\.together\[0\] is 0F1, whose result travels with the result of .*: there is no action 0F2",
        ),
        (
            change("measured.together", [{"stage": 7, "kind": "F", "micro_batch": 0}]),
            r"measured\.together\[0\] is 7F0, .* there is no action 7F0",
        ),
        (change("measured.stage_events.0.kind", "nap"), r"stage_events\[0\]\.kind is 'nap'; known are allreduce"),
        (change("predicted.timeline.actions.0.device", 3), r"predicted\.timeline\.actions\[0\]\.device is 3, not"),
    ],
)
def test_the_error_for_a_damaged_trace_names_the_field(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    save_recording(RECORDING, tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    damage(data)
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(TraceError, match=message) as raised:
        read_recording(tmp_path / "t.json")
    assert str(raised.value).startswith(f"{tmp_path}/t.json: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": []}', r"a trace, but not one that dapple_tf saved \(there is no field 'dapple' in it"),
        ("[]", "a trace, but not one that dapple_tf saved"),
        ('{"layers": []}', "not a trace"),
        ('{"dapple": 3}', "dapple: it holds 3, not an object with the field format, 'dapple-timeline/1'"),
        ('{"dapple": {"format": "dapple-timeline/1", "title": ""}}', "dapple: it holds neither a measured step"),
        ('{"traceEvents": [', r"not a readable JSON file: .* line 1 column 18"),
        ('{"dapple": ' + "9" * 5000 + "}", "not a readable JSON file: a number of 5000 digits"),
        ('{"dapple": NaN}', "not a readable JSON file: NaN is not a number"),
        ("", "not a readable JSON file"),
        (b"\x0a\x93\x01\xff", "not a readable JSON file: 'utf-8' codec can't decode byte"),
        (None, "there is no such file"),
    ],
)
def test_a_file_that_dapple_did_not_save_is_refused(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / "t.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TraceError, match=message):
        read_recording(path)


def test_a_trace_whose_events_all_take_no_time_is_refused(tmp_path: Path) -> None:
    save_recording(Recording("", TWO), tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    for action in data["dapple"]["measured"]["actions"]:
        action.update(start=0.0, end=0.0)
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(TraceError, match="dapple: measured has no duration"):
        read_recording(tmp_path / "t.json")


def test_a_recording_needs_a_measured_or_a_predicted_step() -> None:
    with pytest.raises(UsageError, match="needs a measured step, or a predicted one"):
        Recording("nothing")


def test_a_prediction_alone_has_no_error() -> None:
    recording = Recording("net", predicted=Prediction(TWO, BY_PROFILE), planned_seconds=5.0)
    assert recording.prediction_error is None
    assert recording.planner_error is None
    assert str(recording).startswith(f"predicted ({BY_PROFILE}): 6 s, bubble 50.0%")
    assert recording.to_json()["planned_step_seconds"] == 5
    assert [row.group for row in draw_recording(recording).rows] == ["", ""]


def test_an_event_prints_its_replica_if_that_is_not_the_first() -> None:
    assert str(Event(MEASURED.events[0].action, 1, "a:0", 0.0, 1.0)) == "0F0 of replica 1"
