"""Predicted bytes of small models, counted by hand."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import DappleWarning, StepError
from dapple_tf.memory.predict import StageMemory
from dapple_tf.memory.stash import StashedTensor
from dapple_tf.runtime.step import PipelinedStep

ROWS, WIDTH = 6, 8  # samples of a micro-batch, and the width of each layer
TENSOR, KERNEL, BIAS = ROWS * WIDTH * 4, WIDTH * WIDTH * 4, WIDTH * 4


def dense(layers: int = 4, micro_batches: int = 4, **options: Any) -> tuple[PipelinedStep, tf.Tensor]:
    """A pipeline of dense layers with relu, and a batch."""
    stack = [keras.layers.Dense(WIDTH, activation="relu", name=f"d{i}") for i in range(layers)]
    model = keras.Sequential([keras.Input((WIDTH,)), *stack])
    options = {"optimizer": keras.optimizers.SGD(0.1), "stages": ["d2"], "schedule": "dapple-a", **options}
    batch = tf.constant(np.ones((ROWS * micro_batches, WIDTH), np.float32))
    step = dapple.pipeline(
        lambda x: tf.reduce_mean(tf.square(model(x))), micro_batches=micro_batches, example_batch=(batch,), **options
    )
    return step, batch


def predicted(*args: Any, **options: Any) -> list[StageMemory]:
    step, _ = dense(*args, **options)
    return [stage.predicted for stage in step.report.stages]


def test_weights_gradients_and_slots() -> None:
    weights = 2 * (KERNEL + BIAS)
    for stage in predicted():
        assert (stage.weights, stage.gradients, stage.slots, stage.copies) == (weights, weights, 0, 0)
    for stage in predicted(optimizer=keras.optimizers.SGD(0.1, momentum=0.9)):
        assert (stage.slots, stage.fixed) == (weights, 3 * weights)
    for stage in predicted(optimizer=keras.optimizers.Adam()):
        assert stage.slots == 2 * weights


def test_a_single_micro_batch_has_no_sums() -> None:
    """Its gradients are what the backward function gives, and count there."""
    for stage in predicted(micro_batches=1):
        assert stage.gradients == 0
        assert stage.working["B"] >= 2 * (KERNEL + BIAS)
        assert stage.update >= 2 * (KERNEL + BIAS)


def test_the_stash_is_what_backward_reads() -> None:
    """The first stage keeps the results of its two relus; the second its own, and the tensor that entered it."""
    first, second = predicted()
    assert first.stash == 2 * TENSOR
    assert [piece for piece in second.stashed if piece.origin == "previous stage"] == [
        StashedTensor("previous stage", "B", TENSOR, second.stashed[0].name)
    ]
    whole = [piece.bytes for piece in second.stashed if piece.bytes >= TENSOR and piece.origin == "F"]
    assert whole == [TENSOR, TENSOR]
    assert 0 <= second.stash - 3 * TENSOR < 100  # and a few whole numbers for the mean's gradient


def test_what_is_held_while_a_backward_runs() -> None:
    """K stashes, the gradient that came, the gradients of weights, and the chain of gradients at its widest."""
    first, second = predicted()
    weights = 2 * (KERNEL + BIAS)
    assert (first.in_flight, second.in_flight) == (2, 1)
    assert weights < first.working["B"] <= weights + 3 * TENSOR
    assert first.in_step == 2 * first.stash + TENSOR + first.working["B"]
    assert second.waiting == TENSOR
    assert second.in_step == second.stash + TENSOR + second.working["B"]  # one tensor more has come
    assert first.peak == first.fixed + first.in_step


def test_more_micro_batches_take_more_only_under_gpipe() -> None:
    for schedule in ("dapple-a", "dapple-b"):
        few, many = predicted(micro_batches=4, schedule=schedule), predicted(micro_batches=16, schedule=schedule)
        assert [stage.in_step for stage in few] == [stage.in_step for stage in many]
    few, many = predicted(micro_batches=4, schedule="gpipe"), predicted(micro_batches=16, schedule="gpipe")
    for before, after in zip(few, many, strict=True):
        assert after.in_step - before.in_step >= 12 * before.stash


def test_replicas_hold_a_share_of_each_micro_batch() -> None:
    first, second = predicted(replicas=[2, 1])
    alone, _ = predicted()
    assert first.stash == alone.stash // 2
    assert first.weights == alone.weights
    assert first.update == alone.update + first.gradients  # their sum
    assert second.stash > 2 * first.stash


def in_pairs(samples: int, **options: Any) -> tuple[PipelinedStep, tf.Tensor]:
    """A pipeline whose second stage takes its samples in pairs, and a batch."""
    first, second = (tf.Variable(tf.random.normal([WIDTH, WIDTH], seed=i), name=f"w{i}") for i in range(2))

    def loss_fn(x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("alone"):
            h = tf.tanh(x @ first)
        with tf.name_scope("pairs"):
            return tf.reduce_mean(tf.tanh(tf.reshape(h, [-1, 2, WIDTH]) @ second))

    batch = tf.ones([samples, WIDTH])
    options = {"optimizer": keras.optimizers.SGD(0.1), "stages": ["pairs"], "example_batch": (batch,), **options}
    return dapple.pipeline(loss_fn, **options), batch


def test_each_stage_is_predicted_for_its_own_share_of_a_micro_batch() -> None:
    """The second stage would refuse the one sample that a replica of the first has."""
    step, batch = in_pairs(8, micro_batches=4, replicas=[2, 1])
    step(batch)
    first, second = [stage.predicted for stage in step.report.stages]
    assert first.stash == WIDTH * 4  # what tanh gave
    assert [piece.bytes for piece in second.stashed if piece.origin == "previous stage"] == [2 * WIDTH * 4]


def test_a_model_that_refuses_its_samples_says_so_itself() -> None:
    step, batch = in_pairs(6, micro_batches=2)
    assert step.report.stages[0].predicted.stash == 3 * WIDTH * 4
    with pytest.raises(StepError, match="stage 1"):
        step(batch)


def test_clipping_by_the_global_norm_makes_gradients_anew() -> None:
    clipped, _ = predicted(optimizer=keras.optimizers.SGD(0.1, global_clipnorm=1.0))
    plain, _ = predicted()
    assert clipped.update == plain.update + plain.gradients


def test_state_that_forward_writes_is_copied() -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.BatchNormalization(name="norm")])
    head = keras.layers.Dense(WIDTH, name="head")
    batch = tf.ones([8, WIDTH])
    step = dapple.pipeline(
        lambda x: tf.reduce_mean(head(model(x, training=True))),
        optimizer=keras.optimizers.SGD(0.1),
        stages=["head"],
        micro_batches=2,
        example_batch=(batch,),
    )
    first, second = [stage.predicted for stage in step.report.stages]
    assert (first.weights, first.copies) == (4 * BIAS, 2 * BIAS)  # scale, offset; and the two moving averages
    assert second.copies == 0


@pytest.mark.parametrize("kind", ["gru", "lookup", "mask"])
def test_other_models_are_predicted_too(kind: str) -> None:
    """Loops, whose insides are not seen; whole numbers; lengths that only the run tells."""
    batch: Any = tf.ones([8, 5], tf.int32) if kind == "lookup" else tf.ones([8, 5, 4])
    layers = {
        "gru": [keras.layers.Dense(2, name="a"), keras.layers.GRU(3, name="b", return_sequences=True)],
        "lookup": [keras.layers.Embedding(7, 3, name="a"), keras.layers.Dense(2, name="b")],
        "mask": [keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")],
    }[kind]
    model = keras.Sequential([keras.Input(batch.shape[1:], dtype=batch.dtype), *layers])

    def loss(x: tf.Tensor) -> tf.Tensor:
        result = tf.boolean_mask(model(x), tf.reduce_all(x > 0, [1, 2])) if kind == "mask" else model(x)
        return tf.reduce_mean(tf.square(result))

    options = {"optimizer": keras.optimizers.SGD(0.1), "micro_batches": 2, "example_batch": (batch,)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DappleWarning)  # of means that depend on the data: nothing is trained here
        step = dapple.pipeline(loss, stages=["b"], **options)
    assert all(stage.predicted.in_step > 0 for stage in step.report.stages)
