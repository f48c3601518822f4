"""Lookup tables and vocabulary layers inside a loss: a pipeline equals one device; writing is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import dapple_tf as dapple
from dapple_tf.errors import CaptureError
from tests.equality.one_device import TOLERANCE, Problem, compare

WORDS = ["a", "b", "c", "d"]
LENGTH = 3
layers = keras.layers


def static_table() -> tf.lookup.StaticHashTable:
    numbers = tf.range(1, 5, dtype=tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(WORDS, numbers), 0)


def vocabulary_table() -> tf.lookup.StaticVocabularyTable:
    numbers = tf.range(len(WORDS), dtype=tf.int64)
    return tf.lookup.StaticVocabularyTable(tf.lookup.KeyValueTensorInitializer(WORDS, numbers), num_oov_buckets=3)


def mutable_table() -> tf.lookup.experimental.MutableHashTable:
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)
    table.insert(WORDS, tf.range(1, 5, dtype=tf.int64))
    return table


MAPPINGS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "StaticHashTable": lambda: static_table().lookup,
    "StaticVocabularyTable": lambda: vocabulary_table().lookup,
    "StringLookup": lambda: layers.StringLookup(vocabulary=WORDS),
    "StringLookup, buckets": lambda: layers.StringLookup(vocabulary=WORDS, num_oov_indices=2, mask_token=""),
    "IntegerLookup": lambda: lambda x: layers.IntegerLookup(vocabulary=[1, 2, 3])(tf.strings.length(x)),
}


def of_known_shape(table: Any) -> Callable[[Any], Any]:
    """Return what looks up words; the shape that mutable tables give is unknown, and layers need its rank."""
    return lambda words: tf.ensure_shape(table.lookup(words), words.shape)


def problem(mapping: Callable[[Any], Any], *, late: bool = False) -> Problem:
    """``late``: labels are looked up too, at the end of the model."""
    keras.utils.set_random_seed(5)
    embedding = layers.Embedding(8, 6, dtype="float64", name="embedding")
    dense = [layers.Dense(6, "tanh", dtype="float64", name=f"dense_{i}") for i in range(2)]
    body = keras.Sequential([keras.Input((LENGTH, 6), dtype="float64"), *dense], name="body")
    embedding.build((None, LENGTH))

    def loss_fn(words: Any, label: Any) -> Any:
        hidden = tf.reduce_mean(body(embedding(mapping(words))), 1)
        classes = tf.math.floormod(mapping(label), 6) if late else tf.strings.length(label[:, 0])
        target = tf.one_hot(classes[:, 0] if late else classes, 6, dtype=tf.float64)
        return tf.reduce_mean(tf.square(hidden - target))

    names = {v.path: v for v in [*embedding.variables, *body.variables]}
    return Problem(loss_fn, names, lambda: keras.optimizers.Adam(0.01))


def batch(size: int, seed: int = 0) -> Any:
    draw = np.random.default_rng(seed)
    words = draw.choice([*WORDS, "other"], (2, size, LENGTH))
    return tf.constant(words[0]), tf.constant(words[1])


@pytest.mark.parametrize("name", MAPPINGS)
@settings(max_examples=2, phases=[Phase.explicit, Phase.generate], deadline=None)
@given(data=st.data())
def test_tables_equal_one_device(name: str, data: st.DataObject) -> None:
    cuts = data.draw(st.sampled_from([[], ["dense_0"], ["dense_1"], ["dense_0", "dense_1"]]))
    replicas = [data.draw(st.integers(1, 2))] * (len(cuts) + 1)
    micro_batches = data.draw(st.integers(1, 4))
    size = 2 * micro_batches + data.draw(st.integers(0, 5))
    options: dict[str, Any] = {"stages": cuts or 1, "replicas": replicas, "micro_batches": micro_batches}
    found = compare(
        problem(MAPPINGS[name]()), [batch(size), batch(size, 1)], recompute=data.draw(st.booleans()), **options
    )
    found.check(TOLERANCE["float64"])


def test_a_table_is_read_by_a_later_stage() -> None:
    found = compare(
        problem(static_table().lookup, late=True),
        [batch(7), batch(7, 1)],
        stages=["dense_0", "dense_1"],
        replicas=[1, 2, 1],
        micro_batches=3,
    )
    found.check(TOLERANCE["float64"])


def test_a_table_is_read_in_conditions_and_loops() -> None:
    table = static_table()

    def look_up(words: Any) -> Any:
        ids = tf.cond(tf.size(words) > 0, lambda: table.lookup(words), lambda: tf.zeros_like(words, tf.int64))
        columns = tf.map_fn(lambda column: column + table.size() - 4, tf.transpose(ids))
        again = tf.map_fn(table.lookup, tf.transpose(words), fn_output_signature=tf.int64)
        return tf.transpose(columns + 0 * again)

    found = compare(problem(look_up), [batch(7), batch(7, 1)], stages=["dense_1"], micro_batches=3)
    found.check(TOLERANCE["float64"])


def test_a_mutable_table_that_is_only_read_equals_one_device() -> None:
    own = problem(of_known_shape(mutable_table()))
    options: dict[str, Any] = {"optimizer": own.make_optimizer(), "stages": 1, "micro_batches": 2}
    report = dapple.verify(own.loss_fn, batch=batch(6), **options)
    assert report.ok, str(report)


def test_a_table_is_read_in_recorded_and_forward_runs() -> None:
    own = problem(static_table().lookup)
    options: dict[str, Any] = {"optimizer": keras.optimizers.Adam(0.01), "micro_batches": 3}
    step = dapple.pipeline(own.loss_fn, stages=2, **options)
    np.testing.assert_allclose(float(step.forward(*batch(7))), float(own.loss_fn(*batch(7))), rtol=1e-12)
    assert np.isfinite(float(step.record(*batch(7))))


def insert(words: Any, table: Any) -> Any:
    table.insert(words, tf.ones_like(words, tf.int64))
    return tf.ensure_shape(table.lookup(words), words.shape)


def insert_in_a_branch(words: Any, table: Any) -> Any:
    return tf.cond(tf.size(words) > 0, lambda: insert(words, table), lambda: tf.zeros_like(words, tf.int64))


@pytest.mark.parametrize("use", [insert, insert_in_a_branch])
def test_a_loss_that_writes_a_table_is_refused(use: Callable[..., Any]) -> None:
    table = mutable_table()
    own = problem(lambda words: use(words, table))
    step = dapple.pipeline(own.loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=1, micro_batches=2)
    with pytest.raises(CaptureError, match=r"nor a lookup table that it only reads .*TableInsert"):
        step(*batch(6))


def test_a_loss_that_reads_an_iterator_is_refused() -> None:
    numbers = iter(tf.data.Dataset.range(9))
    own = problem(lambda words: tf.strings.length(words) + tf.cast(numbers.get_next(), tf.int32))
    step = dapple.pipeline(own.loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=1, micro_batches=2)
    with pytest.raises(CaptureError, match=r"used by the op IteratorGetNext.*pass the values that it gives"):
        step(*batch(6))
