"""Batches of other inner lengths: one build serves all that the loss's ``input_signature`` leaves open.

Where the rewriting depends on a length, each length gets a build of its own. Either way a pipeline equals one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import dapple_tf as dapple
from tests.equality.one_device import TOLERANCE, Problem, compare

layers = keras.layers
WIDTH = 4
OPEN = [tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([None], tf.float64)]


def batch(rows: int, length: int) -> tuple[tf.Tensor, tf.Tensor]:
    draw = np.random.default_rng(rows + 100 * length)
    return tf.constant(draw.integers(1, 9, (rows, length))), tf.constant(draw.normal(size=rows))


def problem(*, tokens: bool = False, signature: Sequence[tf.TensorSpec] | None = OPEN) -> Problem:
    """``tokens``: the loss is divided by one more than the tokens of the batch, which no micro-batch has."""
    keras.utils.set_random_seed(7)
    embedding = layers.Embedding(9, WIDTH, dtype="float64", name="embedding")
    dense = [layers.Dense(WIDTH, "tanh", dtype="float64", name=f"dense_{i}") for i in range(2)]
    drop = layers.Dropout(0.4, dtype="float64", name="drop")
    for layer in (embedding, *dense):
        layer.build((None, None, WIDTH))

    def loss_fn(x: Any, y: Any) -> Any:
        hidden = dense[0](drop(embedding(x), training=True))
        scores = tf.einsum("btw,bsw->bts", hidden, hidden)
        hidden = dense[1](tf.nn.softmax(scores) @ hidden)
        errors = tf.square(tf.reduce_sum(hidden, 2) - y[:, tf.newaxis])
        if tokens:
            return tf.reduce_sum(errors) / tf.cast(tf.size(x) + 1, tf.float64)
        return tf.reduce_mean(tf.reduce_mean(errors, 1))

    function = tf.function(loss_fn, input_signature=signature)
    variables = [v for layer in (embedding, *dense, drop) for v in layer.variables]
    return Problem(function, {v.path: v for v in variables}, lambda: keras.optimizers.Adam(0.01))


def count_builds(step: Any) -> int:
    return len(step._compiled.models)


@settings(max_examples=2, phases=[Phase.explicit, Phase.generate], deadline=None)
@given(data=st.data())
def test_one_build_serves_all_lengths(data: st.DataObject) -> None:
    cuts = data.draw(st.sampled_from([["dense_0"], ["dense_1"], ["dense_0", "dense_1"]]))
    replicas = [data.draw(st.integers(1, 2)) for _ in range(len(cuts) + 1)]
    micro_batches = data.draw(st.integers(2, 3))
    rows = 2 * micro_batches + 1
    lengths = [rows // micro_batches, *data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3))]
    batches = [batch(rows, length) for length in lengths]  # the first is as long as a micro-batch has rows
    options: dict[str, Any] = {"stages": cuts, "replicas": replicas, "micro_batches": micro_batches}
    found = compare(problem(), batches, **options)
    found.check(TOLERANCE["float64"])
    assert count_builds(found.step) == 1


def test_a_loss_that_computes_with_a_length_is_built_for_each() -> None:
    batches = [batch(5, length) for length in (4, 3)]
    found = compare(problem(tokens=True), batches, stages=["dense_1"], micro_batches=2)
    found.check(TOLERANCE["float64"])
    assert count_builds(found.step) == 2


@pytest.mark.slow
def test_a_loss_without_a_signature_is_built_for_each_length() -> None:
    found = compare(problem(signature=None), [batch(5, 4), batch(5, 3)], stages=["dense_1"], micro_batches=2)
    found.check(TOLERANCE["float64"])
    assert count_builds(found.step) == 2


def test_a_loss_of_what_follows_a_prompt_is_built_for_each() -> None:
    """At lengths of up to 10 the divisor is 1, whatever the number of samples."""
    w = tf.Variable(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)), name="w")

    def loss_fn(x: Any) -> Any:
        errors = tf.reduce_sum(tf.square(tf.einsum("nlc,cd->nld", x, w)), 2)
        tokens = tf.shape(x)[0] * (tf.shape(x)[1] - 10)
        return tf.reduce_sum(errors[:, 10:]) / tf.cast(tf.maximum(tokens, 1), tf.float64)

    function = tf.function(loss_fn, input_signature=[tf.TensorSpec([None, None, WIDTH], tf.float64)])
    draw = np.random.default_rng(1)
    batches = [(tf.constant(draw.normal(size=(8, length, WIDTH))),) for length in (8, 21)]
    found = compare(Problem(function, {"w": w}, lambda: keras.optimizers.SGD(0.01)), batches, stages=1, micro_batches=2)
    found.check(TOLERANCE["float64"])
    assert count_builds(found.step) == 2


def test_forward_runs_all_lengths_with_one_build() -> None:
    own = problem(signature=OPEN)
    step = dapple.pipeline(own.loss_fn, optimizer=keras.optimizers.SGD(0.0), stages=1, micro_batches=2)
    for length in (4, 3, 6):
        assert np.isfinite(float(step.forward(*batch(5, length))))
    assert len(step._forwards[0].models) == 1
