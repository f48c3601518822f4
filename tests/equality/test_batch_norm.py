"""Batch norm in training mode: every micro-batch is normalised as plain Keras, called with it, normalises it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import CaptureError, ExactnessError, PlanError, StepError
from tests.equality.one_device import TOLERANCE, Problem, compare, needs_keras_3_13, relative_error

LAYERS = keras.layers
WIDTH, STEPS = 6, 5


def regression(*layers: keras.Layer, shape: Sequence[int] = (WIDTH,)) -> Problem:
    """A model of float64 layers, trained by the mean of squared differences."""
    model = keras.Sequential([keras.Input(tuple(shape), dtype="float64"), *layers])

    @tf.function
    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((y - model(x, training=True)) ** 2)

    return Problem.of_model(model, loss_fn, lambda: keras.optimizers.SGD(0.1, momentum=0.9))


def dense(name: str) -> keras.Layer:
    seeded = keras.initializers.GlorotUniform(3)
    return LAYERS.Dense(WIDTH, "tanh", kernel_initializer=seeded, name=name, dtype="float64")


def padded(count: int, sizes: Sequence[int]) -> list[tuple[Any, Any]]:
    """Batches of sequences of very unequal lengths, the shortest first; what is behind their ends is zero."""
    rng = np.random.default_rng(count)
    found = []
    for size in sizes:
        x = rng.normal(size=(size, STEPS, WIDTH))
        for i in range(size):
            x[i, 1 + STEPS * i // size :] = 0
        found.append((tf.constant(x), tf.constant(rng.normal(size=(size, STEPS, WIDTH)))))
    return found


@pytest.mark.parametrize("schedule", ["dapple-a", "gpipe", "zb-h1"])
def test_a_masked_batch_norm_counts_the_mask_of_its_micro_batch(schedule: str) -> None:
    """The count of the mask depends on no variable, but that of the whole batch would give a wrong mean."""
    problem = regression(
        LAYERS.Masking(dtype="float64"),
        dense("first"),
        LAYERS.BatchNormalization(momentum=0.5, name="norm", dtype="float64"),
        dense("second"),
        shape=(STEPS, WIDTH),
    )
    batches = padded(2, (7, 9))
    comparison = compare(problem, batches, in_turn=3, stages=["second"], micro_batches=3, schedule=schedule)
    comparison.check(TOLERANCE["float64"])
    assert comparison.step.exactness.reasons


# --- deferred: moving statistics of the whole batch


@dataclass
class Deferred:
    """Plain Keras on one device, which calls the model with a replica's samples of a micro-batch at a time.

    The moving statistics that Keras writes meanwhile are thrown away. At the end of the step they are computed by hand,
    from what entered each batch norm layer: mean and variance over all samples (those that the mask keeps).
    """

    model: keras.Sequential
    optimizer: Any

    def step(self, x: Any, y: Any, pieces: Sequence[slice]) -> float:
        variables, loss, gradients = self.model.trainable_variables, 0.0, None
        seen: dict[str, list[tuple[Any, Any]]] = {}
        before = {v.path: v.numpy() for v in self.model.non_trainable_variables}
        for piece in pieces:
            share = (piece.stop - piece.start) / len(x)
            with tf.GradientTape() as tape:
                part = share * tf.reduce_mean((y[piece] - self._call(x[piece], seen)) ** 2)
            found = tape.gradient(part, variables)
            gradients = found if gradients is None else [a + b for a, b in zip(gradients, found, strict=True)]
            loss += float(part)
        self.optimizer.apply(gradients, variables)
        for layer in self.model.layers:
            if layer.name in seen:
                mean, variance = whole_statistics(seen[layer.name])
                for variable, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
                    old = before[variable.path]
                    variable.assign(layer.momentum * old + (1 - layer.momentum) * new)
        return loss

    def _call(self, x: Any, seen: dict[str, list[tuple[Any, Any]]]) -> Any:
        mask = None
        for layer in self.model.layers:
            if isinstance(layer, LAYERS.BatchNormalization):
                seen.setdefault(layer.name, []).append((x.numpy(), None if mask is None else mask.numpy()))
                x = layer(x, training=True, mask=mask)
            elif isinstance(layer, LAYERS.Masking):
                mask = layer.compute_mask(x)
                x = layer(x)
            else:
                x = layer(x)
        return x


def whole_statistics(seen: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Sum mean and squares of what entered a layer in several calls; the weight is the number of entries."""
    weight, mean, squares = 0.0, 0.0, 0.0
    for x, mask in seen:
        axes = tuple(range(x.ndim - 1))
        kept = np.ones(x.shape[:-1]) if mask is None else mask.astype(x.dtype)
        count = kept.sum()
        own = (x * kept[..., None]).sum(axes) / (count if mask is None else count + 1e-7)  # Keras adds its epsilon
        spread = (kept[..., None] * (x - own) ** 2).sum(axes) / (count if mask is None else count + 1e-7)
        weight, mean, squares = weight + count, mean + count * own, squares + count * (spread + own**2)
    return mean / weight, squares / weight - (mean / weight) ** 2


