from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.frontend.batch import batch_signature
from dapple_tf.frontend.open_lengths import open_signature
from dapple_tf.frontend.shapes import infer_batch_axes
from dapple_tf.frontend.trace import trace_loss
from dapple_tf.graph_passes.ir.graph import OTHER

BATCH = (np.ones((6, 4)),)
W = tf.Variable(np.ones((3, 2)))
UNKNOWN = tf.TensorSpec([None, None], tf.float64)


def scaled(x: Any) -> Any:
    return tf.reduce_sum(W) * tf.square(x)


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


def specs(*shape: int | None) -> tuple[tf.TensorSpec, ...]:
    return (tf.TensorSpec(shape, tf.float64),)


@pytest.mark.parametrize(
    ("options", "earlier", "shape"),
    [
        ({"reduce_retracing": True}, [], (None, 4, 7)),
        ({"reduce_retracing": True}, [(None, 3, 7)], (None, None, 7)),
        ({"reduce_retracing": True}, [(None, 3, 7), (None, 3, 8)], (None, None, None)),
        ({"reduce_retracing": True}, [(None, None, 7)], (None, None, 7)),
        ({"reduce_retracing": True, "jit_compile": True}, [(None, 3, 7)], (None, 4, 7)),
        ({}, [(None, 3, 7)], (None, 4, 7)),
    ],
    ids=["the first", "the second", "two lengths", "unknown already", "XLA", "not asked for"],
)
def test_lengths_that_differ_from_earlier_batches_are_unknown(options: Any, earlier: Any, shape: Any) -> None:
    function = tf.function(scaled, **options)
    assert open_signature(function, specs(None, 4, 7), [specs(*other) for other in earlier]) == specs(*shape)


def test_a_length_that_equals_the_micro_batch_is_no_batch_axis() -> None:
    function = tf.function(lambda x: tf.reduce_mean(scaled(x)), input_signature=[UNKNOWN])
    captured = trace_loss(function, BATCH, 6, signature=[UNKNOWN])
    marked, _ = infer_batch_axes(captured, 4)
    assert marked.graph.type_of(marked.graph.node("input/0").values()[0]).shape.dims == (None, OTHER)
