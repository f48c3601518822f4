"""Windows of models that are hard to cut, to version or to repeat: they equal the eager reference in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from tests.asynchronous.networks import WIDTH, Network, dense, moving_average, normal, rows
from tests.asynchronous.reference import copies
from tests.asynchronous.test_equals_reference import OPTIMIZERS, close, compare

WEIGHTS = ["stash", "vertical-sync", "2bw"]
SGD = OPTIMIZERS["momentum"]


def matrix(seed: int, name: str, trainable: bool = True) -> tf.Variable:
    return tf.Variable(normal(WIDTH, WIDTH, seed) * 0.6, name=name, trainable=trainable)


def network(
    layers: Sequence[Callable[[Any], Any]],
    stages: Sequence[Sequence[tf.Variable]],
    starts: Sequence[int],
    loss: Callable[[Any, Any], Any] = lambda x, y: tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1)),
    state: Sequence[tf.Variable] = (),
    batch: Callable[..., Any] = rows,
) -> Network:
    """A chain of ``layers``, cut before those with the numbers ``starts``."""

    def loss_fn(x: Any, y: Any) -> Any:
        for i, layer in enumerate(layers):
            with tf.name_scope(f"layer{i}"):
                x = layer(x)
        return loss(x, y)

    return Network(loss_fn, stages, [f"layer{i}" for i in starts], batch, state)


def tanh(w: tf.Variable) -> Callable[[Any], Any]:
    return lambda x: tf.tanh(x @ w)


def three() -> tuple[tf.Variable, ...]:
    return tuple(matrix(i, f"w{i}") for i in range(3))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_that_one_stage_uses_twice(weights: str) -> None:
    a, b, c = three()
    net = network([tanh(a), tanh(b), tanh(a), tanh(c)], [[a, b], [c]], [3])
    compare(net, SGD, 5, net.batch(17), weights=weights)


@pytest.mark.parametrize("replicas", [None, [2, 1, 1], [1, 2, 1]])
def test_a_stage_whose_weights_are_frozen(replicas: list[int] | None) -> None:
    a, _, c = three()
    frozen = matrix(5, "frozen", trainable=False)
    net = network([tanh(a), tanh(frozen), tanh(c)], [[a], [], [c]], [1, 2], state=[frozen])
    compare(net, SGD, 6, net.batch(15), replicas=replicas)


@pytest.mark.parametrize(
    ("weights", "replicas"),
    [("stash", None), ("stash", [2, 1]), ("stash", [1, 2]), ("vertical-sync", [2, 2]), ("2bw", None), ("2bw", [2, 1])],
)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_moving_average_of_trained_weights(weights: str, replicas: list[int] | None, stage: int) -> None:
    """Forward writes it once a minibatch, from the version of the weights that this minibatch uses."""
    net = moving_average(stage)
    compare(net, SGD, 8, net.batch(40), net.batch(33, 2), weights=weights, replicas=replicas)


@pytest.mark.filterwarnings("ignore:the loss of loss_fn is a sum over the batch")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_losses_that_are_sums(weights: str) -> None:
    a, b, _ = three()
    net = network([tanh(a), tanh(b)], [[a], [b]], [1], loss=lambda x, y: tf.reduce_sum(tf.square(x - y)))
    compare(net, SGD, 5, net.batch(17), weights=weights)


@pytest.mark.parametrize(
    ("weights", "replicas"),
    [("stash", None), ("stash", [2, 1]), ("vertical-sync", None), ("2bw", None), ("2bw", [2, 1])],
)
def test_means_over_the_unmasked_elements_of_a_minibatch(weights: str, replicas: list[int] | None) -> None:
    """The divisor is that of the minibatch, not of the window and not of a micro-batch."""
    a, b, _ = three()

    def masked(x: Any, y: Any) -> Any:
        mask = tf.cast(y > 0, tf.float64)
        return tf.reduce_sum(mask * tf.square(x - y)) / (tf.reduce_sum(mask) + 1)

    net = network([tanh(a), tanh(b)], [[a], [b]], [1], loss=masked)
    compare(net, SGD, 4, net.batch(37), weights=weights, replicas=replicas)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_several_tensors_cross_and_skip_stages(weights: str) -> None:
    """Of three tensors of stage 0, one goes to stage 1, one to stage 2 and one to both; one is of integers."""
    a, b, c = three()

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("layer0"):
            first = tf.tanh(x @ a)
            second, sign = first * x, tf.cast(first > 0, tf.int32)
        with tf.name_scope("layer1"):
            third = tf.tanh((first + second) @ b)
        with tf.name_scope("layer2"):
            fourth = tf.tanh((third + second) @ c) * tf.cast(sign + 1, tf.float64) + first
        return tf.reduce_mean(tf.reduce_sum(tf.square(fourth - y), 1))

    net = Network(loss_fn, [[a], [b], [c]], ["layer1", "layer2"], rows)
    compare(net, SGD, 5, net.batch(19), weights=weights)


@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [2, 2], [3, 2]])
def test_2bw_with_replicas_and_uneven_rows(replicas: list[int]) -> None:
    net = dense([1, 1])
    compare(net, SGD, 6, net.batch(50), net.batch(61, 2), weights="2bw", replicas=replicas, micro_batches=2)


@pytest.mark.parametrize(("weights", "replicas"), [("stash", [2, 1]), ("vertical-sync", None), ("2bw", [2, 1])])
def test_integer_inputs(weights: str, replicas: list[int] | None) -> None:
    """Ids select rows of a table by a matrix of ones and zeros, and labels are integers."""
    table, b = tf.Variable(normal(7, WIDTH, 3), name="table"), matrix(1, "w")

    def batch(size: int, seed: int = 1) -> Any:
        random = np.random.default_rng(seed)
        return tf.constant(random.integers(0, 7, (size, 2))), tf.constant(random.integers(0, WIDTH, size))

    def loss_fn(ids: Any, labels: Any) -> Any:
        with tf.name_scope("layer0"):
            x = tf.reduce_mean(tf.one_hot(ids, 7, dtype=tf.float64) @ table, 1)
        with tf.name_scope("layer1"):
            logits = x @ b
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    net = Network(loss_fn, [[table], [b]], ["layer1"], batch)
    compare(net, SGD, 4, net.batch(26), weights=weights, replicas=replicas)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_layers_that_backward_computes_again(weights: str) -> None:
    """Backward reads the weights then, so it must read those of its forward."""
    net = dense([2, 1, 1])
    compare(net, SGD, 6, net.batch(20), weights=weights, recompute=True)


@pytest.mark.parametrize(("weights", "replicas"), [("stash", None), ("stash", [2, 1]), ("2bw", None)])
def test_a_while_loop_that_reads_weights_inside(weights: str, replicas: list[int] | None) -> None:
    keras.utils.set_random_seed(1)
    entry = keras.Input((3, WIDTH), dtype="float64")
    layers = [
        keras.layers.GRU(WIDTH, dtype="float64", name="gru", return_sequences=True),
        keras.layers.LSTM(WIDTH, dtype="float64", name="lstm"),
    ]
    model = keras.Sequential([entry, *layers], name="model")

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.reduce_sum(tf.square(model(x, training=True) - y), 1))

    def batch(size: int, seed: int = 1) -> Any:
        return tf.reshape(normal(size * 3, WIDTH, seed), (size, 3, WIDTH)), normal(size, WIDTH, seed + 100)

    net = Network(loss_fn, [layer.trainable_variables for layer in layers], ["lstm"], batch)
    compare(net, SGD, 4, net.batch(18), weights=weights, replicas=replicas)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_stages_that_xla_compiles(weights: str) -> None:
    net = dense([1, 1, 1])
    compare(net, OPTIMIZERS["sgd"], 4, net.batch(24), weights=weights, jit_compile=True)


@pytest.mark.parametrize(("weights", "replicas"), [("stash", None), ("stash", [2, 1]), ("2bw", [1, 2])])
def test_a_scale_that_two_stages_read_and_forward_advances(weights: str, replicas: list[int] | None) -> None:
    a, b, _ = three()
    scale = tf.Variable(1.0, dtype=tf.float64, trainable=False, name="scale")

    def first(x: Any) -> Any:
        scale.assign(scale * 0.9)
        return tf.tanh(x @ a) * scale

    net = network([first, lambda x: tf.tanh(x @ b) * scale], [[a], [b]], [1], state=[scale])
    compare(net, SGD, 4, net.batch(22), net.batch(21, 2), weights=weights, replicas=replicas)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_penalty_on_the_weights_of_each_stage(weights: str) -> None:
    """The penalty of stage 0 does not depend on the batch, and crosses to the stage of the loss."""
    a, b, _ = three()

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("layer0"):
            x = tf.tanh(x @ a)
            penalty = tf.reduce_sum(tf.square(a))
        with tf.name_scope("layer1"):
            x = tf.tanh(x @ b)
            penalty = penalty + tf.reduce_sum(tf.square(b))
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1)) + 0.01 * penalty

    net = Network(loss_fn, [[a], [b]], ["layer1"], rows)
    compare(net, SGD, 5, net.batch(17), weights=weights)


@pytest.mark.parametrize("attempt", range(4))
def test_a_window_of_one_minibatch_updates_no_weights_that_backward_still_reads(attempt: int) -> None:
    """Each stage function is called once: inlined, it computed gradients of inputs by weights after their update."""
    net = dense([2, 1, 2, 2, 2], [1] * 10)
    compare(net, OPTIMIZERS["adamw"], 1, net.batch(1), net.batch(1, 2))


def test_an_aux_output_of_a_window_of_one_minibatch_reads_the_weights_before_their_update() -> None:
    """No gradient and no other output depends on what it reads."""
    a, b, _ = three()

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("layer0"):
            x = tf.tanh(x @ a)
            size = tf.reduce_sum(tf.cos(a))
        with tf.name_scope("layer1"):
            x = tf.tanh(x @ b)
        return tf.reduce_mean(tf.square(x - y)), size

    options: dict[str, Any] = {"stages": ["layer1"], "mode": "async", "minibatches": 1}
    step = dapple.pipeline(loss_fn, optimizer=SGD(), **options)
    for seed in range(5):
        before = np.sum(np.cos(a.numpy()))
        _, size = step(*rows(8, seed))
        close("aux", size.numpy(), before)


def test_one_stage_of_replicas() -> None:
    net = dense([2])
    compare(net, SGD, 6, net.batch(19), replicas=[3])


@pytest.mark.parametrize(("weights", "replicas"), [("stash", None), ("stash", [2, 1]), ("2bw", [2, 1])])
def test_aux_outputs_of_all_kinds(weights: str, replicas: list[int] | None) -> None:
    """Per window: rows in order, the mean of the minibatches' means, the sum of counts, what the first one gives."""
    a, b, _ = three()

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("layer0"):
            hidden = tf.tanh(x @ a)
        with tf.name_scope("layer1"):
            output = tf.tanh(hidden @ b)
        error = tf.reduce_sum(tf.square(output - y), 1)
        aux = {
            "rows": output,
            "mean": tf.reduce_mean(tf.abs(output - y)),
            "count": tf.reduce_sum(tf.cast(output > y, tf.int32)),
            "constant": tf.constant([3.0, 4.0]),
        }
        return tf.reduce_mean(error), aux

    minibatches, batch = 4, rows(28)
    optimizer = keras.optimizers.SGD(0.0)  # all versions are equal
    step = dapple.pipeline(
        loss_fn,
        optimizer=optimizer,
        stages=["layer1"],
        mode="async",
        minibatches=minibatches,
        weights=weights,
        replicas=replicas,
    )
    before = copies([a, b])
    loss, aux = step(*batch)
    parts = [loss_fn(*(tensor[7 * m : 7 * m + 7] for tensor in batch)) for m in range(minibatches)]
    close("loss", loss.numpy(), np.mean([float(part) for part, _ in parts]))
    close("rows", aux["rows"].numpy(), np.concatenate([part["rows"] for _, part in parts]))
    close("mean", aux["mean"].numpy(), np.mean([part["mean"] for _, part in parts]))
    assert int(aux["count"]) == sum(int(part["count"]) for _, part in parts)
    assert list(aux["constant"].numpy()) == [3, 4]
    for variable, value in itertools.zip_longest([a, b], before):
        close(variable.name, variable.numpy(), value)
