"""Variables that the loss itself writes for each minibatch: every stage sees the values of its own minibatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import CaptureError, ExactnessError, PlanError
from tests.asynchronous.networks import WIDTH, Network, normal, rows
from tests.asynchronous.test_equals_reference import OPTIMIZERS, compare

SGD = OPTIMIZERS["momentum"]


def network(stages: Callable[[Any], tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[], Any]]]) -> Network:
    """Two stages of a matrix each; ``stages`` gives what they do to its product, and the end, from the scale."""
    a, b = (tf.Variable(normal(WIDTH, WIDTH, i) * 0.6, name=f"w{i}") for i in range(2))
    scale = tf.Variable(1.0, dtype=tf.float64, trainable=False, name="scale")
    first, second, end = stages(scale)

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("layer0"):
            x = first(tf.tanh(x @ a))
        with tf.name_scope("layer1"):
            x = tf.tanh(second(x) @ b)
        loss = tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))
        end()
        return loss

    return Network(loss_fn, [[a], [b]], ["layer1"], rows, [scale])


def advance(scale: Any) -> Any:
    return scale.assign(scale * 0.9)


def loop(x: Any, scale: Any) -> Any:
    return tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, tf.tanh(v * scale)), [0, x])[1]


def in_the_end(scale: Any) -> Any:
    """Return stages that read the scale before the end of the loss advances it."""

    def scaled(x: Any) -> Any:
        return x * scale

    return scaled, scaled, lambda: advance(scale)


def in_a_loop_of(stage: int, *, written: bool) -> Callable[[Any], Any]:
    """Return stages of which one reads the scale in a loop, after stage 0 has ``written`` it or before the end does."""

    def stages(scale: Any) -> Any:
        def first(x: Any) -> Any:
            if written:
                advance(scale)
            return loop(x, scale) if stage == 0 else x * scale

        return first, lambda x: loop(x, scale) if stage == 1 else x, lambda: None if written else advance(scale)

    return stages


@pytest.mark.parametrize(
    ("weights", "replicas"),
    [
        ("stash", None),
        ("vertical-sync", None),
        ("2bw", None),
        ("stash", [2, 1]),
        ("stash", [1, 2]),
    ],
)
def test_a_scale_that_two_stages_read_before_the_loss_advances_it(weights: str, replicas: list[int] | None) -> None:
    """The stage that does not own it advances its copy too."""
    net = network(in_the_end)
    compare(net, SGD, 4, net.batch(22), net.batch(21, 2), weights=weights, replicas=replicas)


@pytest.mark.parametrize(("weights", "replicas"), [("stash", None), ("stash", [2, 1]), ("2bw", [1, 2])])
def test_dropouts_of_two_stages_that_share_a_seed_generator(weights: str, replicas: list[int] | None) -> None:
    """The draw of the first stage does not depend on the second's, which comes after it."""
    seeds = keras.random.SeedGenerator(3)

    def drop(x: Any) -> Any:
        return keras.random.dropout(x, 0.4, seed=seeds)

    net = network(lambda scale: (drop, drop, lambda: advance(scale)))
    net = Network(net.loss_fn, net.stages, net.starts, net.batch, [*net.state, seeds.state])
    compare(net, SGD, 4, net.batch(22), net.batch(21, 2), weights=weights, replicas=replicas)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_loop_reads_what_was_written_before_it(stage: int, recompute: bool) -> None:
    """Backward does not read it again: later minibatches have written it by then."""
    net = network(in_a_loop_of(stage, written=True))
    compare(net, SGD, 4, net.batch(22), net.batch(21, 2), recompute=recompute)


def refused(net: Network, error: type[Exception], said: str, **options: Any) -> None:
    step = dapple.pipeline(
        net.loss_fn, optimizer=SGD(), stages=list(net.starts), mode="async", minibatches=4, **options
    )
    with pytest.raises(error, match=said):
        step(*net.batch(16))


def test_a_loop_that_reads_what_the_end_of_the_loss_writes_is_refused() -> None:
    refused(network(in_a_loop_of(1, written=False)), ExactnessError, "reads scale before the loss writes it")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_loop_of_replicas_that_reads_what_a_later_minibatch_has_written_is_refused(stage: int) -> None:
    net = network(in_a_loop_of(stage, written=True))
    said = f"forward of stage {stage} reads 'scale' in a loop"
    refused(net, PlanError, said, replicas=[2, 1] if stage == 0 else [1, 2])


def test_a_custom_gradient_that_reads_what_a_later_minibatch_has_written_is_refused() -> None:
    def stages(scale: Any) -> Any:
        @tf.custom_gradient
        def scaled(x: Any) -> Any:
            return x * scale, lambda dy: dy * scale

        def first(x: Any) -> Any:
            advance(scale)
            return scaled(x)

        return first, lambda x: x, lambda: None

    refused(network(stages), CaptureError, "a custom gradient reads the variable 'scale', which is written before")


def test_a_recomputation_that_reads_what_a_later_minibatch_has_written_is_refused() -> None:
    def stages(scale: Any) -> Any:
        def first(x: Any) -> Any:
            advance(scale)
            return tf.recompute_grad(lambda x: x * scale)(x)

        return first, lambda x: x, lambda: None

    refused(network(stages), PlanError, "backward of stage 0 reads 'scale'.*read it outside")


def test_a_loss_that_reads_the_optimizers_step_counter_is_refused() -> None:
    optimizer = SGD()
    net = network(lambda scale: (lambda x: x * tf.cast(optimizer.iterations.value + 1, x.dtype), lambda x: x, list))
    optimizer.build(list(net.variables))
    step = dapple.pipeline(net.loss_fn, optimizer=optimizer, stages=list(net.starts), mode="async", minibatches=4)
    with pytest.raises(PlanError, match=r"the loss reads the optimizer's step counter.*a variable of your own"):
        step(*net.batch(16))
