"""Bytes and roofline seconds of every layer, computed by hand (float32: 4 bytes an element)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.frontend.capture import capture
from dapple_tf.profiler.peaks import Peak
from dapple_tf.profiling.layer_facts import LayerFacts, examine_layers

N = 4
X = np.ones((N, 3), np.float32)


def facts(loss: Callable[..., Any], *batch: Any, size: int = N) -> LayerFacts:
    return examine_layers(capture(loss, batch or (X,)), size)


def matrix(rows: int, columns: int) -> tf.Variable:
    return tf.Variable(tf.ones((rows, columns)))


def ops(found: LayerFacts) -> list[str]:
    return [found.captured.graph.node(layer.nodes[0]).op for layer in found.layers.layers]


def test_a_dense_model() -> None:
    a, b = matrix(3, 5), matrix(5, 2)
    found = facts(lambda x: tf.reduce_mean(tf.square(tf.tanh(x @ a) @ b)))
    assert ops(found) == ["MatMul", "Tanh", "MatMul", "Square", "Mean"]
    assert found.activation_bytes == (N * 5 * 4, N * 5 * 4, N * 2 * 4, N * 2 * 4, 0)
    # The first product's gradient needs x. Those of tanh and of the second product need tanh's output, which counts
    # once, at tanh. The square's needs its input; the mean's only a shape.
    assert found.stash_bytes == (N * 3 * 4, N * 5 * 4, 0, N * 2 * 4, 0)
    assert found.parameter_bytes == (3 * 5 * 4, 0, 5 * 2 * 4, 0, 0)
    assert found.uncuttable == ()
    assert found.unsplittable == ()
    assert found.lists == ()


def test_the_term_of_a_regularizer_crosses_the_cuts() -> None:
    a, b = matrix(3, 5), matrix(5, 2)
    found = facts(lambda x: tf.reduce_mean(tf.square(tf.tanh(x @ a) @ b)) + tf.nn.l2_loss(a) + tf.nn.l2_loss(b))
    assert ops(found) == ["MatMul", "Tanh", "MatMul", "Square", "Mean", "AddV2", "AddV2"]
    # Besides the activations: one number after the first product, and another after the second.
    sent = (N * 5 * 4 + 4, N * 5 * 4 + 4, N * 2 * 4 + 8, N * 2 * 4 + 8, 4 + 8, 4 + 4, 0)
    assert found.activation_bytes == sent
    assert found.stash_bytes == (N * 3 * 4, N * 5 * 4, 0, N * 2 * 4, 0, 0, 0)
    assert found.parameter_bytes == (3 * 5 * 4, 0, 5 * 2 * 4, 0, 0, 0, 0)
    assert found.uncuttable == ()
    assert found.unsplittable == (5, 6)


def test_activations_grow_with_the_batch_and_parameters_do_not() -> None:
    a = matrix(3, 5)
    small, large = (facts(lambda x: tf.reduce_mean(tf.tanh(x @ a)), size=size) for size in (2, 20))
    assert large.activation_bytes == tuple(10 * x for x in small.activation_bytes)
    assert large.stash_bytes == tuple(10 * x for x in small.stash_bytes)
    assert large.parameter_bytes == small.parameter_bytes == (60, 0, 0)


def test_a_tied_weight_counts_once_at_its_first_user() -> None:
    a = matrix(3, 5)
    found = facts(lambda x: tf.reduce_mean(tf.matmul(tf.tanh(x @ a), a, transpose_b=True)))
    assert ops(found) == ["MatMul", "Tanh", "MatMul", "Mean"]
    assert found.parameter_bytes == (60, 0, 0, 0)


def test_a_skip_connection_crosses_every_cut_on_its_way() -> None:
    a, b = matrix(3, 5), matrix(5, 5)

    def loss(x: tf.Tensor) -> tf.Tensor:
        first = tf.tanh(x @ a)
        return tf.reduce_mean(first + tf.tanh(first @ b))

    found = facts(loss)
    one = N * 5 * 4
    assert ops(found) == ["MatMul", "Tanh", "MatMul", "Tanh", "AddV2", "Mean"]
    assert found.activation_bytes == (one, one, 2 * one, 2 * one, one, 0)
    assert found.stash_bytes == (N * 3 * 4, one, 0, one, 0, 0)


def test_integers_and_booleans_have_their_own_sizes() -> None:
    a = matrix(3, 3)

    def loss(x: tf.Tensor) -> tf.Tensor:
        chosen = tf.argmax(x, 1)  # int64 [N]
        positive = x > 0  # bool [N, 3]
        y = tf.tanh(x @ a)
        return tf.reduce_mean(tf.where(positive, y, 0.0) * tf.cast(tf.one_hot(chosen, 3), tf.float32))

    found = facts(loss)
    by_op = dict(zip(ops(found), found.activation_bytes, strict=True))
    assert ops(found)[:4] == ["ArgMax", "Greater", "MatMul", "Tanh"]
    assert by_op["ArgMax"] == N * 8
    assert by_op["Greater"] == N * 8 + N * 3
    assert by_op["Tanh"] == N * 8 + N * 3 + N * 3 * 4
    stash = dict(zip(ops(found), found.stash_bytes, strict=True))
    assert stash["SelectV2"] == N * 3  # the condition, whose own op has no backward
    assert stash["OneHot"] == 0


def test_labels_that_backward_does_not_read_are_not_stashed() -> None:
    a, labels = matrix(3, 7), np.zeros(N, np.int32)

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(x @ a - tf.cast(y[:, None], tf.float32)))

    found = facts(loss, X, labels)
    stash = dict(zip(ops(found), found.stash_bytes, strict=True))
    assert stash["MatMul"] == N * 3 * 4
    assert stash["Square"] == N * 7 * 4
    assert sum(found.stash_bytes) == N * 3 * 4 + N * 7 * 4


def test_a_view_is_not_stashed_beside_its_tensor() -> None:
    a, b = matrix(3, 6), matrix(3, 2)

    def loss(x: tf.Tensor) -> tf.Tensor:
        hidden = tf.tanh(x @ a)  # stashed for tanh, and for the product in another shape
        return tf.reduce_mean(tf.reshape(hidden, (-1, 3)) @ b)

    found = facts(loss)
    assert sum(found.stash_bytes) == N * 3 * 4 + N * 6 * 4


def test_frozen_weights_and_those_without_gradient_do_not_count() -> None:
    a, b = matrix(3, 5), matrix(5, 5)
    frozen = tf.Variable(tf.ones((5, 5)), trainable=False)
    found = facts(lambda x: tf.reduce_mean(tf.tanh(x @ a) @ frozen + 0 * tf.stop_gradient(tf.reduce_sum(b))))
    assert sum(found.parameter_bytes) == 3 * 5 * 4


def test_mixed_precision_counts_parameters_in_float32_and_activations_in_bfloat16() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, "tanh", dtype="mixed_bfloat16")], name="net")
    found = facts(lambda x: tf.reduce_mean(tf.cast(model(x), tf.float32)))
    dense = next(i for i, name in enumerate(found.names) if name.endswith("dense") or "dense" in name)
    assert sum(found.parameter_bytes) == found.parameter_bytes[dense] == (3 * 5 + 5) * 4
    assert found.activation_bytes[dense] == N * 5 * 2


@pytest.mark.parametrize("frozen", [False, True])
def test_roofline_seconds_of_forward_and_backward(frozen: bool) -> None:
    # One FLOP a second and infinite memory: seconds are FLOPs. Forward: two products of 2 N 3 5 and 2 N 5 2. Backward
    # of the first: its weight's gradient only (x takes none); of the second: both, or only its input's.
    a, b = matrix(3, 5), tf.Variable(tf.ones((5, 2)), trainable=not frozen)
    found = facts(lambda x: tf.reduce_mean(tf.tanh(x @ a) @ b))
    peak = Peak("p", 1.0, float("inf"), 0.0, 1.0)
    assert found.forward_seconds(peak).tolist() == [2 * N * 3 * 5, 0, 2 * N * 5 * 2, 0]
    assert found.backward_seconds(peak).tolist() == [2 * N * 3 * 5, 0, 2 * N * 5 * 2 * (1 if frozen else 2), 0]


def test_backward_of_a_convolution_repeats_its_products_for_each_gradient() -> None:
    first, second = tf.Variable(tf.ones((3, 3, 2, 4))), tf.Variable(tf.ones((3, 3, 4, 5)))
    images = np.ones((N, 6, 6, 2), np.float32)

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.nn.conv2d(tf.nn.conv2d(x, first, 1, "SAME"), second, 2, "SAME"))

    found = facts(loss, images)
    peak = Peak("p", 1.0, float("inf"), 0.0, 1.0)
    one, two = 2 * N * 36 * 4 * 9 * 2, 2 * N * 9 * 5 * 9 * 4
    assert found.forward_seconds(peak).tolist() == [one, two, 0]
    assert found.backward_seconds(peak).tolist() == [one, 2 * two, 0]


def test_memory_bound_ops_take_the_time_of_their_reads_and_writes() -> None:
    a = matrix(3, 5)
    found = facts(lambda x: tf.reduce_mean(tf.tanh(x @ a)))
    peak = Peak("p", float("inf"), 1.0, 0.0, 1.0)
    product = (N * 3 + 3 * 5 + N * 5) * 4
    assert found.forward_seconds(peak)[:2].tolist() == [product, 2 * N * 5 * 4]


def test_a_loop_that_stashes_lists_is_named() -> None:
    a = matrix(3, 3)

    def loss(x: tf.Tensor) -> tf.Tensor:
        y, _ = tf.while_loop(
            lambda y, i: i < 3, lambda y, i: (tf.tanh(y @ a), i + 1), (x @ a, tf.constant(0)), maximum_iterations=5
        )
        return tf.reduce_mean(y)

    found = facts(loss)
    (loop,) = [name for name, op in zip(found.names, ops(found), strict=True) if "While" in op]
    assert found.lists == (loop,)
    assert sum(found.parameter_bytes) == 3 * 3 * 4


def test_random_tensors_are_stashed_and_tensors_of_weights_alone_are_not() -> None:
    a, scale = matrix(3, 5), tf.Variable(2.0)

    def loss(x: tf.Tensor) -> tf.Tensor:
        mask = tf.random.uniform((tf.shape(x)[0], 5))
        fixed = tf.random.stateless_uniform((tf.shape(x)[0], 5), (1, 2))
        return tf.reduce_mean((x @ a) * mask * fixed * tf.exp(scale))

    found = facts(loss)
    one = N * 5 * 4
    # x, mask and fixed as factors; (x @ a) * mask * fixed for the gradient of the scale. No gradient needs x @ a, and
    # exp(scale) depends on a weight alone.
    assert sum(found.stash_bytes) == N * 3 * 4 + 3 * one
    assert sum(found.parameter_bytes) == 3 * 5 * 4 + 4
