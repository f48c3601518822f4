"""The memory report of a step: before it runs, and after one was recorded."""

from __future__ import annotations

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import StepError, UsageError
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from dapple_tf.memory.meter import MeasuredMemory
from dapple_tf.memory.predict import StageMemory
from dapple_tf.memory.process_peak import predict_process_peak
from dapple_tf.memory.report import make_report, observed_in_flight
from dapple_tf.memory.stash import StashedTensor
from dapple_tf.profiler.units import format_megabytes
from dapple_tf.timeline.events import Event
from dapple_tf.timeline.timeline import Timeline
from tests.dapple_tf.builders import X, chain, make_plan, step_of
from tests.equality.small_models import data, weights
from tests.processes import run_python

M = 10**6


def memory(stage: int, *stashed: StashedTensor, working: int = 0, update: int = 0) -> StageMemory:
    """Return the memory of a stage; the bytes between steps do not matter."""
    works = {"F": 0, "B": working}
    return StageMemory(stage, 5_000_000, 5_000_000, 10_000_000, 0, 1, stashed, 0, 0, works, update, 7_000_000)


def timeline(*events: tuple[str, float, float]) -> Timeline:
    """Return a timeline of actions such as ``0F1``, each with its start and end."""
    return Timeline(
        tuple(Event(Action(int(a[0]), a[1], int(a[2])), 0, f"/device:CPU:{a[0]}", *times) for a, *times in events)
    )


def test_there_is_no_report_before_anything_is_built() -> None:
    _, loss = chain()
    with pytest.raises(UsageError, match="call the step with a batch first, or give example_batch"):
        _ = step_of(loss).report


def test_before_a_recorded_step_the_report_has_predictions_only() -> None:
    _, loss = chain()
    step = step_of(loss, example_batch=(X,))
    report = step.report
    assert [(stage.seen, stage.measured) for stage in report.stages] == [(None, None)] * 2
    assert report.measured is None
    lines = str(report).splitlines()
    assert lines[0].startswith(
        "memory of one device of each of 2 stages, 2 micro-batches of 4 samples, schedule dapple"
    )
    assert lines[1].split()[:3] == ["stage", "weights", "gradients"]
    assert "-" not in " ".join(lines[2:]).split(), "nothing was measured: columns that are empty are left out"
    assert "seen" not in lines[1]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1"]
    assert {len(line) for line in lines[1:]} == {len(lines[1])}


@pytest.mark.filterwarnings("ignore:the loss of lambda goes through:dapple_tf.errors.DappleWarning")
def test_a_stage_with_while_loops_is_named() -> None:
    stack = keras.Sequential([keras.Input((3, 4)), keras.layers.Dense(4), keras.layers.GRU(4)])
    step = dapple.pipeline(
        lambda x: tf.reduce_mean(stack(x)),
        optimizer=keras.optimizers.SGD(0.1),
        stages=["gru"],
        micro_batches=2,
        example_batch=(np.ones((4, 3, 4), np.float32),),
    )
    assert str(step.report).splitlines()[-1] == "not counted: tensors of each iteration of the While loops of stage 1"
    assert [stage["loops"] > 0 for stage in step.report.to_json()["stages"]] == [False, True]


@pytest.mark.parametrize(
    "schedule",
    [
        "K=3,2,2",
        "gpipe",
        "dapple-a",
        "dapple-b",
    ],
)
def test_stages_are_observed_to_have_k_micro_batches_in_flight(schedule: str) -> None:
    _, loss = chain()
    step = step_of(loss, stages=3, micro_batches=4, schedule=schedule)
    step.record(X)
    seen = [stage.seen for stage in step.report.stages]
    assert seen == list(ScheduleSpec.parse(schedule).build(3, 4).warm_up)
    assert seen == [stage.predicted.in_flight for stage in step.report.stages]


def test_a_split_backward_frees_its_stash_after_the_weights_gradients() -> None:
    _, loss = chain()
    step = step_of(loss, stages=3, micro_batches=4, schedule="zb-h1")
    step.record(X)
    stages = step.report.stages
    assert [stage.seen for stage in stages] == [stage.predicted.in_flight for stage in stages] == [3, 3, 3]
    assert any(tensor.last_use == "W" for tensor in stages[2].predicted.stashed)
    assert set(stages[2].predicted.working) == {"F", "I", "W"}


