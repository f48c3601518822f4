from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.errors import BatchError
from dapple_tf.frontend.batch import batch_form
from dapple_tf.frontend.composite import (
    PythonValue,
    RaggedRows,
    ScalarRows,
    SparseRows,
    as_rows,
    taking_rows,
    unknown_lengths,
)

RAGGED = tf.ragged.constant([[1, 2], [], [3]])
SPARSE = tf.sparse.SparseTensor([[2, 0], [0, 4], [0, 1]], [3.0, 2.0, 1.0], [3, 6])


def test_a_ragged_tensor_is_its_padded_rows_and_their_lengths() -> None:
    (rows,) = as_rows([RAGGED])
    assert isinstance(rows, RaggedRows)
    np.testing.assert_array_equal(rows.padded, [[1, 2], [0, 0], [3, 0]])
    np.testing.assert_array_equal(rows.lengths, [2, 0, 1])


def test_a_sparse_matrix_is_its_rows_in_their_order() -> None:
    (rows,) = as_rows([SPARSE])
    assert isinstance(rows, SparseRows)
    np.testing.assert_array_equal(rows.values, [[1, 2], [0, 0], [3, 0]])
    np.testing.assert_array_equal(rows.columns, [[1, 4], [0, 0], [0, 0]])
    np.testing.assert_array_equal(rows.lengths, [2, 0, 1])
    assert rows.width.shape == (3, 0, 6)


def test_other_arguments_stay_as_they_are() -> None:
    batch = tf.ones([3]), {"words": RAGGED, "y": [tf.zeros([3])]}
    first, second = as_rows(batch)
    assert first is batch[0]
    assert second["y"][0] is batch[1]["y"][0]
    # Flattened: the first argument, then the dictionary by its keys: padded rows, lengths, y.
    assert unknown_lengths((first, second)) == {(1, 1)}
    assert unknown_lengths(as_rows([SPARSE])) == {(0, 1), (1, 1)}


class Pair(NamedTuple):
    words: Any
    number: Any


@pytest.mark.parametrize(
    "nested",
    [
        [RAGGED, tf.constant(2)],
        (RAGGED, {"number": tf.constant(2)}),
        Pair(RAGGED, tf.constant(2)),
        OrderedDict(words=RAGGED, number=tf.constant(2)),
        defaultdict(list, words=RAGGED, number=tf.constant(2)),
        [],
    ],
    ids=lambda nested: type(nested).__name__,
)
def test_arguments_of_any_nested_type_come_back_as_such(nested: Any) -> None:
    found: list[Any] = []
    rows = as_rows([tf.ones([3]), nested])
    taking_rows(lambda x, nested: found.append(nested), rows)(*rows)
    tf.nest.assert_same_structure(found, [nested], expand_composites=True)
    for ours, given in zip(tf.nest.flatten(found), tf.nest.flatten(nested), strict=True):
        tf.debugging.assert_equal(ours, given)


def test_the_loss_gets_what_was_given() -> None:
    @tf.function
    def loss_fn(words: tf.RaggedTensor, others: dict[str, tf.SparseTensor]) -> list[tf.Tensor]:
        parts = [words.values, words.row_splits, words.row_lengths(), words.value_rowids()]
        return [*parts, tf.sparse.to_dense(others["matrix"])]

    rows = as_rows([RAGGED, {"matrix": SPARSE}])
    *parts, dense = tf.function(taking_rows(loss_fn, rows))(*rows)
    for value, wanted in zip(parts, [[1, 2, 3], [0, 2, 2, 3], [2, 0, 1], [0, 0, 2]], strict=True):
        np.testing.assert_array_equal(value, wanted)
    np.testing.assert_array_equal(dense, [[0, 1, 0, 0, 2, 0], [0] * 6, [3, 0, 0, 0, 0, 0]])


def test_a_function_of_dense_tensors_is_the_one_that_was_given() -> None:
    def loss_fn(x: tf.Tensor) -> tf.Tensor:
        return x

    assert taking_rows(loss_fn, as_rows([tf.ones([3])])) is loss_fn


def test_numbers_and_python_values_are_handed_over() -> None:
    variable, model = tf.Variable([1.0, 2.0]), object()

    def function(x: Any, number: Any, flag: Any, values: Any, text: Any, kind: Any) -> Any:
        assert values == {"model": model, "variable": [variable], "none": None}
        assert (text, kind) == ("text", np.float32)
        return tf.reduce_sum(x) + tf.cast(number, tf.float32), flag

    batch = [tf.ones([3]), np.int64(-7), tf.constant(False), {"model": model, "variable": [variable], "none": None}]
    rows = as_rows([*batch, "text", np.float32])
    assert [type(argument) for argument in rows[1:3]] == [ScalarRows] * 2
    assert rows[4:] == (PythonValue("text"), PythonValue(np.float32))
    total, flag = tf.function(taking_rows(function, rows))(*rows)
    assert float(total) == -4
    assert not flag


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (tf.ragged.constant([[[1], [2, 3]], []]), "argument 0 has 2 ragged axes, and only one can be cut by rows"),
        (
            tf.sparse.SparseTensor([[0, 0, 0]], [1.0], [2, 2, 2]),
            "argument 0 is sparse and has 3 axes, but only matrices are cut by rows",
        ),
    ],
)
def test_what_cannot_be_cut_by_rows_is_refused(argument: tf.Tensor, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        as_rows([argument])


def test_python_values_of_local_rows_are_those_that_the_step_was_built_for() -> None:
    built = as_rows([tf.ones([3]), 0.5, None, {"none": None}])
    form = batch_form(built, [tf.TensorSpec([None])])

    def flatten(*batch: Any) -> Any:
        return form.flatten(as_rows(batch, partial=True), [True])

    (rows,) = flatten(tf.ones([2]), 0.5, None, {"none": None})
    assert rows.shape == [2]
    assert flatten(None, 0.5, None, {"none": None}) == [None]
    with pytest.raises(BatchError, match=r"argument 1 is None, but the step was built last for 0.5"):
        flatten(tf.ones([2]), None, None, {"none": None})
    with pytest.raises(BatchError, match=r"argument 3 is {'none': .*}, but the step was built last for"):
        flatten(tf.ones([2]), 0.5, None, {"none": tf.float32})


def test_local_rows_may_have_the_keys_of_a_dictionary_in_another_order() -> None:
    model = object()
    form = batch_form(as_rows([{"x": tf.ones([3]), "m": model}, {"b": model, "a": None}]), [tf.TensorSpec([None])])

    def flatten(*batch: Any) -> Any:
        return form.flatten(as_rows(batch, partial=True), [True])

    (rows,) = flatten({"m": model, "x": tf.ones([2])}, {"a": None, "b": model})
    assert rows.shape == [2]
    with pytest.raises(BatchError, match=r"argument 0 is nested as {'m': object \d+, 'x': \.}, but the step was built"):
        flatten({"m": object(), "x": tf.ones([2])}, {"a": None, "b": model})


def test_a_number_beside_samples_of_unknown_count_stays_as_it_is() -> None:
    specs, number = tf.TensorSpec([None, 2]), tf.constant(3.0)
    assert as_rows([specs, number])[1] is number
