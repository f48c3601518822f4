"""Checkpoints: what is saved comes back, under any plan, and damage is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.checkpoint import Checkpoints
from dapple_tf.errors import UsageError
from tests.dapple_tf.builders import X, step_of


def job(width: int = 3, **options: Any) -> tuple[Any, Any, tf.Variable]:
    """A step that was built, its optimizer, and a weight of its model."""
    first, second = tf.Variable(tf.ones((4, width))), tf.Variable(tf.ones((width, 1)))
    optimizer = keras.optimizers.Adam(0.1)
    step = step_of(lambda x: tf.reduce_mean(tf.square(tf.tanh(x @ first) @ second)), optimizer=optimizer, **options)
    step.build(X)
    return step, optimizer, first


def checkpoints(folder: Path, made: tuple[Any, Any, Any]) -> Checkpoints:
    return Checkpoints(folder, made[0], (X,), made[1])


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = job()
    expected = [float(whole[0](X)) for _ in range(4)]

    before = job()
    losses = [float(before[0](X)) for _ in range(2)]
    checkpoints(tmp_path, before).save(2)
    after = job()
    assert checkpoints(tmp_path, after).restore() == 2
    losses += [float(after[0](X)) for _ in range(2)]
    assert losses == expected
    np.testing.assert_array_equal(after[2], whole[2])


def test_a_checkpoint_knows_nothing_of_stages(tmp_path: Path) -> None:
    before = job(stages=2)
    before[0](X)
    checkpoints(tmp_path, before).save(1)
    after = job(stages=3, micro_batches=4)
    assert checkpoints(tmp_path, after).restore() == 1
    np.testing.assert_array_equal(after[2], before[2])
    assert float(after[0](X)) == pytest.approx(float(before[0](X)), rel=1e-5)


def test_an_empty_folder_is_a_fresh_start(tmp_path: Path) -> None:
    made = job()
    assert checkpoints(tmp_path / "new" / "folder", made).restore() == 0
    np.testing.assert_array_equal(made[2], np.ones((4, 3)))


def test_the_last_three_are_kept(tmp_path: Path) -> None:
    saving = checkpoints(tmp_path, job())
    paths = [saving.save(n) for n in range(1, 6)]
    assert [Path(path).name for path in paths] == [f"ckpt-{n}" for n in range(1, 6)]
    assert sorted(path.stem for path in tmp_path.glob("*.index")) == ["ckpt-3", "ckpt-4", "ckpt-5"]
    assert checkpoints(tmp_path, job()).restore() == 5


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_that_cannot_hold_checkpoints(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"{place} cannot hold checkpoints: (File exists|Not a directory)"):
        checkpoints(tmp_path / place, job())


@pytest.mark.filterwarnings("ignore")  # TensorFlow's, of values that found no home
def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    checkpoints(tmp_path, job()).save(1)
    with pytest.raises(UsageError, match="ckpt-1 cannot be loaded, being damaged or of another model or optimizer: "):
        checkpoints(tmp_path, job(width=5)).restore()


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    checkpoints(tmp_path, job()).save(1)
    (tmp_path / "ckpt-1.index").write_text("garbage")
    with pytest.raises(UsageError, match="ckpt-1 cannot be loaded, being damaged or of another model"):
        checkpoints(tmp_path, job()).restore()