def test_a_recorded_step_is_measured() -> None:
    """All devices together: logical CPU devices share an allocator."""
    _, loss = chain()
    step = step_of(loss)
    step.record(X)
    report = step.report
    assert report.measured.device == "CPU"
    assert report.predicted is not None
    assert report.predicted > 0
    assert "all stages in the recorded step: " in str(report)
    found = report.to_json()
    assert found["measured"]["above_start"] == report.measured.above_start
    assert [stage["most_held"] for stage in found["stages"]] == [2, 1]


def test_a_failed_recorded_step_does_not_change_the_report() -> None:
    """The report is of what was built; then of the last step that was recorded, even if another fails."""
    (matrix,) = weights(1)

    def loss(x: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_less(tf.reduce_max(x), tf.constant(100.0, x.dtype))
        return tf.reduce_mean(tf.square(tf.tanh(x @ matrix)))

    x, _ = data(8)
    step = step_of(loss, stages=1)
    with pytest.raises(StepError):
        step.record(x * 1000)
    assert [stage.seen for stage in step.report.stages] == [None]
    step.record(x)
    before = str(step.report)
    with pytest.raises(StepError):
        step.record(x[:1] * 1000)  # under another plan
    assert "2 micro-batches of 4 samples" in before
    assert str(step.report) == before


_LARGER = """
import json
import keras
import tensorflow as tf
import dapple_tf as dapple

dapple.init(2)
stack = [keras.layers.Dense(256, activation="relu", name=f"d{i}") for i in range(8)]
model = keras.Sequential([keras.Input((256,)), *stack])
step = dapple.pipeline(
    lambda x: tf.reduce_mean(tf.square(model(x))),
    optimizer=keras.optimizers.SGD(0.01),
    stages=["d4"],
    micro_batches=6,
    schedule="gpipe",
)
for _ in range(3):  # the first step also allocates what stays
    step.record(tf.ones((6 * 1024, 256)))
print(json.dumps(step.report.to_json()))
"""


def test_the_peak_of_a_larger_model_is_predicted_within_10_percent() -> None:
    """6 micro-batches of 1 MB a layer, measured by the heap: oneDNN's blocks are larger than their tensors."""
    done = run_python("-c", _LARGER, variables={"TF_ENABLE_ONEDNN_OPTS": "0"})
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["measured"]["source"] == "heap"
    assert report["together"] > 6 * 8 * 1024 * 256 * 4
    assert report["together"] == pytest.approx(report["measured"]["above_start"], rel=0.1)


def test_each_stage_reports_the_measurement_of_its_devices_with_the_highest_peak() -> None:
    plan = make_plan((0, 0, (0, 2)), (1, 1, (1,)), micro_batches=1)
    found = [
        (rank, MeasuredMemory(f"GPU:{rank}", "allocator", 10, 10 + peak)) for rank, peak in ((0, 5), (1, 6), (2, 7))
    ]
    report = make_report(plan, [memory(0), memory(1)], None, found)
    assert [stage.measured and stage.measured.above_start for stage in report.stages] == [7, 6]
    assert report.measured is None


def test_what_was_measured_of_a_device_is_that_of_all_its_stages() -> None:
    plan = make_plan((0, 0, (0,)), (1, 1, (1,)), (2, 2, (0,)), micro_batches=1)
    found = [(rank, MeasuredMemory(f"GPU:{rank}", "allocator", 0, peak)) for rank, peak in ((0, 5 * 10**6), (1, 10**6))]
    plan = dataclasses.replace(plan, schedule="0F0 2F0 2B0 0B0; 1F0 1B0")
    lines = str(make_report(plan, [memory(0), memory(1), memory(2)], None, found)).splitlines()
    ends = ("5.0 in step of stages 0, 2", " 1.0 in step", "5.0 in step of stages 0, 2")
    assert [line.endswith(end) for line, end in zip(lines[2:5], ends, strict=True)] == [True] * 3


def test_a_device_of_several_stages_holds_the_stashes_of_all_of_them_in_the_order_of_its_actions() -> None:
    """Two micro-batches on stages 0 and 2: 0F0 0F1 holds 6 MB, 2F0 and 2F1 one more each, and 2B0 works with 2 MB."""
    plan = make_plan((0, 0, (0,)), (1, 1, (1,)), (2, 2, (0,)), micro_batches=2)
    plan = dataclasses.replace(plan, schedule="0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1; 1F0 1F1 1B0 1B1")
    first = memory(0, StashedTensor("F", "B", 3_000_000), update=500_000)
    last = memory(2, StashedTensor("F", "B", 1_000_000), working=2_000_000, update=500_000)
    stages = [dataclasses.replace(m, in_step=0) for m in (first, memory(1), last)]
    report = make_report(plan, stages)
    both, other = report.workers
    assert (both.stages, both.stashes, both.fixed, both.in_step, both.peak) == ((0, 2), 4, 40 * M, 10 * M, 50 * M)
    assert (other.stages, other.stashes, other.fixed, other.in_step) == ((1,), 2, 20 * M, 0)
    table = str(report).splitlines()[5:]
    assert table[0] == "devices that run several stages, with all of these:"
    assert table[1].split() == ["stages", "stashes", "between", "steps", "in", "step", "peak"]
    assert table[2].split() == ["0,", "2", "4", "40.0", "10.0", "50.0"]
    assert report.to_json()["workers"][0] == {
        "stages": (0, 2),
        "stashes": 4,
        "fixed": 40 * M,
        "in_step": 10 * M,
        "peak": 50 * M,
    }
    updates = [dataclasses.replace(stage, update=30 * M) for stage in stages]
    assert make_report(plan, updates).workers[0].in_step == 60 * M  # both stages are updated at the end


def test_the_printed_table() -> None:
    tensor = StashedTensor("F", "B", 3_000_000)
    plan = make_plan((0, 0, (0,)), (1, 1, (1,)), micro_batches=1)
    events = timeline(("0F0", 0, 1), ("1F0", 1, 2), ("1B0", 2, 3), ("0B0", 3, 4))
    shared = [(None, MeasuredMemory("CPU", "allocator", 10_000_000, 14_000_000))]
    stages = [memory(0, tensor, working=1_000_000), memory(1)]
    lines = str(make_report(plan, stages, events, shared)).splitlines()[1:]
    assert " ".join(lines[0].split()) == (
        "stage weights gradients slots K seen stash K x stash working in step peak"  # the others are empty: left out
    )
    assert [line.split()[-7:] for line in lines[1:3]] == [
        ["1", "1", "3.0", "3.0", "1.0", "7.0", "27.0"],
        ["1", "1", "0", "0", "0", "7.0", "27.0"],
    ]
    assert {len(line) for line in lines[:3]} == {len(lines[0])}
    assert lines[3] == "all stages in the recorded step: 4.0 MB measured (allocator), 4.0 MB predicted (+0%)"


def test_micro_batches_in_flight_are_counted_by_time_stamps() -> None:
    apart = timeline(("0F0", 0, 1), ("0B0", 1, 2), ("0F1", 2, 3), ("0B1", 3, 4), ("0F2", 4, 5), ("0B2", 5, 6))
    assert observed_in_flight(apart, 0) == 1
    over = timeline(("0F0", 0, 1), ("0B0", 1, 3), ("0F1", 2, 3), ("0B1", 3, 4), ("0F2", 4, 5), ("0B2", 5, 6))
    assert observed_in_flight(over, 0) == 2


def test_micro_batches_in_flight_are_counted_to_the_end_of_b_or_w() -> None:
    events = [("0F0", 0, 1), ("0I0", 1, 2), ("0F1", 2, 3), ("0B1", 3, 4), ("0W0", 4, 5), ("0F2", 5, 6), ("0B2", 6, 7)]
    assert observed_in_flight(timeline(*events), 0) == 2  # from 2 to 4: I0 has freed nothing
    early = [*events[:2], ("0W0", 2, 3), ("0F1", 3, 4), ("0B1", 4, 5), *events[5:]]
    assert observed_in_flight(timeline(*early), 0) == 1


def test_the_process_peak_is_that_of_tensors_that_are_live_at_the_same_time() -> None:
    tensor = StashedTensor("F", "B", 10)
    events = [("0F0", 0.0, 1.0), ("1F0", 1.0, 2.0), ("1B0", 2.0, 3.0), ("0B0", 3.0, 4.0)]
    both = [memory(0, tensor, working=5), memory(1, tensor, working=7)]
    assert predict_process_peak(both, timeline(*events)) == 10 + 10 + 7
    assert predict_process_peak([memory(0, tensor, update=50), memory(1, tensor)], timeline(*events)) == 50


def test_the_process_peak_of_whole_and_split_backwards() -> None:
    """Of each micro-batch 1 byte from F to W (or B), 10 from I to W, and 100 of a gradient to I; B takes all its time.

    Stage 0: F0 0-1, F1 1-2, I0 4-5, B1 6-8, W0 8-9. Stage 1 gives the gradients: B0 2-4, I1 5-6. While 0B1 runs there
    are 1 and 10 of both micro-batches, 100 of one, and 5.
    """
    stashed = StashedTensor("F", "W", 1), StashedTensor("I", "W", 10), StashedTensor("next stage", "I", 100)
    works = {"F": 0, "B": 5, "I": 3, "W": 2}
    stages = [dataclasses.replace(stage, working=works) for stage in (memory(0, *stashed), memory(1))]
    events = [("0F0", 0.0, 1.0), ("0F1", 1.0, 2.0), ("0I0", 4.0, 5.0), ("0B1", 6.0, 8.0), ("0W0", 8.0, 9.0)]
    there = [("1F0", 1.0, 2.0), ("1B0", 2.0, 4.0), ("1F1", 4.0, 5.0), ("1I1", 5.0, 6.0), ("1W1", 6.0, 7.0)]
    assert predict_process_peak(stages, timeline(*events, *there)) == 2 * (1 + 10) + 100 + 5 + 2  # 2: of 1W1
    held = [dataclasses.replace(stages[0], stashed=stashed[:2]), stages[1]]
    assert predict_process_peak(held, timeline(*events, *there)) == 2 * (1 + 10) + 5 + 2
    early = StashedTensor("F", "I", 1000)  # of both micro-batches while I0 runs, with what that passes on, and 1F1
    assert (
        predict_process_peak(
            [dataclasses.replace(held[0], stashed=(early, stashed[1])), stages[1]], timeline(*events, *there)
        )
        == 2 * 1000 + 10 + 3
    )


def test_slices_stay_from_the_end_of_backward_to_the_update() -> None:
    events = [("0F0", 0.0, 1.0), ("0B0", 1.0, 2.0), ("0F1", 2.0, 3.0), ("0B1", 3.0, 4.0), ("0F2", 4.0, 5.0)]
    stage = dataclasses.replace(memory(0, working=5), slices=100)
    assert predict_process_peak([stage], timeline(*events)) == 200
    assert predict_process_peak([stage], timeline(*events[:4])) == 105


def test_slices_stay_from_the_end_of_b_or_w() -> None:
    """Those of micro-batch 1 from 4 on, and those of micro-batch 0 from 5 on: I gives none."""
    events = [("0F0", 0.0, 1.0), ("0I0", 1.0, 2.0), ("0F1", 2.0, 3.0), ("0B1", 3.0, 4.0), ("0W0", 4.0, 5.0)]
    stage = dataclasses.replace(memory(0), working=dict.fromkeys("FBIW", 5), slices=100)
    assert predict_process_peak([stage], timeline(*events)) == 105
    assert predict_process_peak([stage], timeline(*events, ("0F2", 5.0, 6.0), ("0B2", 6.0, 7.0))) == 205
    assert predict_process_peak([stage], timeline(*events[:4])) == 5


def test_a_tensor_that_two_stages_share_counts_once() -> None:
    """Logical CPU devices pass tensors without a copy."""
    sent, received = StashedTensor("F", "B", 10, "h"), StashedTensor("previous stage", "B", 10, "h")
    events = [("0F0", 0.0, 1.0), ("1F0", 1.0, 2.0), ("1B0", 2.0, 3.0), ("0B0", 3.0, 4.0)]
    assert predict_process_peak([memory(0, sent), memory(1, received)], timeline(*events)) == 10
    assert predict_process_peak([memory(0), memory(1, received)], timeline(*events)) == 10
    other = StashedTensor("previous stage", "B", 10, "another")
    assert predict_process_peak([memory(0, sent), memory(1, other)], timeline(*events)) == 20


def test_figures_have_as_many_digits_as_say_something() -> None:
    assert [format_megabytes(count) for count in (0, 1234, 54_321, 1_234_567, 123_456_789)] == [
        "0",
        "0.0012",
        "0.054",
        "1.2",
        "123",
    ]
