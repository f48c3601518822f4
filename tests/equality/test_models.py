"""Whole models, unmodified, in float32: keras.applications and our GPT; batch norm and dropout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.examples.gpt import gpt
from dapple_tf.examples.text import BYTE_VALUES
from tests.equality.one_device import TOLERANCE, Problem, compare
from tests.models.zoo import model_of

CLASSES, SIDE = 7, 32


def momentum() -> Any:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def images(count: int, batch: int, dtype: str = "float32") -> Sequence[Any]:
    random = np.random.default_rng(0)
    return [
        (
            tf.constant(random.normal(size=(batch, SIDE, SIDE, 3)), dtype),
            tf.constant(random.integers(0, CLASSES, batch), tf.int32),
        )
        for _ in range(count)
    ]


def classifier(model: keras.Model, training: bool = False) -> Problem:
    def loss_fn(x: Any, y: Any) -> Any:
        logits = model(x, training=training)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))

    return Problem.of_model(model, loss_fn, momentum)


def application(name: str) -> Problem:
    keras.utils.set_random_seed(1)
    make = getattr(keras.applications, name)
    model = make(weights=None, input_shape=(SIDE, SIDE, 3), classes=CLASSES, classifier_activation=None)
    return classifier(model)


@pytest.mark.parametrize(
    ("name", "stages", "schedule"),
    [
        ("MobileNetV2", 4, "dapple-b"),
        ("ResNet50", 3, "gpipe"),
        ("DenseNet121", 2, "dapple-a"),
        ("VGG16", 4, "dapple-b:D=2"),
    ],
)
def test_an_unmodified_application_equals_one_device(name: str, stages: int, schedule: str) -> None:
    batches = images(2, 5)
    comparison = compare(application(name), batches, stages=stages, micro_batches=3, schedule=schedule)
    assert len(comparison.step.plan.stages) == stages
    comparison.check(TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("name", "starts", "replicas"),
    [
        ("MobileNet", ["conv_pw_6"], [2, 1]),
        ("MobileNetV2", ["block_6_expand", "block_12_expand"], [2, 1, 2]),
    ],
)
def test_an_application_cut_at_named_layers_with_replicas_equals_one_device(
    name: str, starts: list[str], replicas: list[int]
) -> None:
    comparison = compare(application(name), images(2, 7), stages=starts, replicas=replicas, micro_batches=2)
    names = comparison.step.layer_names
    assert [names[s].rsplit("/", 1)[-1] for s in comparison.step.plan.starts] == starts
    comparison.check(TOLERANCE["float32"])


def clipped_adamw() -> Any:
    return keras.optimizers.AdamW(1e-3, global_clipnorm=0.5)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "tied"),
    [
        ("float64", clipped_adamw, True),
        ("float64", clipped_adamw, False),
        ("float32", momentum, True),
        ("float32", momentum, False),
    ],
)
def test_the_gpt_equals_one_device(dtype: str, optimizer: Callable[[], Any], tied: bool) -> None:
    workload = gpt(layers=3, width=16, heads=2, context=12, tied=tied, dtype=dtype, batch_size=7)
    model = model_of(workload)
    problem = Problem.of_model(model, workload.loss_fn, optimizer)
    assert any(v.shape[-1] == BYTE_VALUES for v in model.variables) != tied
    batches = list(itertools.islice(workload.dataset, 3))
    comparison = compare(problem, batches, stages=["block_1", "block_2"], replicas=[1, 2, 1], micro_batches=3)
    comparison.check(TOLERANCE[dtype])


def small(*layers: keras.layers.Layer) -> keras.Model:
    keras.utils.set_random_seed(2)
    return keras.Sequential([keras.Input((SIDE, SIDE, 3), dtype="float64"), *layers])


def test_batch_norm_in_training_mode_equals_one_device_running_the_micro_batches_in_turn() -> None:
    layers = keras.layers
    model = small(
        layers.Conv2D(4, 3, strides=2, use_bias=False, dtype="float64"),  # a bias would have gradient 0
        layers.BatchNormalization(momentum=0.9, dtype="float64", name="first"),
        layers.ReLU(dtype="float64"),
        layers.Conv2D(4, 3, strides=2, use_bias=False, dtype="float64", name="second_half"),
        layers.BatchNormalization(momentum=0.9, dtype="float64", name="last"),
        layers.GlobalAveragePooling2D(dtype="float64"),
        layers.Dense(CLASSES, dtype="float64"),
    )
    problem = classifier(model, training=True)
    state = {name for name, v in problem.variables.items() if "moving" in name}
    before = {name: problem.variables[name].numpy() for name in state}
    comparison = compare(
        problem, images(3, 10, "float64"), in_turn=3, stages=["second_half"], micro_batches=3, schedule="gpipe"
    )
    comparison.check(TOLERANCE["float64"])
    assert len(state) == 4
    for name in state:
        assert not np.array_equal(problem.variables[name].numpy(), before[name])
        assert f"value of {name}" in comparison.errors


def test_batch_norm_state_is_the_mean_of_the_replicas() -> None:
    """Each replica sees its share of the samples; floats are averaged over the replicas at the end."""
    norm = keras.layers.BatchNormalization(momentum=0.5, dtype="float64")
    # Statistics of the images themselves would be the whole batch's: they depend on no trained variable.
    same = keras.layers.Dense(3, use_bias=False, kernel_initializer="identity", dtype="float64")
    model = small(same, norm, keras.layers.Flatten(dtype="float64"), keras.layers.Dense(CLASSES, dtype="float64"))
    problem = classifier(model, training=True)
    ((x, y),) = images(1, 8, "float64")
    step = dapple.pipeline(problem.loss_fn, optimizer=momentum(), stages=2, replicas=[2, 2], micro_batches=2)
    step(x, y)
    # replica r holds half r of each micro-batch: samples 0-1 and 4-5, 2-3 and 6-7
    means = []
    for shares in ([x[0:2], x[4:6]], [x[2:4], x[6:8]]):
        mean = np.zeros(3)
        for share in shares:
            mean = 0.5 * mean + 0.5 * share.numpy().mean(axis=(0, 1, 2))
        means.append(mean)
    np.testing.assert_allclose(norm.moving_mean.numpy(), np.mean(means, axis=0), rtol=1e-12)


def test_dropout_equals_one_device() -> None:
    """Each micro-batch draws its rows of the whole batch's mask; each seed generator's state advances once a step."""
    layers = keras.layers
    drops = [layers.Dropout(0.5, seed=i, dtype="float64", name=f"drop_{i}") for i in range(2)]
    model = small(
        layers.Flatten(dtype="float64"),
        layers.Dense(32, "tanh", dtype="float64"),
        drops[0],
        layers.Dense(8, "tanh", dtype="float64", name="second_half"),
        drops[1],
        layers.Dense(CLASSES, dtype="float64"),
    )
    problem = classifier(model, training=True)
    seeds = {f"seed of {drop.name}": drop.seed_generator.state for drop in drops}
    problem = Problem(problem.loss_fn, {**problem.variables, **seeds}, momentum)
    comparison = compare(problem, images(2, 10, "float64"), stages=["second_half"], micro_batches=3)
    comparison.check(TOLERANCE["float64"])
    assert all(f"value of {name}" in comparison.errors for name in seeds)


def test_the_comparison_notices_dropout_of_another_draw() -> None:
    """A device that runs the micro-batches in turn draws other masks, so the comparison above can fail."""
    model = small(
        keras.layers.Flatten(dtype="float64"),
        keras.layers.Dropout(0.5, seed=0, dtype="float64"),
        keras.layers.Dense(CLASSES, dtype="float64"),
    )
    problem = classifier(model, training=True)
    comparison = compare(problem, images(1, 10, "float64"), in_turn=2, stages=1, micro_batches=2)
    assert comparison.worst[0] > 1e-3
