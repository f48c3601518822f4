"""``fit``, ``evaluate`` and ``predict`` of a pipelined model equal those of plain Keras: losses, metrics, variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import dapple_tf as dapple
from tests.dapple_tf.keras import models
from tests.dapple_tf.keras.models import CLASSES, CROSS_ENTROPY, IDS, TAGS, WEIGHTS, X, Y
from tests.dapple_tf.keras.plain import assert_equal_to_plain

partial = functools.partial


def fit(x: Any, y: Any, weights: Any = None, **options: Any) -> Callable[[keras.Model], Any]:
    """Two epochs of fit, then evaluate and predict."""

    def use(model: keras.Model) -> Any:
        options_of_fit = {"batch_size": 8, "epochs": 2, "verbose": 0, **options}
        history = model.fit(x, y, sample_weight=weights, **options_of_fit).history
        scores = model.evaluate(x, y, sample_weight=weights, batch_size=8, verbose=0, return_dict=True)
        return history, scores, model.predict(x, batch_size=8, verbose=0)

    return use


def with_infinity(x: Any) -> Any:
    """An input of the second batch is infinite: of all gradients, only the first kernel's is not finite then."""
    x = x.copy()
    x[10, 2] = np.inf
    return x


BOTH, BOTH_WEIGHTS = {"value": Y, "kind": CLASSES}, {"value": WEIGHTS, "kind": WEIGHTS[::-1].copy()}

CASES = {
    "subclassed": (partial(models.subclassed, metrics=["mae"]), fit(X, Y)),
    "a slot that the optimizer leaves unnamed": (
        lambda: models.sequential(optimizer=keras.optimizers.Nadam(0.01)),
        fit(X, Y),
    ),
    "masks": (
        partial(models.tagger, metrics=["accuracy"], weighted_metrics=["accuracy", CROSS_ENTROPY]),
        lambda model: model.fit(IDS, TAGS, batch_size=8, epochs=2, verbose=0).history,
    ),
    "LossScaleOptimizer, overflowing": (
        lambda: models.sequential(
            optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), dynamic_growth_steps=2),
            metrics=["mae"],
        ),
        fit(with_infinity(X), Y, shuffle=False),
    ),
    "losses in a dict, with weights": (
        partial(
            models.two_outputs,
            as_dict=True,
            loss={"value": "mse", "kind": CROSS_ENTROPY},
            loss_weights={"value": 0.3, "kind": 2.0},
            metrics={"value": ["mae", "mse"], "kind": "accuracy"},
            weighted_metrics={"kind": "accuracy"},
        ),
        lambda model: model.fit(X, BOTH, sample_weight=BOTH_WEIGHTS, batch_size=8, epochs=2, verbose=0).history,
    ),
}
MORE_CASES = {
    "sequential": (partial(models.sequential, metrics=["mae"]), fit(X, Y, validation_split=0.25)),
    "functional": (partial(models.classifier, metrics=["accuracy"]), fit(X, CLASSES)),
    "masks, evaluated": (
        partial(models.tagger, metrics=["accuracy"], weighted_metrics=["accuracy", CROSS_ENTROPY]),
        fit(IDS, TAGS, validation_data=(IDS[:5], TAGS[:5])),
    ),
    "losses in a dict, evaluated": (
        partial(
            models.two_outputs, as_dict=True, loss={"value": "mse", "kind": CROSS_ENTROPY}, metrics={"value": "mae"}
        ),
        fit(X, BOTH, BOTH_WEIGHTS),
    ),
    "losses in a list, with weights": (
        partial(models.two_outputs, loss_weights=[0.5, 2.0], metrics=["mae", "accuracy"]),
        fit(X, [Y, CLASSES]),
    ),
    "losses in a dict for a list of outputs": (
        partial(models.two_outputs, loss={"value": "mae", "kind": CROSS_ENTROPY}),
        fit(X, [Y, CLASSES]),
    ),
    "class weights": (
        partial(models.classifier, metrics=["accuracy"], weighted_metrics=["accuracy"]),
        lambda model: (
            model.fit(X, CLASSES, batch_size=8, epochs=2, class_weight={0: 1.0, 1: 3.0, 2: 0.2}, verbose=0).history
        ),
    ),
    "sample weights": (
        partial(models.sequential, metrics=["mae"], weighted_metrics=["mae", "mse"]),
        fit(X, Y, WEIGHTS, validation_data=(X[:7], Y[:7], WEIGHTS[:7])),
    ),
    "sample weights of each step, masked": (
        partial(models.tagger, weighted_metrics=["accuracy"]),
        fit(IDS, TAGS, np.random.default_rng(1).uniform(size=TAGS.shape)),
    ),
    "a mean by weights": (
        lambda: models.classifier(loss=keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")),
        fit(X, CLASSES, WEIGHTS),
    ),
    "metrics with states of other shapes": (
        lambda: models.sequential(
            loss="binary_crossentropy",
            metrics=[keras.metrics.AUC(), keras.metrics.PrecisionAtRecall(0.4), keras.metrics.R2Score()],
        ),
        fit(X, (Y > 0).astype("float64")),
    ),
    "steps per execution": (
        partial(models.sequential, metrics=["mae"], steps_per_execution=2),
        fit(X, Y, validation_data=(X[:9], Y[:9])),
    ),
    "initial epoch": (
        models.sequential,
        fit(X, Y, initial_epoch=1, epochs=3, validation_data=(X, Y), validation_freq=2, validation_steps=2),
    ),
    "frozen layers": (lambda: freeze(models.sequential), fit(X, Y)),
    "loss_scale_factor": (
        lambda: models.sequential(optimizer=keras.optimizers.SGD(0.01, loss_scale_factor=128.0)),
        fit(X, Y),
    ),
    "gradient_accumulation_steps, averages": (
        lambda: models.sequential(
            optimizer=keras.optimizers.Adam(
                0.01,
                gradient_accumulation_steps=2,
                global_clipnorm=0.1,
                use_ema=True,
                ema_momentum=0.9,
                ema_overwrite_frequency=2,
            )
        ),
        fit(X, Y),
    ),
    "LossScaleOptimizer, accumulation, averages": (
        lambda: models.sequential(
            optimizer=keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.01, gradient_accumulation_steps=3, use_ema=True, ema_momentum=0.9)
            )
        ),
        fit(with_infinity(X), Y, shuffle=False),
    ),
    "global_clipnorm, schedule": (
        lambda: models.tagger(
            optimizer=keras.optimizers.AdamW(
                keras.optimizers.schedules.CosineDecay(0.01, 5), weight_decay=0.1, global_clipnorm=0.1
            )
        ),
        fit(IDS, TAGS),
    ),
}
ALL_CASES = [
    *(pytest.param(*case, id=name) for name, case in CASES.items()),
    *(pytest.param(*case, id=name) for name, case in MORE_CASES.items()),
]