def pieces_of(size: int, micro_batches: int, replicas: int = 1) -> list[slice]:
    """The samples of each replica of each micro-batch."""
    found = []
    for m in range(micro_batches):
        begin, end = size * m // micro_batches, size * (m + 1) // micro_batches
        bounds = [begin + (end - begin) * r // replicas for r in range(replicas + 1)]
        found += [slice(low, high) for low, high in itertools.pairwise(bounds)]
    return found


def random(sizes: Sequence[int], shape: Sequence[int] = (WIDTH,)) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(4)
    return [
        (tf.constant(rng.normal(size=(size, *shape))), tf.constant(rng.normal(size=(size, WIDTH)))) for size in sizes
    ]


def norm(name: str, momentum: float = 0.5) -> keras.Layer:
    return LAYERS.BatchNormalization(momentum=momentum, name=name, dtype="float64")


def two_norms() -> list[keras.Layer]:
    return [dense("a"), norm("first"), dense("b"), norm("second", 0.9), dense("c")]


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def check_deferred(
    layers: Callable[[], Sequence[keras.Layer]],
    batches: Sequence[tuple[Any, Any]],
    *,
    stages: Sequence[str],
    micro_batches: int,
    replicas: Sequence[int] | None = None,
    clip: dict[str, float] | None = None,
    **options: Any,
) -> Any:
    """Assert that losses and all variables are those of ``Deferred`` after training on ``batches``; return the step."""
    shape = batches[0][0].shape[1:]
    plain = Deferred(keras.Sequential([keras.Input(shape, dtype="float64"), *layers()]), sgd(**clip or {}))
    model = keras.Sequential([keras.Input(shape, dtype="float64"), *layers()])
    step = dapple.pipeline(
        lambda x, y: tf.reduce_mean((y - model(x, training=True)) ** 2),
        optimizer=sgd(**clip or {}),
        stages=stages,
        micro_batches=micro_batches,
        replicas=replicas,
        batch_norm="deferred",
        **options,
    )
    for x, y in batches:
        wanted = plain.step(x, y, pieces_of(len(x), micro_batches, max(replicas or [1])))
        assert relative_error(step(x, y).numpy(), np.float64(wanted)) <= TOLERANCE["float64"]
    for found, expected in zip(model.variables, plain.model.variables, strict=True):
        assert relative_error(found.numpy(), expected.numpy()) <= TOLERANCE["float64"], expected.path
    return step


@pytest.mark.parametrize("schedule", ["zb-h1", "gpipe", "dapple-a"])
def test_deferred_statistics_are_those_of_the_whole_batch(schedule: str) -> None:
    step = check_deferred(two_norms, random((7, 10)), stages=["b"], micro_batches=3, schedule=schedule)
    reasons = step.exactness.reasons
    assert [reason.layer.rsplit("/", 1)[-1] for reason in reasons] == ["first", "second"]
    assert all(reason.documented and "those of the whole batch" in reason.why for reason in reasons)


def test_deferred_statistics_are_summed_over_replicas() -> None:
    check_deferred(two_norms, random((14, 12)), stages=["b"], micro_batches=2, replicas=[2, 2])


def test_deferred_statistics_of_a_stage_that_alone_is_replicated() -> None:
    def layers() -> list[keras.Layer]:
        return [dense("a"), dense("b"), norm("norm"), dense("c")]

    check_deferred(
        layers, random((14, 12)), stages=["b"], micro_batches=2, replicas=[1, 2], clip={"global_clipnorm": 0.1}
    )


@pytest.mark.parametrize("schedule", ["dapple-a", "zb-h1"])
def test_deferred_statistics_with_recomputation(schedule: str) -> None:
    check_deferred(two_norms, random((7, 10)), stages=["b"], micro_batches=3, recompute=True, schedule=schedule)


def test_deferred_statistics_of_images_count_all_pixels() -> None:
    def layers() -> list[keras.Layer]:
        start = keras.initializers.GlorotUniform(5)
        conv = LAYERS.Conv2D(3, 2, use_bias=False, kernel_initializer=start, name="conv", dtype="float64")
        return [conv, norm("norm"), LAYERS.Flatten(dtype="float64"), dense("last")]

    check_deferred(layers, random((7, 10), (4, 4, 2)), stages=["last"], micro_batches=3)


def test_deferred_statistics_with_a_mask_count_what_it_keeps() -> None:
    def layers() -> list[keras.Layer]:
        return [LAYERS.Masking(dtype="float64"), dense("first"), norm("norm"), dense("second")]

    check_deferred(layers, padded(2, (7, 9)), stages=["second"], micro_batches=3)


def test_deferred_statistics_of_the_arguments_are_written_as_by_one_device() -> None:
    """They depend on nothing that is trained, so they are the whole batch's anyway, and normalise it."""

    def model() -> Problem:
        return regression(norm("norm"), dense("a"), dense("b"))

    comparison = compare(model(), random((7, 10)), stages=["b"], micro_batches=3, batch_norm="deferred")
    comparison.check(TOLERANCE["float64"])
    assert comparison.step.exactness.exact


@pytest.mark.parametrize("stages", [["second"], 1])
def test_a_layer_that_is_called_twice_moves_its_deferred_statistics_twice(stages: Any) -> None:
    """As the two views of a siamese network do: first by the statistics of one call, then by the other's."""
    first, layer, second = dense("first"), norm("norm"), dense("second")
    (x, y), *_ = random((7,))
    hidden = [first(x), first(2 * y)]

    def loss_fn(x: Any, y: Any) -> Any:
        one, other = (second(layer(first(view), training=True)) for view in (x, 2 * y))
        return tf.reduce_mean((one - other) ** 2)

    step = dapple.pipeline(loss_fn, optimizer=sgd(), stages=stages, micro_batches=3, batch_norm="deferred")
    step(x, y)
    mean, variance = np.zeros(WIDTH), np.ones(WIDTH)
    for view in hidden:
        mean, variance = (mean + view.numpy().mean(0)) / 2, (variance + view.numpy().var(0)) / 2
    np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-12)


