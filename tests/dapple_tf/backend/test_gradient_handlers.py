"""Accumulating, summing, checking and clipping gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.backend.gradient_handlers import HANDLERS
from dapple_tf.backend.handler import Context
from graph_passes.ir.graph import Attr, tensor
from graph_passes.ir.ops import OpName
from tests.dapple_tf.backend.builders import NamedVariables, make_context, make_node

PLACE = {"stage": 1, "replica": 0}
SCALAR = tensor("float32")


def run(op: OpName, *inputs: Any, context: Context | None = None, outputs: int = 0, **attrs: Attr) -> list[Any]:
    """Return the outputs of a node as NumPy arrays."""
    node = make_node(op, *[SCALAR] * outputs, **PLACE, **attrs)
    results, _ = HANDLERS[op](context or make_context(), node, [tf.convert_to_tensor(x) for x in inputs])
    return [result.numpy() for result in results]


def test_the_first_micro_batch_replaces_the_sums_and_later_ones_add_in_order() -> None:
    """In float32 (1e8 + 1) - 1e8 is 0, and (1e8 - 1e8) + 1 is 1."""
    sums = {name: tf.Variable(7.0) for name in ("v", "w")}
    context = make_context(NamedVariables(sums=sums))
    gradients = [(1e8, 1e8), (1.0, -1e8), (-1e8, 1.0)]
    for m, (v, w) in enumerate(gradients):
        attrs = {"micro_batch": m, "variables": ("v", "w"), "first": m == 0}
        run(OpName.ACCUMULATE, np.float32(v), np.float32(w), context=context, **attrs)
    assert (sums["v"].numpy(), sums["w"].numpy()) == (0, 1)
    read = run(OpName.GRADIENTS, context=context, outputs=2, variables=("w", "v"))
    assert read == [1, 0]


def test_micro_batches_share_one_accumulating_function() -> None:
    context = make_context(NamedVariables(sums={"w": tf.Variable(0.0)}))
    for m in range(4):
        attrs = {"micro_batch": m, "variables": ("w",), "first": m == 0}
        run(OpName.ACCUMULATE, np.float32(m), context=context, **attrs)
    assert len(context.accumulators) == 2  # one assigns, one adds


def test_buckets_of_a_stage_accumulate_separately() -> None:
    sums = {name: tf.Variable(0.0) for name in ("v", "w")}
    context = make_context(NamedVariables(sums=sums))
    for bucket, name in enumerate(("v", "w")):
        for m in range(2):
            attrs = {"micro_batch": m, "variables": (name,), "first": m == 0, "bucket": bucket}
            run(OpName.ACCUMULATE, np.float32(10.0**bucket), context=context, **attrs)
    assert (sums["v"].numpy(), sums["w"].numpy()) == (2, 20)


def test_the_gradients_of_a_single_micro_batch_are_not_accumulated() -> None:
    assert run(OpName.GRADIENTS, np.float32(3.0), outputs=1, variables=("w",)) == [3]


def test_allreduce_sums_each_variable_over_the_replicas() -> None:
    v, w = run(OpName.ALLREDUCE, [1.0], 10.0, [2.0], 20.0, [4.0], 40.0, outputs=2, variables=("v", "w"), replicas=3)
    assert (list(v), w) == ([7], 70)


def test_the_gradients_of_a_tied_variable_are_added() -> None:
    assert run(OpName.TIED_SUM, [1.0, 2.0], [10.0, 20.0], variable="w")[0].tolist() == [11, 22]


def test_unchecked_gradients_may_be_infinite() -> None:
    assert run(OpName.REDUCED_GRADIENTS, float("inf"), variables=("w",)) == [np.inf]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), complex(1, float("nan")), complex(float("inf"), 1)])
def test_a_checked_gradient_that_is_not_finite_names_its_stage_and_variable(bad: complex) -> None:
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="on stage 1 the gradient of variable 'dense/kernel' is not finite"
    ):
        run(OpName.REDUCED_GRADIENTS, type(bad)(1.0), bad, variables=("fine", "dense/kernel"), check=True)


def test_checked_gradients_that_are_finite_pass() -> None:
    found = run(OpName.REDUCED_GRADIENTS, 1.5, 2 + 3j, variables=("v", "w"), check=True)
    assert found == [1.5, 2 + 3j]


def clip(gradients: list[Any], limit: float) -> list[Any]:
    """Return the gradients clipped by their global norm, as two stages do it."""
    squares = [run(OpName.SQUARE_NORM, gradient)[0] for gradient in gradients]
    (norm,) = run(OpName.GLOBAL_NORM, *squares)
    return run(OpName.CLIP, norm, *gradients, limit=limit)


def test_clipping_scales_all_gradients_to_the_global_norm() -> None:
    first, second = clip([np.float32([3.0, 0.0]), np.float32([[4.0]])], 1.0)  # a norm of 5
    np.testing.assert_array_equal(first, np.float32([0.6, 0.0]))
    np.testing.assert_array_equal(second, np.float32([[0.8]]))


def test_gradients_below_the_limit_are_not_scaled() -> None:
    gradients = [np.float32([0.3]), np.float32([0.4])]
    assert clip(gradients, 0.7) == gradients


def test_the_limit_of_clipping_is_a_double() -> None:
    (clipped,) = clip([np.float64([1.0])], 0.1)
    assert clipped == np.float64(0.1)  # 0.1 as a float32 is 1.5e-9 more