def freeze(make: Callable[[], keras.Model]) -> keras.Model:
    model = make()
    model.layers[0].trainable = False
    model.compile(optimizer=model.optimizer, loss="mse")
    return model


@pytest.mark.parametrize(("make", "use"), ALL_CASES)
def test_fit_evaluate_and_predict_equal_plain_keras(make: Callable[[], keras.Model], use: Any) -> None:
    assert_equal_to_plain(make, use)


@pytest.mark.filterwarnings("ignore:the loss of net is a sum:dapple_tf.errors.DappleWarning")
def test_a_sum_equals_plain_keras() -> None:
    make = partial(models.sequential, loss=keras.losses.MeanSquaredError(reduction="sum"))
    assert_equal_to_plain(make, fit(X, Y))


@pytest.mark.filterwarnings("ignore:Gradients do not exist", "ignore:no gradient reaches")
def test_an_output_without_a_loss_equals_plain_keras() -> None:
    make = partial(models.two_outputs, as_dict=True, loss={"kind": CROSS_ENTROPY, "value": None})
    assert_equal_to_plain(make, fit(X, {"value": Y, "kind": CLASSES}))


def test_a_plan_is_made_or_taken() -> None:
    make = partial(models.sequential, metrics=["mae"])
    assert_equal_to_plain(make, fit(X, Y), stages="auto", devices=[0, 1])
    step = dapple.keras.pipeline(make(), stages=2, micro_batches=4, example_batch=(X[:8], Y[:8]))
    assert_equal_to_plain(make, fit(X, Y), stages="auto", plan=step.plan)
    assert_equal_to_plain(make, lambda model: model.predict(X, verbose=0), plan=step.plan, stages="auto")


def test_other_pipelines_equal_plain_keras_too() -> None:
    make = partial(models.sequential, metrics=["mae"], weighted_metrics=["mae"])
    for options in ({"stages": 3, "replicas": [2, 1, 2]}, {"schedule": "zb-h1", "micro_batches": 8}, {"stages": 1}):
        assert_equal_to_plain(make, fit(X, Y, WEIGHTS), **options)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_equals_plain_keras(policy: str) -> None:
    """Keras wraps the optimizer under mixed_float16. With one micro-batch all sums are those of one device."""
    made: list[keras.Model] = []

    def make() -> keras.Model:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        made.append(models.sequential(metrics=["mae"]))
        keras.config.set_dtype_policy(before)
        return made[-1]

    assert_equal_to_plain(make, fit(X, Y), micro_batches=1)
    scaled = [isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) for model in made]
    assert scaled == [policy == "mixed_float16"] * 2
    assert made[1].layers[0].compute_dtype == policy.removeprefix("mixed_")


def test_the_fifth_model_does_not_bring_tensorflows_warning_of_retracing(caplog: pytest.LogCaptureFixture) -> None:
    """TensorFlow counts the traces of a method over all its objects: those of all models would be added up."""
    for _ in range(5):
        model = models.sequential(metrics=["mae"])
        dapple.keras.pipeline(model, stages=2, micro_batches=2)
        model.fit(X, Y, batch_size=8, verbose=0)
    assert not [record for record in caplog.records if "retracing" in record.getMessage()]
