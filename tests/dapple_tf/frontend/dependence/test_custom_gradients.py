"""Custom gradients: those that treat samples one by one are exact, others are refused."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from dapple_tf.frontend.dependence.kinds import Form
from tests.dapple_tf.frontend.dependence.evaluation import Batch, Compute, decide, kind_of


def with_gradient(backward: Any) -> Any:
    """Return the identity with another gradient."""

    @tf.custom_gradient
    def identity(x: Any) -> Any:
        return tf.identity(x), backward

    return identity


HALF = tf.constant(0.5, tf.float64)
REVERSED = with_gradient(lambda dy: -dy)
CLIPPED = with_gradient(lambda dy: tf.clip_by_value(dy, -0.1, 0.1))
BY_NORM = with_gradient(lambda dy: tf.clip_by_norm(dy, 0.1))
CENTERED = with_gradient(lambda dy: dy - tf.reduce_mean(dy, 0))
SIGN = with_gradient(tf.sign)


@pytest.mark.parametrize(
    "compute",
    [
        lambda b: REVERSED(b.z),
        lambda b: CLIPPED(b.z),
        lambda b: keras.ops.silu(b.z),
        lambda b: tf.nn.silu(b.z),
        lambda b: tf.recompute_grad(lambda z: tf.tanh(z @ tf.eye(4, dtype=tf.float64)))(b.z),
        lambda b: with_gradient(lambda dy: dy * b.x)(b.z),
        lambda b: with_gradient(lambda dy: dy * HALF)(b.z),
        lambda b: b.z * with_gradient(lambda dy: tf.zeros([4], tf.float64))(b.w + 0.0),
        lambda b: b.z * REVERSED(b.w + 0.0),
    ],
)
def test_gradients_of_samples_one_by_one_are_exact(compute: Compute) -> None:
    assert kind_of(compute).form is Form.ROWS


@pytest.mark.parametrize(
    "compute",
    [
        lambda b: BY_NORM(b.z),
        lambda b: CENTERED(b.z),
        lambda b: b.z * SIGN(b.w + 0.0),
        lambda b: b.z * BY_NORM(b.w + 0.0),
        lambda b: SIGN(tf.reduce_mean(b.z)),
    ],
)
def test_gradients_that_combine_samples_are_refused(compute: Compute) -> None:
    kind = kind_of(compute)
    assert kind.coupled, kind
    assert "custom gradient" in kind.why


def test_a_custom_gradient_of_what_is_not_trained_does_not_matter() -> None:
    assert not kind_of(lambda b: BY_NORM(b.x)).coupled


def test_a_loss_with_a_reversed_gradient_is_exact() -> None:
    def compute(b: Batch) -> Any:
        return tf.reduce_mean(REVERSED(b.z)) + REVERSED(tf.reduce_mean(b.z))

    assert decide(compute).exactness


def ctc(b: Batch, labels: Any) -> Any:
    """Return a loss of labels whose unique values, ``labels``, only its gradient uses."""
    logits = tf.reshape(tf.cast(tf.repeat(b.z, 5, 1), tf.float32), [-1, 5, 4])
    lengths, unique = tf.fill([b.n], 1), (labels[:, tf.newaxis], tf.zeros_like(b.y)[:, tf.newaxis])
    return tf.nn.ctc_loss(
        b.y[:, tf.newaxis], logits, lengths, 5 * lengths, logits_time_major=False, unique=unique, blank_index=-1
    )


def test_a_gradient_of_tensorflow_that_captures_combined_samples_is_refused() -> None:
    assert kind_of(lambda b: ctc(b, b.y)).form is Form.ROWS
    kind = kind_of(lambda b: ctc(b, tf.cast(tf.sort(b.z[:, 0]) > 0, tf.int32)))
    assert "custom gradient" in kind.why
