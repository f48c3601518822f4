"""Accumulating, summing, checking and clipping gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.backend.gradient_handlers import HANDLERS
from dapple_tf.backend.handler import Context
from dapple_tf.graph_passes.ir.graph import OTHER, Attr, tensor
from dapple_tf.graph_passes.ir.ops import OpName
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


def test_sums_are_cleared_whatever_they_are() -> None:
    """Of any shape and dtype, also after a step whose gradients were not finite."""
    values = {
        "scalar": tf.constant(np.nan),
        "matrix": tf.constant([[np.inf, 1.0]], tf.float64),
        "none": tf.zeros([0, 3], tf.bfloat16),
        "large": tf.fill([300, 200], tf.constant(1 + 2j, tf.complex64)),
    }
    sums = {name: tf.Variable(value) for name, value in values.items()}
    context = make_context(NamedVariables(sums=sums))
    for _ in range(2):
        run(OpName.CLEAR_SUMS, context=context, variables=tuple(sums))
        for name, variable in sums.items():
            np.testing.assert_array_equal(variable.numpy(), np.zeros_like(values[name]))
            variable.assign_add(values[name])
            np.testing.assert_array_equal(variable.numpy(), values[name].numpy())
    assert len(context.shared_functions) == 1


def test_micro_batches_share_one_accumulating_function() -> None:
    context = make_context(NamedVariables(sums={"w": tf.Variable(0.0)}))
    for m in range(4):
        attrs = {"micro_batch": m, "variables": ("w",), "first": m == 0}
        run(OpName.ACCUMULATE, np.float32(m), context=context, **attrs)
    assert len(context.shared_functions) == 2  # one assigns, one adds


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


def test_allreduce_averages_over_replicas_that_take_minibatches_in_turn() -> None:
    attrs: dict[str, Attr] = {"variables": ("v", "w"), "replicas": 4, "average": True}
    inputs = [np.float32([1]), np.float32(10), np.float32([2]), np.float32(20), np.float32([4]), np.float32(40)]
    v, w = run(OpName.ALLREDUCE, *inputs, np.float32([5]), np.float32(50), outputs=2, **attrs)
    assert (list(v), w) == ([3], 30)


class Ranks:
    """A job whose other rank has the same gradients: their sum is the double."""

    def all_reduce(self, node: Any, inputs: Any) -> list[Any]:
        return [*(2 * value for value in inputs), tf.constant(1, tf.int64)]


def test_ranks_average_what_they_have_summed_and_pass_on_the_token() -> None:
    context = dataclasses.replace(make_context(), ranks=Ranks())  # type: ignore[arg-type]  # all that is called
    attrs: dict[str, Attr] = {"variables": ("v",), "replicas": 2, "ranks": (0, 1)}
    value, token = run(OpName.ALLREDUCE, np.float32(6), context=context, outputs=2, average=True, **attrs)
    assert (value, token) == (6, 1)
    value, token = run(OpName.ALLREDUCE, np.float32(6), context=context, outputs=2, **attrs)
    assert (value, token) == (12, 1)


def test_the_gradients_of_a_tied_variable_are_added() -> None:
    assert run(OpName.TIED_SUM, [1.0, 2.0], [10.0, 20.0], outputs=1, variable="w")[0].tolist() == [11, 22]


def test_each_statistic_is_added_over_the_micro_batches() -> None:
    sums = run(OpName.SUM_STATISTICS, 1.0, 10.0, 2.0, 20.0, outputs=2, variables=("mean", "variance"))
    assert sums == [3, 30]


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


ROWS = tensor("float32", OTHER, 2), tensor("int64", OTHER)


def gather(uses: dict[str, list[tuple[Any, Any]]], **attrs: Attr) -> list[Any]:
    """Return the slices and indices that are gathered from the pieces of each use."""
    pairs = [(slices, indices) for use in uses.values() for slices, indices in use]
    inputs = [array for slices, indices in pairs for array in (np.float32(slices), np.int32(indices))]
    pieces = tuple(len(use) for use in uses.values())
    node = make_node(
        OpName.GATHER_SLICES, *ROWS, **PLACE, rows=9, variable="table", uses=tuple(uses), pieces=pieces, **attrs
    )
    results, _ = HANDLERS[OpName.GATHER_SLICES](make_context(), node, [tf.constant(x) for x in inputs])
    return [result.numpy().tolist() for result in results]


A, B, C = [1.0, 2.0], [10.0, 20.0], [100.0, 200.0]


def test_slices_of_samples_come_one_after_the_other() -> None:
    assert gather({"concat": [([A, B], [7, 7]), (np.zeros([0, 2]), []), ([C], [7])]}) == [[A, B, C], [7, 7, 7]]


def test_slices_of_minibatches_in_turn_are_kept_apart_and_averaged() -> None:
    """Two minibatches looked up row 7: the gradient is the mean of theirs, in two slices."""
    found = gather({"concat": [([A], [7]), ([B, C], [2, 7])]}, averaged=2)
    assert found == [[[0.5, 1], [5, 10], [50, 100]], [7, 2, 7]]


def test_slices_of_rows_that_do_not_depend_on_the_batch_are_added_by_position() -> None:
    assert gather({"sum": [([A, B], [5, 5]), ([B, C], [5, 5])]}) == [[[11, 22], [110, 220]], [5, 5]]


def test_slices_of_rows_that_the_model_takes_once_are_merged_in_order_of_first_occurrence() -> None:
    assert gather({"merge": [([A, B], [4, 2]), ([C, A], [2, 8])]}) == [[A, [110, 220], A], [4, 2, 8]]


def test_the_uses_of_a_variable_come_one_after_the_other_with_indices_of_one_type() -> None:
    found = gather({"sum": [([A], [1]), ([A], [1])], "concat": [([B], [2]), ([C], [1])]})
    assert found == [[[2, 4], B, C], [1, 2, 1]]


def test_checked_slices_that_are_not_finite_name_their_variable() -> None:
    bad = {"concat": [([A, [1.0, np.inf]], [0, 1])]}
    assert gather(bad)[0][1] == [1, np.inf]
    with pytest.raises(tf.errors.InvalidArgumentError, match="on stage 1 the gradient of variable 'table' is not fin"):
        gather(bad, check=True)


def test_a_dense_tensor_of_slices_adds_rows_of_equal_index() -> None:
    node = make_node(OpName.DENSIFY, tensor("float32", 4, 2), **PLACE, variable="table")
    (found,), _ = HANDLERS[OpName.DENSIFY](make_context(), node, [tf.constant([A, B, C]), tf.constant([2, 0, 2])])
    np.testing.assert_array_equal(found, [B, [0, 0], [101, 202], [0, 0]])


def test_clipping_makes_dense_tensors_of_slices() -> None:
    node = make_node(OpName.CLIP, SCALAR, tensor("float32", 3, 1), **PLACE, limit=1.0, slices=1)
    inputs = [np.float64(2.0), np.float32(3.0), np.float32([[4.0], [6.0]]), np.int64([1, 1])]
    (dense, table), _ = HANDLERS[OpName.CLIP](make_context(), node, [tf.constant(x) for x in inputs])
    assert (dense.numpy(), table.numpy().tolist()) == (1.5, [[0], [5], [0]])


def test_keras_makes_dense_tensors_of_what_it_clips_by_the_global_norm() -> None:
    """The reason why ``clip`` does so: its norm is that of the slices, rows of equal index apart."""
    seen = []

    class Seeing(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            seen.append(gradient)

    slices = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([1, 1]), tf.constant([3, 1]))
    variable = tf.Variable(tf.zeros([3, 1]))
    for options in ({"global_clipnorm": 1.0}, {"clipnorm": 1.0}):
        Seeing(1.0, **options).apply([slices], [variable])
    np.testing.assert_allclose(seen[0].numpy(), [[0], [7 / 5], [0]], rtol=1e-6)
    assert isinstance(seen[1], tf.IndexedSlices)


def test_gradients_are_rounded_to_a_narrower_type_and_keep_their_own() -> None:
    exact, rounded = np.float32([1.0, 65520.0, 1e-9]), np.float32([1.0, np.inf, 0.0])
    found, same = run(OpName.ROUND, exact, np.float32(1.5), outputs=2, dtypes=("float16", "float16"))
    assert (found.dtype, same) == (np.float32, 1.5)
    np.testing.assert_array_equal(found, rounded)
