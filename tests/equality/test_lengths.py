"""Batches of other inner lengths: one build serves all lengths that TensorFlow would leave unknown.

Where the rewriting changes its form at some length, that length gets a build of its own. Either way a pipeline equals
one device.
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


def problem(
    *, tokens: int | None = None, signature: Sequence[tf.TensorSpec] | None = OPEN, reduce_retracing: bool = False
) -> Problem:
    """``tokens``: the loss is divided by as many more than the tokens of the batch; None: it is a mean."""
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
        if tokens is not None:
            return tf.reduce_sum(errors) / tf.cast(tf.size(x) + tokens, tf.float64)
        return tf.reduce_mean(tf.reduce_mean(errors, 1))

    function = tf.function(loss_fn, input_signature=signature, reduce_retracing=reduce_retracing)
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


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("replicas", [[1, 1], [2, 1]])
def test_one_build_serves_a_loss_that_computes_with_the_tokens_of_the_batch(tokens: int, replicas: list[int]) -> None:
    batches = [batch(5, length) for length in (4, 3, 6)]
    found = compare(problem(tokens=tokens), batches, stages=["dense_1"], replicas=replicas, micro_batches=2)
    found.check(TOLERANCE["float64"])
    assert count_builds(found.step) == 1


@pytest.mark.parametrize("replicas", [[1, 1], [2, 1]])
def test_the_second_build_serves_all_lengths_where_tensorflow_would_not_trace_again(replicas: list[int]) -> None:
    """The first length is traced as it is, as by TensorFlow."""
    batches = [batch(5, length) for length in (4, 3, 7, 4, 1)]
    own = problem(tokens=2, signature=None, reduce_retracing=True)
    found = compare(own, batches, stages=["dense_1"], replicas=replicas, micro_batches=2)
    found.check(TOLERANCE["float64"])
    assert count_builds(found.step) == 2


def test_a_loss_without_a_signature_is_built_for_each_length() -> None:
    found = compare(problem(signature=None), [batch(5, 4), batch(5, 3)], stages=["dense_1"], micro_batches=2)
    found.check(TOLERANCE["float64"])
    assert count_builds(found.step) == 2


def of_sequences(loss_fn: Any, *dims: int) -> tuple[Problem, Any]:
    """Return the problem of a loss of sequences of vectors, all lengths unknown, and a function that draws batches."""
    w = tf.Variable(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)), name="w")
    specs = [tf.TensorSpec([None] * (rank - 1) + [WIDTH], tf.float64) for rank in dims]
    function = tf.function(lambda *batch: loss_fn(w, *batch), input_signature=specs)
    draw = np.random.default_rng(1)

    def draw_batch(*lengths: Sequence[int]) -> tuple[tf.Tensor, ...]:
        return tuple(tf.constant(draw.normal(size=(7, *inner, WIDTH))) for inner in lengths)

    return Problem(function, {"w": w}, lambda: keras.optimizers.SGD(0.01)), draw_batch


def squared(w: Any, x: Any) -> Any:
    return tf.reduce_sum(tf.square(tf.einsum("...c,cd->...d", x, w)), -1)


@pytest.mark.parametrize(("prompt", "lengths"), [(10, (8, 21, 9)), (500, (8, 520, 400))])
def test_a_loss_that_changes_its_form_at_a_length_is_built_on_both_sides(prompt: int, lengths: Sequence[int]) -> None:
    """Of up to ``prompt`` tokens none counts, and the divisor is 1, whatever the number of samples."""

    def loss_fn(w: Any, x: Any) -> Any:
        tokens = tf.shape(x)[0] * (tf.shape(x)[1] - prompt)
        return tf.reduce_sum(squared(w, x)[:, prompt:]) / tf.cast(tf.maximum(tokens, 1), tf.float64)

    own, draw = of_sequences(loss_fn, 3)
    found = compare(own, [draw([length]) for length in lengths], stages=1, micro_batches=3)
    found.check(TOLERANCE["float64"])
    assert count_builds(found.step) == 2


def test_a_loss_that_is_divided_by_a_product_of_lengths() -> None:
    """A size that is not affine in the lengths."""

    def loss_fn(w: Any, x: Any) -> Any:
        return tf.reduce_sum(squared(w, x)) / tf.cast(tf.size(x) + 1, tf.float64)

    own, draw = of_sequences(loss_fn, 4)
    found = compare(own, [draw(inner) for inner in ([3, 5], [2, 2])], stages=1, micro_batches=3)
    found.check(TOLERANCE["float64"])


def test_a_mean_over_chosen_samples_is_built_for_each_length() -> None:
    """The number of entries of a chosen sample must be known."""
    w = tf.Variable(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)), name="w")

    @tf.function(reduce_retracing=True)
    def loss_fn(x: Any, chosen: Any) -> Any:
        return tf.reduce_mean(tf.boolean_mask(squared(w, x), chosen)) + 0.1 * tf.reduce_sum(tf.square(w))

    draw = np.random.default_rng(1)
    batches = [(tf.constant(draw.normal(size=(7, n, WIDTH))), tf.constant(np.arange(7) % 3 > 0)) for n in (3, 5)]
    found = compare(Problem(loss_fn, {"w": w}, lambda: keras.optimizers.SGD(0.01)), batches, stages=1, micro_batches=3)
    found.check(TOLERANCE["float64"])
    assert count_builds(found.step) == 2


def test_lengths_that_were_equal_at_first() -> None:
    def loss_fn(w: Any, x: Any, y: Any) -> Any:
        tokens = tf.size(x[:, :, 0]) + 3 * tf.size(y[:, :, 0]) + 1
        return (tf.reduce_sum(squared(w, x)) + tf.reduce_sum(squared(w, y))) / tf.cast(tokens, tf.float64)

    own, draw = of_sequences(loss_fn, 3, 3)
    found = compare(own, [draw([a], [b]) for a, b in ((3, 3), (4, 4), (3, 5), (5, 2))], stages=1, micro_batches=2)
    found.check(TOLERANCE["float64"])
    assert count_builds(found.step) == 1


@pytest.mark.parametrize(
    "recur",
    [
        lambda w, x: tf.scan(lambda h, step: tf.tanh(h @ w) + step, x),
        lambda w, x: tf.map_fn(lambda step: tf.tanh(step @ w), x),
    ],
    ids=["scan", "map_fn"],
)
def test_a_loop_over_an_unknown_length(recur: Any) -> None:
    """Its gradient adds inputs to the FuncGraph of its body, which is analysed again at each length."""
    own, draw = of_sequences(lambda w, x: tf.reduce_mean(tf.square(recur(w, tf.transpose(x, [1, 0, 2])))), 3)
    found = compare(own, [draw([length]) for length in (4, 4, 3, 6)], stages=1, micro_batches=3)
    found.check(TOLERANCE["float64"])
    assert count_builds(found.step) == 1


def test_forward_runs_all_lengths_with_one_build() -> None:
    own = problem(signature=OPEN)
    step = dapple.pipeline(own.loss_fn, optimizer=keras.optimizers.SGD(0.0), stages=1, micro_batches=2)
    for length in (4, 3, 6):
        assert np.isfinite(float(step.forward(*batch(5, length))))
    assert len(step._forwards[0].models) == 1
