"""Ragged and sparse arguments are cut by rows: a pipeline equals one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import dapple_tf as dapple
from tests.equality.one_device import TOLERANCE, Problem, compare

WORDS, WIDTH = 11, 4


def problem(predict: Callable[[Any, Any], Any]) -> Problem:
    """The mean squared error of a sum over each sample of ``predict(x, table)``, with a matrix between."""
    random = np.random.default_rng(0)
    table = tf.Variable(random.normal(size=(WORDS, WIDTH)), name="table")
    w = tf.Variable(random.normal(size=(WIDTH, WIDTH)), name="w")

    def loss_fn(x: Any, y: Any) -> Any:
        hidden = tf.tanh(tf.tensordot(predict(x, table), w, 1))
        return tf.reduce_mean(tf.square(tf.reduce_sum(tf.reshape(hidden, [tf.shape(y)[0], -1]), 1) - y))

    return Problem(loss_fn, {"table": table, "w": w}, lambda: keras.optimizers.Adam(0.01))


def ragged_batch(lengths: Sequence[int]) -> tuple[Any, ...]:
    random = np.random.default_rng(sum(lengths))
    words = tf.RaggedTensor.from_row_lengths(random.integers(0, WORDS, sum(lengths)), lengths)
    return words, tf.constant(random.normal(size=len(lengths)))


def sparse_batch(samples: int, share: float = 0.3) -> tuple[Any, ...]:
    random = np.random.default_rng(samples)
    matrix = random.normal(size=(samples, WORDS)) * (random.random((samples, WORDS)) < share)
    return tf.sparse.from_dense(matrix), tf.constant(random.normal(size=samples))


RAGGED: dict[str, Callable[[Any, Any], Any]] = {
    "padded": lambda x, table: tf.gather(table, x.to_tensor()),
    "padded with a default": lambda x, table: tf.gather(table, x.to_tensor(default_value=3)),
    "padded after the embedding": lambda x, table: tf.gather(table, x).to_tensor(),
    "cut to two words": lambda x, table: tf.gather(table, x.to_tensor(shape=[None, 2])),
    "a sum": lambda x, table: tf.reduce_sum(tf.gather(table, x), axis=1),
    "a maximum": lambda x, table: tf.maximum(tf.reduce_max(tf.gather(table, x), axis=1), -9.0),
    "a mean": lambda x, table: tf.math.divide_no_nan(
        tf.reduce_sum(tf.gather(table, x), axis=1), tf.cast(x.row_lengths(), tf.float64)[:, tf.newaxis]
    ),
    "flat values": lambda x, table: tf.reduce_sum(tf.ragged.map_flat_values(tf.nn.relu, tf.gather(table, x)), axis=1),
}
SPARSE: dict[str, Callable[[Any, Any], Any]] = {
    "dense": lambda x, table: tf.matmul(tf.sparse.to_dense(x), table),
    "a product": tf.sparse.sparse_dense_matmul,
}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_arguments_of_all_lengths_need_one_build(name: str) -> None:
    """Rows without words, a micro-batch of nothing but these, and batches whose longest rows differ."""
    lengths = [3, 0, 5, 1, 2, 2, 4], [1, 1, 2, 0, 0, 0, 2], [9, 1, 1, 3, 2, 0]
    options: dict[str, Any] = {"stages": 1, "replicas": [2] if name == "padded" else [1], "micro_batches": 3}
    found = compare(problem(RAGGED[name]), [ragged_batch(each) for each in lengths], **options)
    found.check(TOLERANCE["float64"])
    assert len(found.step._compiled.models) == 1


@settings(max_examples=3, phases=[Phase.explicit, Phase.generate], deadline=None)
@given(data=st.data())
def test_random_ragged_batches(data: st.DataObject) -> None:
    rows = data.draw(st.integers(4, 7))
    lengths = st.lists(st.integers(0, 5), min_size=rows, max_size=rows).filter(lambda each: max(each) > 0)
    batches = [ragged_batch(each) for each in data.draw(st.lists(lengths, min_size=2, max_size=3))]
    use = RAGGED[data.draw(st.sampled_from(sorted(RAGGED)))]
    found = compare(problem(use), batches, stages=1, micro_batches=data.draw(st.integers(1, 4)))
    found.check(TOLERANCE["float64"])


@pytest.mark.parametrize("name", ["a product", "dense"])
def test_sparse_arguments(name: str) -> None:
    batches = [sparse_batch(7), sparse_batch(7, 0.9), sparse_batch(6, 0.1)]
    found = compare(problem(SPARSE[name]), batches, stages=1, micro_batches=3)
    found.check(TOLERANCE["float64"])
    assert len(found.step._compiled.models) == 1


def test_a_ragged_argument_in_a_dictionary_runs_forward_and_is_verified() -> None:
    own = problem(RAGGED["a sum"])
    words, y = ragged_batch([2, 0, 3, 1])

    def loss_fn(batch: Any) -> Any:
        return own.loss_fn(batch["words"], batch["y"])

    batch = {"words": words, "y": y}
    step = dapple.pipeline(loss_fn, optimizer=own.make_optimizer(), stages=1, micro_batches=2)
    np.testing.assert_allclose(step.forward(batch), loss_fn(batch), rtol=1e-12)
    report = dapple.verify(loss_fn, optimizer=own.make_optimizer(), batch=(batch,), stages=1, micro_batches=2)
    assert report.ok, str(report)


def test_what_mixes_the_rows_of_a_ragged_argument_is_computed_once() -> None:
    own = problem(lambda x, table: tf.gather(table, x.row_splits[1:] % WORDS))
    options: dict[str, Any] = {"optimizer": own.make_optimizer(), "stages": 1, "micro_batches": 2}
    report = dapple.verify(own.loss_fn, batch=ragged_batch([2, 0, 3, 1]), **options)
    assert report.ok, str(report)
