"""Checks of a loss's arguments, and which arguments share a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.errors import BatchError
from dapple_tf.frontend.batch import Batch, as_arguments, batch_form, batch_signature, batch_size

X = np.ones((4, 2), np.float32)


def test_nested_arguments_are_flattened_in_order() -> None:
    specs = batch_signature(({"b": X, "a": np.ones((4,), np.int32)}, X))
    assert [(spec.shape.as_list(), spec.dtype.name) for spec in specs] == [
        ([None], "int32"),
        ([None, 2], "float32"),
        ([None, 2], "float32"),
    ]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((), "takes at least one argument, batched on axis 0"),
        ((X, 3), r"argument 1 is a scalar; every argument must be batched on axis 0 \(let the function take other"),
        (([X, 2.0],), r"argument 0\[1\] is a scalar"),
        ((X, "text"), "argument 1 is a scalar"),
        ((X, X[:2]), "not batched alike on axis 0: argument 0: 4, argument 1: 2"),
        (({"a": X, "b": X[:1]},), r"not batched alike on axis 0: argument 0\[0\]: 4, argument 0\[1\]: 1"),
        ((None,), "argument 0 is a NoneType; every argument must be an array or a dense tensor"),
        ((X, object()), "argument 1 is a object; every argument must be an array"),
        ((tf.IndexedSlices(X, tf.range(4)),), "argument 0 is a tf.IndexedSlices, .*give tf.convert_to_tensor"),
    ],
)
def test_batches_that_are_refused(batch: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        batch_signature(batch)


def test_a_batch_is_a_tuple_of_arguments_or_the_only_one() -> None:
    assert as_arguments((X, 1)) == (X, 1)
    assert as_arguments([X, 1]) == (X, 1)
    assert as_arguments({"x": X}) == ({"x": X},)
    (only,) = as_arguments(X)
    assert only is X


@pytest.mark.parametrize(
    "batch",
    [
        (X,),
        ({"b": X, "a": np.ones(4)},),
        (tf.constant(X), 3),
        (tf.TensorSpec([4, None]),),
    ],
)
def test_the_batch_size_is_the_length_of_the_first_tensors_axis_0(batch: tuple[Any, ...]) -> None:
    assert batch_size(batch) == 4


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((), "the batch has no tensors"),
        (({},), "the batch has no tensors"),
        (([[1, 2], [3, 4]],), r"the batch's first tensor has shape \(\)"),  # nested arguments, each a number
        ((np.float32(1),), r"the batch's first tensor has shape \(\): axis 0 must be the number of samples"),
        ((tf.TensorSpec([None, 2]),), r"shape \(None, 2\): axis 0 must be the number of samples"),
        ((X[:0],), "the batch is empty"),
    ],
)
def test_a_batch_without_a_size_is_refused(batch: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        batch_size(batch)


def test_batches_of_other_sizes_share_a_trace() -> None:
    assert Batch.of((X, [X])).key == Batch.of((X[:3], [X[:3]])).key
    assert Batch.of((X,)).key == Batch.of((tf.constant(X[:3]),)).key


@pytest.mark.parametrize(
    "other",
    [
        (X[:, :1],),
        (X.astype(np.float64),),
        (X, X),
        ([X],),
        ({"x": X},),
    ],
    ids=["inner shape", "dtype", "count", "list", "dict"],
)
def test_batches_of_other_kinds_do_not_share_a_trace(other: tuple[Any, ...]) -> None:
    assert Batch.of((X,)).key != Batch.of(other).key


# --- batches that have None for what is not needed

BATCH = (X, {"mask": X[:, 0], "y": X.astype(np.float64)})
FORM = batch_form(BATCH, batch_signature(BATCH))


def test_the_form_of_a_batch_names_its_tensors() -> None:
    assert FORM.paths == ("0", "1[0]", "1[1]")
    assert [(spec.shape.as_list(), spec.dtype.name) for spec in FORM.signature] == [
        ([None, 2], "float32"),
        ([None], "float32"),
        ([None, 2], "float64"),
    ]


def test_only_needed_tensors_of_a_batch_are_taken_and_looked_at() -> None:
    y = X[:1].astype(np.float64)
    for other in (None, {"mask": None, "y": y}, {"mask": "nothing", "y": y}):
        x, mask, found = FORM.flatten((X[:3], other), [True, False, True])
        assert mask is None
        np.testing.assert_array_equal(x, X[:3])
        assert found is None if other is None else np.array_equal(found, y)
    assert FORM.flatten(("nothing", [1]), [False] * 3) == [None] * 3


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X,), "1 arguments were given, and the loss takes 2"),
        (
            (X, [X[:, 0], X]),
            r"argument 1 is nested as \[\., \.\], but the step was built last for {'mask': \., 'y': \.}",
        ),
        ((X[:, :1], None), r"argument 0 has dtype float32 and shape \(4, 1\), but the step was built last for float32"),
        ((X.astype(np.int32), None), "argument 0 has dtype int32"),
        ((np.float32(1), None), r"argument 0 has dtype float32 and shape \(\)"),
        ((object(), None), "argument 0 is a object"),
    ],
)
def test_a_batch_of_another_form_is_refused(batch: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        FORM.flatten(batch, [True] * 3)
