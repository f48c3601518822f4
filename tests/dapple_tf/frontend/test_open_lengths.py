from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.frontend.batch import batch_signature
from dapple_tf.frontend.open_lengths import open_signature
from dapple_tf.frontend.shapes import infer_batch_axes
from dapple_tf.frontend.trace import trace_loss
from graph_passes.ir.graph import OTHER

BATCH = (np.ones((6, 4)),)
W = tf.Variable(np.ones((3, 2)))
UNKNOWN = tf.TensorSpec([None, None], tf.float64)


def scaled(x: Any) -> Any:
    return tf.reduce_sum(W) * tf.square(x)


def lengths_after(loss: Callable[[Any], Any], spec: tf.TensorSpec = UNKNOWN) -> list[int | None]:
    """Return the axes of the argument in the trace of ``loss``, with ``spec`` as its input signature."""
    function = tf.function(loss, input_signature=[spec])
    signature = open_signature(function, batch_signature(BATCH))
    return list(trace_loss(function, BATCH, 6, signature=signature).signature[0].shape)


@pytest.mark.parametrize(
    ("function", "axes"),
    [
        (tf.function(scaled, input_signature=[UNKNOWN]), [None, None]),
        (tf.function(scaled, input_signature=[tf.TensorSpec([None, 4], tf.float64)]), [None, 4]),
        (tf.function(scaled, input_signature=[tf.TensorSpec(None, tf.float64)]), [None, 4]),  # layers need a rank
        (tf.function(scaled, input_signature=[tf.TensorSpec([None, 5], tf.float64)]), [None, 4]),  # does not fit
        (tf.function(scaled), [None, 4]),
        (scaled, [None, 4]),
    ],
)
def test_lengths_that_the_signature_leaves_open_are_unknown(function: Any, axes: list[int | None]) -> None:
    (spec,) = open_signature(function, batch_signature(BATCH))
    assert list(spec.shape) == axes


def test_a_mean_serves_all_lengths() -> None:
    assert lengths_after(lambda x: tf.reduce_mean(scaled(x))) == [None, None]


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: tf.reduce_sum(scaled(x)) / tf.cast(tf.size(x) + 1, tf.float64),
        lambda x: tf.reduce_mean(
            tf.nn.experimental.stateless_dropout(tf.reshape(scaled(x), [-1]), 0.5, seed=[1, 2])  # rows of 4 tokens
        ),
    ],
    ids=["whole size", "rows of a draw"],
)
def test_a_loss_whose_rewriting_depends_on_a_length_is_traced_for_it(loss: Callable[[Any], Any]) -> None:
    assert lengths_after(loss) == [None, 4]


def test_a_length_that_equals_the_micro_batch_is_no_batch_axis() -> None:
    function = tf.function(lambda x: tf.reduce_mean(scaled(x)), input_signature=[UNKNOWN])
    captured = trace_loss(function, BATCH, 6, signature=[UNKNOWN])
    marked, _ = infer_batch_axes(captured, 4)
    assert marked.graph.type_of(marked.graph.node("input/0").values()[0]).shape.dims == (None, OTHER)