def test_deferred_statistics_of_float32_keep_their_digits() -> None:
    """The squares of large means cancel: in float32, E[x^2] - E[x]^2 would have no digit left."""
    bias = keras.initializers.Constant(1000.0)
    first = LAYERS.Dense(WIDTH, bias_initializer=bias, kernel_initializer="identity")
    layer, last = LAYERS.BatchNormalization(momentum=0.0), LAYERS.Dense(WIDTH)
    (x, y), *_ = random((64,))
    x, y = tf.cast(x, tf.float32), tf.cast(y, tf.float32)
    hidden = first(x).numpy().astype(np.float64)

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean((y - last(layer(first(x), training=True))) ** 2)

    dapple.pipeline(loss_fn, optimizer=sgd(), stages=1, micro_batches=4, batch_norm="deferred")(x, y)
    np.testing.assert_allclose(layer.moving_mean.numpy(), hidden.mean(0), rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), hidden.var(0), rtol=1e-4)


def test_deferred_statistics_are_no_gradients() -> None:
    """Neither are they among the gradients of a step, nor does a failed step change them."""
    problem = regression(dense("a"), norm("norm"), dense("b"))
    step = dapple.pipeline(
        problem.loss_fn, optimizer=sgd(), stages=["b"], micro_batches=2, batch_norm="deferred", inexact="warn"
    )
    step.check_numerics = True
    ((x, y),) = random((6,))
    _, gradients = step.run_exposed(x, y)
    assert not any("moving" in name or "batch_norm" in name for name in gradients)
    before = {name: variable.numpy() for name, variable in problem.variables.items()}
    with pytest.raises(StepError, match="All variables are as they were"):
        step(x * np.nan, y)
    for name, variable in problem.variables.items():
        np.testing.assert_array_equal(variable.numpy(), before[name])
    step(x, y)
    moved = next(name for name in before if "moving_mean" in name)
    assert not np.array_equal(problem.variables[moved].numpy(), before[moved])


def test_forward_without_training_writes_deferred_statistics_too() -> None:
    first, layer = dense("a"), norm("norm")
    problem = regression(first, layer, dense("b"))
    ((x, y),) = random((8,))
    hidden = first(x).numpy()
    step = dapple.pipeline(
        problem.loss_fn, optimizer=sgd(), stages=["b"], replicas=[2, 1], micro_batches=2, batch_norm="deferred"
    )
    step.forward(x, y)
    np.testing.assert_allclose(layer.moving_mean.numpy(), hidden.mean(0) / 2, rtol=1e-12)
    np.testing.assert_allclose(layer.moving_variance.numpy(), (1 + hidden.var(0)) / 2, rtol=1e-12)


# --- what cannot be deferred


