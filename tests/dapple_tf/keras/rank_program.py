"""Run the scripts as one rank of a job: ``rank_program FOLDER SCRIPT ...``; write what each returned.

Besides those of ``scripts`` there are the models of ``step_models``, and ``unseeded``, whose ranks begin with different
random states, ``different``, whose ranks read different data, and ``refused``, whose ranks give ``fit`` what it
refuses. ``shared SCRIPT`` runs a script with two stages on a rank.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import JobError, UsageError
from tests.dapple_tf.keras import models
from tests.dapple_tf.keras.scripts import run_script
from tests.dapple_tf.keras.step_models import MODELS, train_model

# Two stages a rank; and dropout alone on the second rank, of which nothing is left when the model is evaluated.
INTERLEAVED: Mapping[str, Any] = {"stages": 4, "schedule": "interleaved-1f1b"}
DROPOUT_ALONE: Mapping[str, Any] = {
    "stages": ["dropout", "last"],
    "schedule": "0F0 0F1 0F2 2F0 2B0 2F1 2B1 2F2 2B2 0B0 0B1 0B2; 1F0 1F1 1F2 1B0 1B1 1B2",
}


def options_of(name: str) -> Mapping[str, Any]:
    """Return options of the pipeline of a script, which may be ``shared``."""
    shared, _, script = name.rpartition(" ")
    if shared:
        return DROPOUT_ALONE if script == "dropout" else INTERLEAVED
    return {"stages": ["dropout"] if script == "dropout" else 2}


def main(folder: Path, scripts: list[str]) -> None:
    """Run the scripts over two stages, one a rank, or those that are ``shared`` over more."""
    dapple.init()
    keras.backend.set_floatx("float64")
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])

    def wrap(model: keras.Model) -> None:
        dapple.keras.pipeline(model, micro_batches=3, **options_of(name))

    found = {}
    others: dict[str, Callable[[int], Any]] = {"unseeded": train_unseeded, "different": train_on_different_data}
    others["refused"] = train_with_refused_callbacks
    for name in scripts:
        if name in others:
            found[name] = others[name](rank)
            continue
        (folder / name).mkdir(exist_ok=True)
        if name in MODELS:
            found[name] = train_model(name, folder / name, wrap)
            continue
        os.chdir(folder / name)
        found[name] = run_script(name.rpartition(" ")[2], folder / name, wrap)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))


def train_unseeded(rank: int) -> Any:
    """Shuffle the data with random states that nobody has made equal."""
    tf.random.set_seed(None)
    random.seed(rank)
    np.random.seed(rank)
    model = models.sequential()
    dapple.keras.pipeline(model, stages=2, micro_batches=3)
    return model.fit(models.X, models.Y, batch_size=8, epochs=2, verbose=0).history


def train_on_different_data(rank: int) -> Any:
    """Return the message of the error."""
    keras.utils.set_random_seed(1)
    model = models.sequential()
    dapple.keras.pipeline(model, stages=2, micro_batches=3)
    try:
        model.fit(models.X + rank, models.Y, batch_size=8, verbose=0)
    except JobError as error:
        return str(error)
    return ""


class PassingNothing(keras.Sequential):  # type: ignore[misc]  # keras is not typed
    def fit(self, x: Any, y: Any) -> Any:
        return super().fit(x, y, verbose=0)


def train_with_refused_callbacks(rank: int) -> list[str]:
    """Return the messages of the errors."""
    import horovod.tensorflow.keras as hvd

    callbacks = keras.callbacks
    first, second = callbacks.TerminateOnNaN(), callbacks.EarlyStopping("loss")
    given: list[list[Any]] = [
        [callbacks.ModelCheckpoint("saved.keras"), callbacks.CSVLogger("log.csv")] if rank == 0 else [],
        [hvd.callbacks.MetricAverageCallback()] if rank else [],
        [first, second] if rank else [second, first],
        [callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 if epoch == 1 and rank else rate)],
    ]
    messages = []
    for of_rank in given:
        model = models.sequential()
        dapple.keras.pipeline(model, stages=2, micro_batches=3)
        try:
            model.fit(models.X, models.Y, batch_size=8, epochs=3, verbose=0, callbacks=of_rank)
        except (JobError, UsageError) as error:
            messages.append(str(error))
    model = PassingNothing([keras.Input([6]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1 + rank), "mse")
    dapple.keras.pipeline(model, stages=1, micro_batches=3, replicas=[2])
    for train in (lambda: model.fit(models.X, models.Y), lambda: model.train_on_batch(models.X, models.Y)):
        try:
            train()
        except (JobError, UsageError) as error:
            messages.append(str(error))
    return messages


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
