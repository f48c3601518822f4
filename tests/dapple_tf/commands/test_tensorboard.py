"""Curves for TensorBoard, read with TensorFlow alone, and how often a step is recorded for them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import tensorflow as tf

from dapple_tf.commands.observation import Observer, Scalars, choose_interval, recorded_scalars
from dapple_tf.commands.ranks import Ranks
from dapple_tf.commands.train_settings import TrainSettings
from dapple_tf.commands.training_loop import StepResult
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import UsageError
from tests.dapple_tf.builders import X, chain, step_of
from tests.dapple_tf.timeline.test_recording import MEASURED


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of every curve in the folder's one file of events."""
    (file,) = folder.iterdir()
    found = defaultdict(list)
    for event in tf.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "scalars"
            found[value.tag].append((event.step, float(tf.make_ndarray(value.tensor))))
    return dict(found)


@pytest.mark.filterwarnings("ignore")  # TensorFlow calls its only reader deprecated
def test_written_points_can_be_read(tmp_path: Path) -> None:
    scalars = Scalars(tmp_path / "deep" / "down")
    scalars.write(1, {"loss": 2.5, "samples_per_second": 64.0})
    scalars.write(2, {"loss": 1.5})
    scalars.close()
    assert read_curves(tmp_path / "deep" / "down") == {
        "loss": [(1, 2.5), (2, 1.5)],
        "samples_per_second": [(1, 64.0)],
    }


def test_the_curves_of_a_recorded_step() -> None:
    found = recorded_scalars(MEASURED)
    assert found == {
        "bubble": MEASURED.bubble,
        "step_seconds": 11.5,
        "utilisation/stage_0": pytest.approx(7 / 11.5),
        "utilisation/stage_1": pytest.approx(7 / 11.5),
        "critical_path_seconds/compute": 10,
        "critical_path_seconds/transfer": 0.5,
        "critical_path_seconds/allreduce": 0,
        "critical_path_seconds/update": 0.5,
        "critical_path_seconds/waiting": 0.5,
    }


@pytest.mark.parametrize(
    ("cost", "step", "wanted"), [(0.001, 0.2, 1), (0.001, 0.1, 1), (0.001, 0.099, 2), (0.003, 0.1, 3), (0.5, 0.1, 500)]
)
def test_recording_costs_at_most_one_percent(cost: float, step: float, wanted: int) -> None:
    assert choose_interval(cost, step) == wanted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("seconds", "recorded"), [(1e3, [1, 2, 3, 4, 5, 6, 7, 8]), (1e-9, [1, 2, 3, 4, 8])])
def test_steps_are_recorded_as_their_cost_allows(
    tmp_path: Path, seconds: float, recorded: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of steps that take long every one; of those that take no time the first four, and the last one for a trace."""
    _, loss = chain(2)
    step = step_of(loss)
    scalars = Scalars(tmp_path)
    observer = Observer(step, 1, TrainSettings(8, trace="t.json", tensorboard="curves"), Ranks(Job()), scalars, None)
    for number in range(1, 9):
        observer.observe(StepResult(number, float(observer.run(X)), seconds, 8))
    scalars.close()
    curves = read_curves(tmp_path)
    assert [number for number, _ in curves["loss"]] == list(range(1, 9))
    assert [number for number, _ in curves["bubble"]] == recorded
    lines = capsys.readouterr().out.splitlines()
    assert [" is recorded" in line for line in lines] == [True] * (len(recorded) < 8)


def test_without_curves_only_the_last_is_recorded_for_a_trace() -> None:
    _, loss = chain(2)
    step = step_of(loss)
    observer = Observer(step, 3, TrainSettings(6, trace="t.json"), Ranks(Job()), None, None)
    for _ in range(3):
        observer.run(X)
    with pytest.raises(UsageError, match="no step was recorded"):
        _ = step.timeline
    observer.run(X)
    assert step.timeline.note == ""
