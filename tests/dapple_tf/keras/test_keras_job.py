"""The same Keras script in one process, and on every rank of a job: rank 0 prints and writes, results are equal."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import pytest

import dapple_tf as dapple
from tests.dapple_tf.keras.plain import assert_close
from tests.dapple_tf.keras.scripts import SCRIPTS, run_script
from tests.dapple_tf.keras.step_models import MODELS, train_model
from tests.processes import Rank, needs_horovod, run_ranks

# Keras's own, where it saves a model.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

Expected = Callable[[str], Any]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Run plain Keras once for a script, or for a model with its own train_step, and return its results."""
    found: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            found[name] = run_script(name, folder) if name in SCRIPTS else train_model(name, folder, lambda model: None)
        return found[name]

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_with_a_pipeline_equals_the_script_without(name: str, expected: Expected, tmp_path: Path) -> None:
    stages = ["dropout"] if name == "dropout" else 2
    found = run_script(name, tmp_path, lambda model: dapple.keras.pipeline(model, stages=stages, micro_batches=3))
    assert_close(found, expected(name), name)


def launch(folder: Path, *names: str) -> tuple[tuple[Rank, ...], list[Any]]:
    arguments = ["-m", "tests.dapple_tf.keras.rank_program", str(folder), *names]
    ranks = run_ranks(arguments, 2, timeout_seconds=240)
    return ranks, [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


def check_results(names: Sequence[str], expected: Expected, results: Sequence[Any]) -> None:
    for name in names:
        for rank, found in enumerate(results):
            assert_close(found[name], expected(name), f"{name} on rank {rank}")


@needs_horovod
@pytest.mark.always  # the only Keras fit in a job that `make test` runs
def test_two_ranks_equal_plain_keras(expected: Expected, tmp_path: Path, subtests: pytest.Subtests) -> None:
    ranks, results = launch(tmp_path, "callbacks", "siamese")
    folder = tmp_path / "callbacks"
    with subtests.test("history, callbacks and variables are equal on both"):
        check_results(["callbacks"], expected, results)
    with subtests.test("a model that trains by a step of its own"):
        check_results(["siamese"], expected, results)
    with subtests.test("rank 0 alone prints"):
        assert "Epoch 1/5" in ranks[0].stdout
        assert "val_loss" in ranks[0].stdout
        assert ranks[1].stdout == ""
    with subtests.test("rank 0 writes, once"):
        lines = (folder / "log.csv").read_text("utf-8").splitlines()
        assert lines[0].startswith("epoch,")
        assert [line.split(",")[0] for line in lines[1:]] == [str(i) for i in range(len(lines) - 1)]
        assert len(list((folder / "saved").glob("*.keras"))) == len(lines) - 1
        assert {path.name for path in folder.iterdir()} == {"best.weights.h5", "last.keras", "log.csv", "saved"}
    with subtests.test("the saved model has the values of all ranks"):
        saved = keras.models.load_model(folder / "last.keras")
        assert_close(saved.get_weights(), results[0]["callbacks"][1], "saved")


@needs_horovod
def test_ranks_read_the_same_data_in_the_same_order_or_end(tmp_path: Path) -> None:
    _, results = launch(tmp_path, "unseeded", "different")
    assert results[0]["unseeded"] == results[1]["unseeded"]
    for found in results:
        assert "first batch of the epoch: rank 0 has values of digest " in found["different"]
        assert "Every rank must read the same data in the same order: call keras.utils" in found["different"]
        assert "same packages" not in found["different"]


@needs_horovod
def test_callbacks_and_learning_rates_that_ranks_do_not_share_are_named_on_all_ranks(tmp_path: Path) -> None:
    _, results = launch(tmp_path, "refused")
    for found in results:
        checkpoint, average, order, rate, no_callbacks, first = found["refused"]
        assert "ModelCheckpoint is among the callbacks of fit on rank 0 only: add it on every rank" in checkpoint
        assert "leave Horovod's MetricAverageCallback out of the callbacks of fit: metrics are those" in average
        assert "order of the callbacks of fit: rank 0 has EarlyStopping, TerminateOnNaN" in order
        assert "learning rate: rank 0 has [0.01], rank 1 has [0.5]. Set the same one on every rank." in rate
        assert "PassingNothing.fit takes no" in no_callbacks
        assert "which the ranks of a job need to give: let it take **options" in no_callbacks
        assert "learning rate: rank 0 has [0.1], rank 1 has [1.1]" in first


@needs_horovod
def test_ranks_of_several_stages_equal_plain_keras(expected: Expected, tmp_path: Path) -> None:
    """Evaluation has no use for the rank that holds dropout alone: it becomes a replica of the other."""
    _, results = launch(tmp_path, "shared callbacks", "shared dropout")
    for name in ("callbacks", "dropout"):
        for rank, found in enumerate(results):
            assert_close(found[f"shared {name}"], expected(name), f"{name} on rank {rank}")


@needs_horovod
def test_two_ranks_equal_plain_keras_in_other_scripts(expected: Expected, tmp_path: Path) -> None:
    names = [name for name in SCRIPTS if name != "callbacks"]
    ranks, results = launch(tmp_path, *names)
    check_results(names, expected, results)
    assert "Epoch 1/2" in ranks[0].stdout
    assert ranks[1].stdout == ""


@needs_horovod
def test_two_ranks_train_models_with_steps_of_their_own_as_plain_keras_does(expected: Expected, tmp_path: Path) -> None:
    _, results = launch(tmp_path, *MODELS)
    check_results(list(MODELS), expected, results)
    for name in MODELS:
        assert len((tmp_path / name / f"{name}.csv").read_text("utf-8").splitlines()) == 3
