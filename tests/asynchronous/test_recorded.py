"""Recorded asynchronous windows: the version that each action used, updates, prediction, memory and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.memory.meter import has_statistics
from dapple_tf.profiler.cluster import Link, Server
from dapple_tf.runtime.recorder import predict_window_from_times
from dapple_tf.timeline.events import Event, StageEvent, Transfer
from dapple_tf.timeline.picture import draw_recording, save_recording
from dapple_tf.timeline.recording import BY_PROFILE, BY_TIMES
from dapple_tf.timeline.timeline import Timeline
from dapple_tf.timeline.trace_file import read_recording
from dapple_tf.window_plan import WindowPlan
from tests.asynchronous.networks import dense
from tests.processes import run_python

WIDTH = 600


def recorded(weights: str, minibatches: int = 6, **options: Any) -> tuple[Any, Any]:
    network = dense([1, 1])
    step = dapple.pipeline(
        network.loss_fn,
        optimizer=keras.optimizers.SGD(0.1),
        stages=list(network.starts),
        mode="async",
        minibatches=minibatches,
        weights=weights,
        **options,
    )
    step.record(*network.batch(24, 1))
    return step, step.timeline


def used(timeline: Any, stage: int, kind: str) -> list[int]:
    """The versions that the actions of a stage used, by minibatch."""
    return [
        event.version
        for event in sorted(timeline.events, key=lambda event: event.action.micro_batch)
        if (event.action.stage, event.action.kind) == (stage, kind)
    ]


def test_events_say_which_version_of_the_weights_they_used() -> None:
    _, timeline = recorded("stash")
    # K = 2 and 1: stage 0 is one update behind.
    assert used(timeline, 0, "F") == used(timeline, 0, "B") == [0, 0, 1, 2, 3, 4]
    assert used(timeline, 1, "F") == used(timeline, 1, "B") == [0, 1, 2, 3, 4, 5]
    _, timeline = recorded("latest")
    assert used(timeline, 0, "B") == [0, 1, 2, 3, 4, 5]
    assert used(timeline, 0, "F") == [0, 0, 1, 2, 3, 4]


def test_each_minibatch_has_an_update_on_each_stage() -> None:
    _, timeline = recorded("stash")
    updates = sorted((e.stage, e.micro_batch) for e in timeline.stage_events if e.kind == "update")
    assert updates == [(stage, m) for stage in (0, 1) for m in range(6)]
    ends = {(e.action.stage, e.action.micro_batch): e.end for e in timeline.events if e.action.kind == "B"}
    assert all(e.end >= ends[e.stage, e.micro_batch] for e in timeline.stage_events)


def test_updates_of_replicas_and_of_2bw_are_named_by_their_last_micro_batch() -> None:
    _, timeline = recorded("stash", replicas=[2, 1])
    assert sorted(e.micro_batch for e in timeline.stage_events if (e.kind, e.stage) == ("update", 0)) == [1, 3, 5]
    assert {(e.action.micro_batch % 2, e.replica) for e in timeline.events if e.action.stage == 0} == {(0, 0), (1, 1)}
    _, timeline = recorded("2bw", minibatches=3, micro_batches=2)
    assert [e.micro_batch for e in timeline.stage_events if (e.kind, e.stage) == ("update", 1)] == [1, 3, 5]
    assert used(timeline, 1, "F") == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("weights", "options"),
    [("stash", {}), ("stash", {"replicas": [2, 1]}), ("2bw", {"micro_batches": 2}), ("vertical-sync", {})],
)
def test_a_recorded_window_is_shown_beside_its_prediction(tmp_path: Path, weights: str, options: Any) -> None:
    step, timeline = recorded(weights, **options)
    recording = step.recording
    assert recording.predicted.source == BY_TIMES
    predicted = recording.predicted.timeline
    assert [(e.action, e.version, e.replica) for e in sorted(predicted.events, key=str)] == [
        (e.action, e.version, e.replica) for e in sorted(timeline.events, key=str)
    ]
    assert predicted.window == timeline.window == step.plan.versions.window
    assert "a minibatch, drain" in str(recording)
    save_recording(recording, tmp_path / "window.json")
    assert read_recording(tmp_path / "window.json").measured == timeline
    for suffix in ("png", "html"):
        save_recording(recording, tmp_path / f"window.{suffix}")
    assert "1B5 v" in (tmp_path / "window.html").read_text()
    assert draw_recording(recording).numbers.endswith("v is the version of the weights")


def test_a_window_is_predicted_from_medians_by_hand() -> None:
    versions = WindowPlan(2).versions((1, 1))
    times = {"0F0": (0, 1), "0F1": (1, 4), "1F0": (2, 3), "1B0": (3, 5), "1F1": (6, 7), "1B1": (7, 9)}
    times |= {"0B0": (6, 9), "0B1": (10, 13)}
    events = []
    for text, (start, end) in times.items():
        action = Action(int(text[0]), text[1], int(text[2]))  # type: ignore[arg-type]  # one of F and B
        events.append(Event(action, 0, f"CPU:{action.stage}", start, end, versions.used[action]))
    transfers = (Transfer(0, 1, 0, 1.0, 1.5), Transfer(0, 1, 1, 4.0, 4.5), Transfer(1, 0, 0, 5.0, 6.0))
    updates = [StageEvent("update", s, 0, f"CPU:{s}", t, t + 0.5, m) for s, t, m in ((1, 5, 0), (0, 9, 0), (1, 9, 1))]
    measured = Timeline(events, transfers, updates, window=versions.window)
    found = predict_window_from_times(measured, versions).timeline
    # Medians: F 2 and 1, B 3 and 2, sends 0.5 and back 1, updates 0.5.
    assert {e.name: (e.start, e.end) for e in found.events} == {
        "0F0 v0": (0, 2),
        "0F1 v0": (2, 4),
        "1F0 v0": (2.5, 3.5),
        "1B0 v0": (3.5, 5.5),
        "1F1 v1": (6, 7),
        "1B1 v1": (7, 9),
        "0B0 v0": (6.5, 9.5),
        "0B1 v0": (10, 13),
    }
    assert [(str(e), e.start) for e in found.stage_events if e.stage == 0] == [
        ("update 0 of stage 0", 9.5),
        ("update 1 of stage 0", 13),
    ]


def wide(width: int = WIDTH, **options: Any) -> Any:
    """Two layers of 600 x 600 weights, 1.44 MB each, or of another width."""
    matrices = [tf.Variable(tf.random.stateless_normal((width, width), (i, 1)) * 0.01) for i in range(2)]

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ matrix)
        return tf.reduce_mean(tf.square(x - y))

    return dapple.pipeline(loss_fn, stages=["layer1"], mode="async", minibatches=8, **options)


def rows(count: int, width: int = WIDTH) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.random.stateless_normal((count, width), (5, 1)), tf.random.stateless_normal((count, width), (6, 1))


def test_the_report_counts_versions_beside_stashes() -> None:
    step = wide(optimizer=keras.optimizers.SGD(0.01, momentum=0.9))
    step.build(*rows(16))
    first, last = (stage.predicted for stage in step.report.stages)
    size = WIDTH * WIDTH * 4
    assert (first.weights, first.gradients, first.slots) == (size, 0, size)
    assert (first.version_count, first.versions, first.in_flight) == (2, 2 * size, 2)
    assert (last.version_count, last.versions, last.in_flight) == (0, 0, 1)
    assert first.fixed == 4 * size
    header, row = str(step.report).splitlines()[1:3]
    columns = dict(
        zip(header.replace("K x stash", "KS").replace("V x weights", "VW").split(), row.split(), strict=False)
    )
    assert (columns["V"], columns["VW"]) == ("2", "2.9")
    data = step.report.to_json()["stages"][0]
    assert (data["version_count"], data["versions"]) == (2, 2 * size)
    assert str(step.report).startswith("memory of one device of each of 2 stages, 8 minibatches of 2 samples")


def test_2bw_keeps_two_versions_and_sums_of_gradients() -> None:
    step = wide(optimizer=keras.optimizers.SGD(0.01), weights="2bw", micro_batches=3)
    step.build(*rows(48))
    size = WIDTH * WIDTH * 4
    for memory in (stage.predicted for stage in step.report.stages):
        assert (memory.version_count, memory.gradients) == (2, size)


def test_stages_auto_chooses_a_plan_of_windows() -> None:
    network = dense([1, 1])
    step = dapple.pipeline(
        network.loss_fn,
        optimizer=keras.optimizers.SGD(0.1),
        stages="auto",
        mode="async",
        minibatches=4,
        cluster=dapple.Cluster((Server("a", 2),), 1e9, Link(1e9, 1e-6), Link(1e9, 1e-6)),
    )
    step.record(*network.batch(26, 1))  # of 6 or 7 samples
    plan = step.plan
    assert (plan.window, plan.global_batch_size, plan.micro_batch_size) == (WindowPlan(4), 26, 7)
    assert plan.predicted is not None
    assert plan.predicted["minibatch_seconds"] > 0
    assert step.recording.predicted.source == BY_PROFILE
    assert step.recording.predicted.timeline.window == step.timeline.window


# A power of two: TensorFlow's allocator gives other sizes blocks that are larger by up to two thirds, and counts them.
GROWTH = """
import dapple_tf as dapple, keras, tensorflow as tf
dapple.init(devices=2)
from tests.asynchronous.test_recorded import rows, wide
step = wide(2048, optimizer=keras.optimizers.SGD(0.01))
batch, current = rows(16, 2048), lambda: tf.config.experimental.get_memory_info("CPU:0")["current"]
before = current()
step(*batch), step(*batch)
print((current() - before) / (2048 * 2048 * 4))
"""


@pytest.mark.skipif(not has_statistics("CPU:0"), reason="TensorFlow counts no memory here")
def test_versions_take_one_copy_of_the_weights_each_beside_the_weights() -> None:
    """Between windows: the newest stored version is some updates behind the weights. In a process of its own."""
    run = run_python("-c", GROWTH)
    assert float(run.stdout.split()[-1]) == pytest.approx(2, abs=0.2)