@needs_keras_3_13
def test_statistics_that_are_not_known_are_refused() -> None:
    renorm = LAYERS.BatchNormalization(renorm=True, name="odd", dtype="float64")
    step = step_of(regression(dense("a"), renorm))
    with pytest.raises(CaptureError, match=r"layer '.*odd' writes .*renorm_mean.* too, .*batch_norm='micro-batch'"):
        step(*random((6,))[0])


class Counting(LAYERS.BatchNormalization):
    """A layer that counts its calls."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.count = self.add_weight(name="count", initializer="zeros", trainable=False, dtype="int64")

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        self.count.assign_add(1)
        return super().call(inputs, training=training, mask=mask)


def test_what_else_a_layer_writes_is_written_once_a_step() -> None:
    layer = Counting(momentum=0.0, name="odd", dtype="float64")
    first = dense("a")
    step = step_of(regression(first, layer))
    ((x, y),) = random((6,))
    hidden = first(x).numpy()
    step(x, y)
    assert int(layer.count.numpy()) == 1
    np.testing.assert_allclose(layer.moving_mean.numpy(), hidden.mean(0), rtol=1e-12)


class OwnMoments(LAYERS.BatchNormalization):
    """A layer whose statistics are not those that Keras computes."""

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        return tf.reduce_mean(inputs, 0), tf.ones(inputs.shape[-1:], inputs.dtype)


def test_a_layer_with_statistics_of_its_own_is_refused() -> None:
    step = step_of(regression(dense("a"), OwnMoments(name="odd", dtype="float64")))
    with pytest.raises(CaptureError, match=r"layer '.*odd' computes its statistics in a way of its own"):
        step(*random((6,))[0])


def test_a_layer_in_a_function_of_its_own_is_refused() -> None:
    layer, first = norm("inside"), dense("a")
    layer.build((None, WIDTH))
    inner = tf.function(lambda x: layer(x, training=True))
    problem = Problem(lambda x, y: tf.reduce_mean((y - inner(first(x))) ** 2), {}, sgd)
    with pytest.raises(CaptureError, match="writes the statistics of layer 'inside': the layer is called in a nested"):
        step_of(problem, inexact="allow")(*random((6,))[0])


class Unbiased(LAYERS.BatchNormalization):
    """A layer that takes the unbiased variance, as other frameworks do."""

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        count = tf.cast(tf.shape(inputs)[0], inputs.dtype)
        return mean, variance * count / (count - 1)


def test_a_layer_that_computes_with_the_number_of_its_samples_is_refused() -> None:
    step = step_of(regression(dense("a"), Unbiased(name="odd", dtype="float64")))
    with pytest.raises(CaptureError, match=r"layer '.*odd' computes with the number of its samples"):
        step(*random((6,))[0])


@pytest.mark.parametrize("batch_norm", ["micro-batch", "deferred", "sync"])
def test_a_layer_that_backward_calls_again_is_refused(batch_norm: Any) -> None:
    layer, first = norm("inside"), dense("a")
    layer.build((None, WIDTH))
    again = tf.recompute_grad(lambda x: layer(x, training=True))
    problem = Problem(lambda x, y: tf.reduce_mean((y - again(first(x))) ** 2), {}, sgd)
    with pytest.raises(CaptureError, match=r"backward writes inside/moving_mean .*recompute=True to the pipeline"):
        step_of(problem, batch_norm=batch_norm)(*random((6,))[0])


def step_of(problem: Problem, **options: Any) -> Any:
    options = {"batch_norm": "deferred", **options}
    return dapple.pipeline(problem.loss_fn, optimizer=sgd(), stages=1, micro_batches=2, **options)


def test_other_choices_are_refused() -> None:
    choice: Any = "whole"
    with pytest.raises(PlanError, match="batch_norm='whole': give one of 'micro-batch', 'deferred', 'sync'"):
        dapple.pipeline(lambda x: x, optimizer=sgd(), batch_norm=choice)


@pytest.mark.parametrize("batch_norm", ["micro-batch", "deferred", "sync"])
def test_what_combines_samples_before_batch_norm_is_refused(batch_norm: str) -> None:
    """That batch norm combines samples is documented, which does not excuse what comes before it."""
    layer = norm("norm")
    centred = LAYERS.Lambda(lambda x: x * keras.ops.mean(x, 0), dtype="float64")
    problem = regression(dense("first"), centred, layer, dense("last"))
    step = dapple.pipeline(problem.loss_fn, optimizer=sgd(), stages=["last"], micro_batches=2, batch_norm=batch_norm)
    with pytest.raises(ExactnessError, match=r"the loss is no sum or mean over samples"):
        step(*random([6])[0])
