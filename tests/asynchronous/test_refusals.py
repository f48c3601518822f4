"""Asynchronous training that is impossible, or that says two things at once, is refused, and nothing is trained."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf import errors
from tests.asynchronous.networks import dense

ASYNC: dict[str, Any] = {"mode": "async", "minibatches": 4}


def refused(said: str, options: dict[str, Any], size: int = 8, optimizer: Any = None) -> None:
    """Fail unless a pipeline of three stages with these options, and its first window, give such an error."""
    network = dense([1, 1, 1])
    before = [v.numpy() for v in network.variables]
    optimizer = optimizer or keras.optimizers.SGD(0.1)

    def train() -> None:
        dapple.pipeline(network.loss_fn, **{"optimizer": optimizer, "stages": list(network.starts), **options})(
            *network.batch(size)
        )

    with pytest.raises(ValueError, match=said) as caught:
        train()
    assert getattr(errors, type(caught.value).__name__) is type(caught.value)
    for variable, value in zip(network.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "sometimes"}, "mode.*sometimes"),
        ({**ASYNC, "weights": "fresh"}, "weights.*fresh"),
        ({**ASYNC, "minibatches": 0}, "minibatches"),
        ({**ASYNC, "minibatches": -4}, "minibatches"),
        ({**ASYNC, "minibatches": 2.5}, "minibatches"),
        ({**ASYNC, "depth": 0}, "depth"),
        ({**ASYNC, "depth": 1.5}, "depth"),
    ],
)
def test_values_that_do_not_exist(options: dict[str, Any], said: str) -> None:
    refused(said, options)


@pytest.mark.parametrize("weights", ["stash", "vertical-sync", "latest"])
def test_micro_batches_without_2bw(weights: str) -> None:
    refused("micro_batches", {**ASYNC, "weights": weights, "micro_batches": 4})


def test_fewer_micro_batches_with_2bw_than_the_first_stage_has_in_flight() -> None:
    refused("micro_batches.*3", {**ASYNC, "weights": "2bw", "micro_batches": 2}, size=16)


def test_2bw_with_fewer_samples_in_a_minibatch_than_micro_batches() -> None:
    refused("micro", {**ASYNC, "weights": "2bw", "micro_batches": 3}, size=11)


def test_vertical_sync_with_unequal_replicas() -> None:
    refused("vertical-sync", {**ASYNC, "weights": "vertical-sync", "replicas": [2, 1, 1]})


def test_depth_with_replicas() -> None:
    refused("depth", {**ASYNC, "depth": 2, "replicas": [2, 1, 1]})


@pytest.mark.parametrize("replicas", [[0, 1, 1], [2, -1, 1], []])
def test_stages_without_devices(replicas: list[int]) -> None:
    refused(r"replicas=\[", {**ASYNC, "replicas": replicas})


@pytest.mark.parametrize("replicas", [[3, 1, 1], [1, 2, 3]])
def test_minibatches_that_are_no_multiple_of_the_replicas_of_a_stage(replicas: list[int]) -> None:
    refused("minibatches", {**ASYNC, "replicas": replicas})


def test_fewer_samples_than_minibatches() -> None:
    refused("minibatches", ASYNC, size=3)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0), "global_clipnorm"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "LossScaleOptimizer"),
    ],
)
def test_optimizers_that_need_all_stages_at_once(optimizer: Any, said: str) -> None:
    refused(said, ASYNC, optimizer=optimizer())


def test_weights_tied_across_stages() -> None:
    tied, other = (tf.Variable(np.eye(4) * 0.5, name=name) for name in ("tied_matrix", "other"))

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate((tied, other, tied)):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ matrix)
        return tf.reduce_mean(tf.square(x - y))

    x = tf.ones((8, 4), "float64")
    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=["layer1"], **ASYNC)
    with pytest.raises(ValueError, match="tied_matrix") as caught:
        step(x, x)
    assert getattr(errors, type(caught.value).__name__) is type(caught.value)
    # Tied within a stage, they train.
    dapple.pipeline(loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=1, **ASYNC)(x, x)
    assert np.abs(tied.numpy() - np.eye(4) * 0.5).max() > 1e-6


@pytest.mark.parametrize(
    ("option", "value"),
    [("schedule", "gpipe"), ("schedule", "dapple-a"), ("slice", 1), ("batch_loss", True)],
)
def test_options_of_synchronous_steps(option: str, value: Any) -> None:
    refused(option, {**ASYNC, option: value})


@pytest.mark.parametrize(("option", "value"), [("weights", "latest"), ("minibatches", 4), ("depth", 2)])
@pytest.mark.parametrize("mode", [{}, {"mode": "sync"}])
def test_options_of_windows_without_async(option: str, value: Any, mode: dict[str, str]) -> None:
    refused(option, {**mode, "micro_batches": 2, option: value})
