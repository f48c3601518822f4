"""Batches of any nesting are named, and nested again as they were; what is None stays None."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dapple_tf.errors import BatchError
from dapple_tf.keras.batches import BatchNames, DataNames

A, B, C = (np.full([2], i) for i in range(3))

BATCHES = [
    (A, {"x": A}, (A, None, None)),
    ((A,), {"x": A}, (A, None, None)),
    ([A, B], {"x": A, "y": B}, (A, B, None)),
    ((A, None, C), {"x": A, "sample_weight": C}, (A, None, C)),
    (([A, None, B], {"k": C}), {"x/0": A, "x/2": B, "y/k": C}, ([A, None, B], {"k": C}, None)),
    (({"p": (A, B)}, C, [A]), {"x/p/0": A, "x/p/1": B, "y": C, "sample_weight/0": A}, ({"p": (A, B)}, C, [A])),
]


@pytest.mark.parametrize(("data", "named", "nested"), BATCHES)
def test_names_and_nesting(data: Any, named: dict[str, Any], nested: Any) -> None:
    names = BatchNames()
    found = names.name(data)
    assert {name: id(value) for name, value in found.items()} == {name: id(value) for name, value in named.items()}
    assert repr(names.nest(found)) == repr(nested)


def test_only_inputs_are_taken_to_predict() -> None:
    names = BatchNames()
    assert names.name((A, B, C), inputs_only=True) == {"x": A}
    assert names.nest({"x": B}) == (B, None, None)


def test_batches_of_different_nesting_do_not_mix() -> None:
    names = BatchNames()
    with_weights, without = names.name((A, B, C)), names.name((A, B))
    assert names.nest(with_weights) == (A, B, C)
    assert names.nest(without) == (A, B, None)


def test_single_tensors_are_nested_before_any_batch_was_named() -> None:
    names = BatchNames()
    assert names.nest({"x": A, "y": B}) == (A, B, None)
    assert names.nest({"x": A, "sample_weight": C}) == (A, None, C)


def test_names_that_no_batch_had_are_refused_with_those_that_can_be() -> None:
    names = BatchNames()
    names.name((A, {"scores": B}))
    with pytest.raises(BatchError, match=r"dictionary with 'input', 'y'; the names can be: 'x'; .*; 'x', 'y/scores'$"):
        names.nest({"input": A, "y": B})
    with pytest.raises(BatchError, match=r"dictionary with 'x'; give the model a batch by fit first"):
        DataNames().nest({"x": A})


def test_a_batch_without_inputs_is_refused() -> None:
    with pytest.raises(BatchError, match="no inputs"):
        BatchNames().name((None, A))
