"""Scripts that Keras users write, in one process or on every rank of a job: the second line alone is new."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.dapple_tf.keras import models
from tests.dapple_tf.keras.models import CLASSES, CROSS_ENTROPY, IDS, TAGS, WEIGHTS, X, Y

Use = Callable[[keras.Model, Path], Any]


class InterruptedRunError(Exception):
    """What ends a training run in the middle."""


def _train_with_callbacks(model: keras.Model, folder: Path) -> Any:
    """Every stock callback at once but TensorBoard, which needs a package of its own."""
    seen: list[Any] = []

    def note(epoch: int, logs: Any) -> None:
        kernel = model.get_layer("last").kernel
        seen.append([float(np.sum(kernel.numpy())), float(model.optimizer.iterations.numpy())])

    history = model.fit(
        X,
        Y,
        batch_size=8,
        epochs=5,
        validation_data=(X[:9], Y[:9]),
        verbose=2,
        callbacks=[
            keras.callbacks.ModelCheckpoint(folder / "saved" / "{epoch}.keras"),
            keras.callbacks.ModelCheckpoint(
                str(folder / "best.weights.h5"),
                monitor="loss",
                save_weights_only=True,
                save_best_only=True,
                save_freq=2,
            ),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (0.5 if epoch == 1 else 1.0)),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10.0),
            keras.callbacks.EarlyStopping(monitor="mae", patience=2, min_delta=0.2, restore_best_weights=True),
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.LambdaCallback(on_epoch_end=note),
        ],
    ).history
    model.save(folder / "last.keras")
    return history, seen, model.evaluate(X, Y, verbose=2), float(model.optimizer.learning_rate.numpy())


def _train_again_after_a_break(model: keras.Model, folder: Path) -> Any:
    """Go on from the backup of a run that was interrupted in its third epoch."""

    def interrupt(epoch: int, logs: Any) -> None:
        if epoch == 2:
            raise InterruptedRunError

    model.build((None, 6))
    backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
    options = {"batch_size": 8, "epochs": 5, "verbose": 0, "shuffle": False}
    try:
        model.fit(X, Y, callbacks=[backup, keras.callbacks.LambdaCallback(on_epoch_begin=interrupt)], **options)
    except InterruptedRunError:
        model.set_weights([np.zeros_like(value) for value in model.get_weights()])
    history = model.fit(X, Y, callbacks=[backup], **options).history
    return history, (folder / "backup").exists()


def _use_masks_and_weights(model: keras.Model, folder: Path) -> Any:
    weights = np.tile(WEIGHTS[:, None], (1, 7))
    history = model.fit(IDS, TAGS, sample_weight=weights, batch_size=8, epochs=2, validation_split=0.2, verbose=2)
    return history.history, model.predict(IDS, batch_size=5, verbose=2)


def _overflow_and_average(model: keras.Model, folder: Path) -> Any:
    """An input of the second batch is infinite; the weights end as their averages."""
    x = X.copy()
    x[10, 2] = np.inf
    options = {"batch_size": 8, "verbose": 2, "shuffle": False}
    history = model.fit(x, Y, epochs=3, validation_data=(X, Y), **options).history
    model.save_weights(folder / "scaled.weights.h5")
    model.fit(X, Y, **options)
    model.load_weights(folder / "scaled.weights.h5")
    return history, model.fit(x, Y, epochs=2, **options).history, float(model.optimizer.dynamic_scale.numpy())


def _scaled() -> keras.Model:
    averages = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3}
    inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.1, **averages)
    return models.sequential(optimizer=keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2))


def _use_batches(model: keras.Model, folder: Path) -> Any:
    targets = [Y, CLASSES]
    found: list[Any] = [model.test_on_batch(X, targets), model.predict_on_batch(X)]
    found += [model.train_on_batch(X[:k], [Y[:k], CLASSES[:k]], return_dict=True) for k in (8, 22, 3)]
    found += [model.get_weights(), model.evaluate(X, targets, verbose=0, batch_size=8)]
    model.save_weights(folder / "two.weights.h5")
    model.train_on_batch(X, targets)
    model.load_weights(folder / "two.weights.h5")
    return [*found, model.train_on_batch(X, targets)]


def _forget_dropout(model: keras.Model, folder: Path) -> Any:
    """A stage of training holds nothing but dropout: evaluation has fewer stages."""
    return [model.predict(X, verbose=0), model.train_on_batch(X, Y), model.evaluate(X, Y, batch_size=8, verbose=0)]


class HalveWeights(keras.callbacks.Callback):  # type: ignore[misc]  # keras is not typed
    """Predict with weights of half the size."""

    def _scale(self, factor: float) -> None:
        for variable in self.model.trainable_variables:
            variable.assign(factor * variable)

    def on_predict_begin(self, logs: Any = None) -> None:
        self._scale(0.5)

    def on_predict_end(self, logs: Any = None) -> None:
        self._scale(2.0)


def _evaluate_averages(model: keras.Model, folder: Path) -> Any:
    """Callbacks that write variables before an evaluation and after it."""
    options: dict[str, Any] = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
    swapping = keras.callbacks.SwapEMAWeights
    found: list[Any] = [
        model.fit(X, Y, validation_data=(X, Y), callbacks=[swapping(swap_on_epoch=epochs)], **options).history
        for epochs in (True, False)
    ]
    found.append(model.evaluate(X, Y, verbose=0, callbacks=[swapping()]))
    found.append(model.predict(X, verbose=0, callbacks=[HalveWeights()]))
    return [*found, model.fit(X, Y, **options).history]


def _schedule_the_rate(model: keras.Model, folder: Path) -> Any:
    """No callback here reads variables of the model; the optimizer finalizes them."""
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    history = model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[schedule]).history
    return history, float(model.optimizer.learning_rate.numpy())


class HalvingAtTheEnd(keras.optimizers.SGD):  # type: ignore[misc]  # keras is not typed
    def finalize_variable_values(self, var_list: Any) -> None:
        for variable in var_list:
            variable.assign(0.5 * variable)


SCRIPTS: Mapping[str, tuple[Callable[[], keras.Model], Use]] = {
    "callbacks": (
        lambda: models.sequential(metrics=["mae"], optimizer=keras.optimizers.SGD(0.1, momentum=0.9)),
        _train_with_callbacks,
    ),
    "backup": (models.sequential, _train_again_after_a_break),
    "masks": (lambda: models.tagger(metrics=["accuracy"], weighted_metrics=["accuracy"]), _use_masks_and_weights),
    "batches": (lambda: models.two_outputs(loss=["mse", CROSS_ENTROPY], metrics=["mae", "accuracy"]), _use_batches),
    "dropout": (models.sequential, _forget_dropout),
    "scaled": (_scaled, _overflow_and_average),
    "averages": (
        lambda: models.sequential(optimizer=keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)),
        _evaluate_averages,
    ),
    "rates": (lambda: models.sequential(optimizer=HalvingAtTheEnd(0.1)), _schedule_the_rate),
}


def run_script(name: str, folder: Path, wrap: Callable[[keras.Model], Any] = lambda model: None) -> Any:
    """Run a script on a new model, after ``wrap``; return what it returns, and all variables."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    make, use = SCRIPTS[name]
    model = make()
    wrap(model)
    keras.utils.set_random_seed(2)
    result = use(model, folder)
    weights = model.get_weights()  # in a job, gathers all
    return result, weights, [variable.numpy() for variable in model.optimizer.variables]
