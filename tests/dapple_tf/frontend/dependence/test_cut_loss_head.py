"""Where a loss that combines samples is cut: after the last rows that depend on variables, and on one sample each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from dapple_tf.errors import ExactnessError
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.trace import trace_loss
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.graph_passes.analysis.loss_head import find_head_inputs, find_loss_head

WIDTH = 3


def weight() -> tf.Variable:
    return tf.Variable(tf.eye(WIDTH, dtype=tf.float64))


def traced(loss_fn: Callable[..., Any], **options: Any) -> Captured:
    batch = (tf.zeros((8, WIDTH), tf.float64), tf.zeros((8,), tf.int32))
    return trace_loss(loss_fn, batch, 8, **{"batch_loss": True, **options})


def crossing(captured: Captured) -> list[tuple[str, int, int]]:
    """Return the op of each tensor that the loss head takes, its axis and its blocks."""
    graph = captured.graph
    return [(graph.node(entry.value.node).op, entry.axis, entry.outer) for entry in find_head_inputs(graph)]


def ops_of_loss_head(captured: Captured) -> set[str]:
    return {captured.graph.node(name).op for name in find_loss_head(captured.graph)}


def test_scores_of_all_pairs_are_cut_before_the_product() -> None:
    w = weight()

    def loss_fn(x: Any, y: Any) -> Any:
        z = tf.tanh(x @ w)
        return tf.reduce_mean(tf.nn.softmax(z @ tf.transpose(z)))

    captured = traced(loss_fn)
    assert crossing(captured) == [("Tanh", 0, 1)]
    assert {"MatMul", "Softmax", "Mean", "Transpose"} <= ops_of_loss_head(captured)
    assert [layer.name for layer in find_layers(captured.graph).layers][-1] == "Tanh"
    assert not captured.dependence.exactness.reasons


def test_labels_are_computed_in_the_loss_head_and_do_not_cross() -> None:
    w = weight()

    def loss_fn(x: Any, y: Any) -> Any:
        wanted = tf.one_hot(y, WIDTH, dtype=tf.float64)
        p = tf.nn.softmax(x @ w)
        return 1.0 - tf.reduce_sum(p * wanted) / tf.reduce_sum(p)

    captured = traced(loss_fn)
    assert crossing(captured) == [("Softmax", 0, 1), ("Mul", 0, 1)]


def test_a_frozen_model_is_computed_in_micro_batches_too() -> None:
    w, frozen = weight(), tf.Variable(tf.eye(WIDTH, dtype=tf.float64), trainable=False)

    def loss_fn(x: Any, y: Any) -> Any:
        return tf.reduce_sum(tf.matmul(x @ w, tf.tanh(x @ frozen), transpose_b=True) ** 2)

    assert crossing(traced(loss_fn)) == [("MatMul", 0, 1), ("Tanh", 0, 1)]


def test_two_views_in_one_tensor_have_two_blocks_of_samples() -> None:
    w = weight()

    def loss_fn(x: Any, y: Any) -> Any:
        z = tf.tanh(tf.concat([x, 2.0 * x], 0) @ w)
        return tf.math.log(tf.reduce_mean(tf.exp(z @ tf.transpose(z))))

    assert crossing(traced(loss_fn)) == [("Tanh", 0, 2)]


def test_the_batch_may_be_on_another_axis() -> None:
    w = weight()

    def loss_fn(x: Any, y: Any) -> Any:
        z = tf.tanh(tf.matmul(w, x, transpose_b=True))
        return tf.sqrt(tf.reduce_sum(tf.matmul(z, z, transpose_b=True)))

    assert crossing(traced(loss_fn)) == [("Tanh", 1, 1)]


def test_auto_cuts_only_what_does_not_add_up() -> None:
    w = weight()
    mean = traced(lambda x, y: tf.reduce_mean(tf.square(x @ w)), batch_loss="auto")
    root = traced(lambda x, y: tf.sqrt(tf.reduce_mean(tf.square(x @ w))), batch_loss="auto")
    assert not find_loss_head(mean.graph)
    assert crossing(root) == [("Square", 0, 1)]


def test_a_write_of_the_whole_batchs_loss_is_in_the_loss_head() -> None:
    w, kept = weight(), tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def loss_fn(x: Any, y: Any) -> Any:
        loss = tf.sqrt(tf.reduce_mean(tf.square(x @ w)))
        kept.assign(loss)
        return loss

    captured = traced(loss_fn)
    assert "AssignVariableOp" in ops_of_loss_head(captured)
    assert not captured.stateful


def test_a_loss_in_which_no_variable_treats_samples_one_by_one_is_still_refused() -> None:
    w = weight()

    def loss_fn(x: Any, y: Any) -> Any:
        by_position = tf.gather(w, tf.range(tf.shape(x)[0]))
        return tf.reduce_mean(tf.square(x[:, :1] * by_position))

    with pytest.raises(ExactnessError, match="no sum or mean over samples") as refused:
        traced(loss_fn)
    assert "batch_loss" not in str(refused.value)  # it was given, and does not help


@pytest.mark.parametrize("batch_loss", [False, "auto", True])
def test_no_loss_head_without_need_or_wish(batch_loss: Any) -> None:
    w = weight()
    captured = traced(lambda x, y: tf.reduce_mean(tf.square(x @ w)), batch_loss=batch_loss)
    assert bool(find_loss_head(captured.graph)) == (batch_loss is True)
