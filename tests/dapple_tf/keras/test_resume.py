"""``dapple.keras.SaveAndResume``: a ``fit`` that was stopped in an epoch goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import UsageError

SAMPLES, BATCH, EPOCHS = 24, 4, 4
NUMBERS = np.random.default_rng(0)
X, Y = NUMBERS.normal(size=(SAMPLES, 8)).astype("float32"), NUMBERS.normal(size=(SAMPLES, 1)).astype("float32")


class StoppedError(Exception):
    """The process is gone."""


class StopAt(keras.callbacks.Callback):
    """Notes the loss of each batch that is trained, and stops before one of them, counted over all epochs."""

    def __init__(self, number: int | None = None) -> None:
        super().__init__()
        self.number, self.seen, self.epochs = number, [], []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.number == self.epochs[-1] * (SAMPLES // BATCH) + batch:
            raise StoppedError


def arrays() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (X, Y), {"batch_size": BATCH}


def shuffled() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(SAMPLES, seed=3).batch(BATCH),), {"shuffle": False}


def repeated() -> tuple[tuple[Any, ...], dict[str, Any]]:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(SAMPLES, seed=3).repeat().batch(BATCH)
    return (data,), {"steps_per_epoch": SAMPLES // BATCH, "shuffle": False}


DATA = {"arrays": arrays, "a data set that is shuffled anew": shuffled, "an endless data set": repeated}


def make_model(**options: Any) -> keras.Model:
    """Return a compiled model with dropout over a pipeline of two stages."""
    keras.utils.set_random_seed(1)
    keras.backend.clear_session()
    dropout = keras.layers.Dropout(0.2, seed=2)
    layers = [keras.layers.Dense(16, "relu", name="one"), dropout, keras.layers.Dense(1, name="two")]
    model = keras.Sequential([keras.Input([8]), *layers], name="net")
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9)
    model.compile(keras.optimizers.Adam(rate), "mse", metrics=["mae"])
    example = (X[:BATCH], Y[:BATCH])
    dapple.keras.pipeline(model, stages=2, micro_batches=2, example_batch=example, **options)
    return model


def fit(kind: str, *callbacks: Any, **options: Any) -> tuple[list[Any], Any]:
    """Return the weights after ``fit``, and its history."""
    model = make_model(**options)
    data, named = DATA[kind]()
    history = model.fit(*data, epochs=EPOCHS, verbose=0, callbacks=list(callbacks), **named)
    return model.get_weights(), history.history


@pytest.mark.parametrize("kind", DATA)
def test_a_stopped_fit_goes_on_bit_by_bit(tmp_path: Path, kind: str) -> None:
    weights, history = fit(kind)
    with pytest.raises(StoppedError):
        fit(kind, StopAt(15), dapple.keras.SaveAndResume(tmp_path, every=2))  # in the third epoch of six batches
    seen = StopAt()
    resumed, later = fit(kind, seen, dapple.keras.SaveAndResume(tmp_path, every=2))
    assert seen.epochs == [2, 3]
    assert later["loss"][1:] == history["loss"][3:]  # of the epoch that was not interrupted
    for one, other in zip(weights, resumed, strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_goes_on_from_a_snapshot_and_removes_it_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("DAPPLE_SNAPSHOT_DIR", str(memory))
    monkeypatch.delenv("DAPPLE_LAUNCH", raising=False)
    weights, _ = fit("arrays")
    with pytest.raises(StoppedError):
        fit("arrays", StopAt(16), dapple.keras.SaveAndResume(tmp_path / "run"), snapshot_every=5)
    resumed, _ = fit("arrays", dapple.keras.SaveAndResume(tmp_path / "run"), snapshot_every=5)
    assert not list(memory.rglob("*.st"))
    for one, other in zip(weights, resumed, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_fit_that_has_ended_is_not_repeated(tmp_path: Path) -> None:
    weights, _ = fit("arrays", dapple.keras.SaveAndResume(tmp_path))
    again, history = fit("arrays", dapple.keras.SaveAndResume(tmp_path))
    assert history == {}
    for one, other in zip(weights, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_data_of_unknown_size_and_order_are_refused(tmp_path: Path) -> None:
    model = make_model()
    unknown = tf.data.Dataset.from_generator(
        lambda: iter([(X, Y)]), output_signature=(tf.TensorSpec([None, 8]), tf.TensorSpec([None, 1]))
    )
    with pytest.raises(UsageError, match="needs the number of batches of an epoch, which the data do not say"):
        model.fit(unknown, shuffle=False, callbacks=[dapple.keras.SaveAndResume(tmp_path)], verbose=0)
    with pytest.raises(UsageError, match="every=0: give a number of batches, at least 1"):
        dapple.keras.SaveAndResume(tmp_path, every=0)
    plain = keras.Sequential([keras.Input([8]), keras.layers.Dense(1)], name="plain")
    plain.compile("sgd", "mse")
    with pytest.raises(UsageError, match="plain has no pipeline"):
        plain.fit(X, Y, callbacks=[dapple.keras.SaveAndResume(tmp_path)], verbose=0)
    dapple.keras.pipeline(plain)
    with pytest.raises(UsageError, match=r"before the first batch: give dapple\.keras\.pipeline"):
        plain.fit(X, Y, callbacks=[dapple.keras.SaveAndResume(tmp_path)], verbose=0)
