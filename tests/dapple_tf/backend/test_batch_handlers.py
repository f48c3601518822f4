"""Cutting a batch into micro-batches and replicas' shares, and putting results together."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.backend.batch_handlers import HANDLERS
from dapple_tf.graph_passes.analysis.row_bounds import replica_bounds
from dapple_tf.graph_passes.ir.graph import Attr, TensorType, tensor
from dapple_tf.graph_passes.ir.ops import OpName
from tests.dapple_tf.backend.builders import make_context, make_node


def run(op: OpName, *inputs: Any, outputs: tuple[TensorType, ...] = (), **attrs: Attr) -> list[Any]:
    """Return the outputs of a node as NumPy arrays."""
    results, ends = HANDLERS[op](make_context(), make_node(op, *outputs, **attrs), [tf.constant(x) for x in inputs])
    assert not ends
    return [result.numpy() for result in results]


def slice_rows(rows: Any, m: int, micro_batches: int, i: int = 0, replicas: int = 1, **more: Attr) -> list[Any]:
    """Return the share and the rows that replica ``i`` takes of micro-batch ``m``."""
    place = {"micro_batch": m, "micro_batches": micro_batches, "replica": i, "replicas": replicas}
    return run(OpName.SLICE, np.int64(len(rows)), rows, **place, **more)


def test_the_batch_size_is_the_length_of_axis_0() -> None:
    (size,) = run(OpName.BATCH_SIZE, np.zeros((7, 3), np.float32))
    assert (size, size.dtype) == (7, np.int64)


def test_ten_samples_in_four_micro_batches_have_two_three_two_and_three() -> None:
    rows = np.arange(10)
    found = [slice_rows(rows, m, 4) for m in range(4)]
    assert [list(part) for _, part in found] == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]
    np.testing.assert_array_equal([share for share, _ in found], [0.2, 0.3, 0.2, 0.3])


def test_replicas_of_an_uneven_micro_batch_take_each_row_once() -> None:
    rows = np.arange(20, 30)
    found = [[slice_rows(rows, m, 2, i, 3)[1] for i in range(3)] for m in range(2)]
    assert [[list(part) for part in parts] for parts in found] == [
        [[20], [21, 22], [23, 24]],
        [[25], [26, 27], [28, 29]],
    ]


def test_micro_batches_of_given_sizes_have_them_or_their_proportion() -> None:
    found = [slice_rows(np.arange(8), m, 3, sizes=(2, 1, 5)) for m in range(3)]
    assert [list(part) for _, part in found] == [[0, 1], [2], [3, 4, 5, 6, 7]]
    np.testing.assert_array_equal([share for share, _ in found], [2 / 8, 1 / 8, 5 / 8])
    found = [slice_rows(np.arange(6), m, 3, sizes=(2, 1, 5)) for m in range(3)]
    assert [list(part) for _, part in found] == [[0], [1], [2, 3, 4, 5]]
    bounds = run(OpName.ROW_BOUNDS, np.int64(8), micro_batch=2, micro_batches=3, replica=1, replicas=2, sizes=(2, 1, 5))
    np.testing.assert_array_equal(bounds, [[5, 8, 8]])


def test_a_single_micro_batch_on_one_replica_is_the_whole_batch() -> None:
    share, rows = slice_rows(np.arange(5.0), 0, 1)
    assert share == 1
    np.testing.assert_array_equal(rows, np.arange(5.0))


@pytest.mark.parametrize(
    ("size", "micro_batches", "replicas", "sizes"),
    [(11, 2, 3, ()), (8, 4, 1, ()), (7, 3, 2, ()), (5, 1, 2, ()), (11, 3, 2, (2, 3, 6)), (9, 2, 3, (8, 3))],
)
def test_a_slice_of_own_rows_is_cut_where_they_are(
    size: int, micro_batches: int, replicas: int, sizes: tuple[int, ...]
) -> None:
    """A tensor of a replica's own rows gives the same slices as the whole one beside it."""
    whole = np.arange(10, 10 + size)
    cut: dict[str, Attr] = {"sizes": sizes} if sizes else {}
    place = {"micro_batches": micro_batches, "replicas": replicas, **cut}
    for i in range(replicas):
        bounds = [replica_bounds(size, m, micro_batches, i, replicas, sizes) for m in range(micro_batches)]
        own = np.concatenate([whole[first:end] for first, end in bounds])
        for m in range(micro_batches):
            _, rows = slice_rows(whole, m, micro_batches, i, replicas, **cut)
            share, *found = run(OpName.SLICE, np.int64(size), whole, own, **place, micro_batch=m, replica=i, local=(1,))
            assert share == len(rows) / size
            for part in found:
                np.testing.assert_array_equal(part, rows)


def overlap(rows: int, i: int, senders: int, j: int, receivers: int) -> bool:
    """Return whether sender ``i`` has rows of receiver ``j``, where each takes its part of ``rows`` rows."""
    return rows * i // senders < rows * (j + 1) // receivers and rows * j // receivers < rows * (i + 1) // senders


@pytest.mark.parametrize(("senders", "receivers"), [(1, 3), (3, 1), (2, 3), (3, 2), (4, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_split_and_concat_give_each_receiver_its_rows(senders: int, receivers: int, axis: int) -> None:
    """The second of two micro-batches of 13 samples, which has 7 rows, as every tensor's axis 0 or 1."""
    batch, micro_batch = 13, np.arange(7 * 2).reshape(7, 2)
    whole = micro_batch if axis == 0 else micro_batch.T
    place = {"micro_batch": 1, "micro_batches": 2}
    pieces: dict[tuple[int, int], Any] = {}
    for i in range(senders):
        own = np.take(whole, range(7 * i // senders, 7 * (i + 1) // senders), axis)
        targets = tuple(j for j in range(receivers) if overlap(7, i, senders, j, receivers))
        attrs = {**place, "replica": i, "replicas": senders, "of": receivers, "receivers": targets, "axes": (axis,)}
        found = run(OpName.SPLIT, np.int64(batch), own, **attrs)
        pieces |= {(i, j): piece for j, piece in zip(targets, found, strict=True)}
    for j in range(receivers):
        own = [piece for (_, receiver), piece in sorted(pieces.items()) if receiver == j]
        (joined,) = run(OpName.CONCAT, *own, **place, replica=j, axes=(axis,), pieces=len(own))
        expected = np.take(whole, range(7 * j // receivers, 7 * (j + 1) // receivers), axis)
        np.testing.assert_array_equal(joined, expected)


def test_concat_groups_the_pieces_of_each_tensor() -> None:
    a, b = np.arange(4).reshape(2, 2), np.arange(10, 14).reshape(2, 2)
    rows, columns = run(OpName.CONCAT, a[:1], a[1:], b[:, :1], b[:, 1:], axes=(0, 1), pieces=2)
    np.testing.assert_array_equal(rows, a)
    np.testing.assert_array_equal(columns, b)


def test_add_sums_the_gradients_of_each_tensor_over_the_replicas() -> None:
    first, second = run(OpName.ADD, [1.0, 2.0], [10.0, 20.0], 3.0, 4.0, pieces=2)
    np.testing.assert_array_equal(first, [11, 22])
    assert second == 7


def test_add_of_no_gradients_is_zero() -> None:
    (zeros,) = run(OpName.ADD, outputs=(tensor("float32", 2, 3),), pieces=0)
    np.testing.assert_array_equal(zeros, np.zeros((2, 3), np.float32))


def test_what_travels_together_is_passed_on_as_it_is() -> None:
    first, second = run(OpName.TOGETHER, [1.0, 2.0], 3.0)
    np.testing.assert_array_equal(first, [1, 2])
    assert second == 3


def test_the_seed_of_backward_is_the_share_in_the_dtype_of_the_loss() -> None:
    (seed,) = run(OpName.LOSS_GRADIENT, np.float64(0.25), outputs=(tensor("float16"),))
    assert (seed, seed.dtype) == (0.25, np.float16)


def test_the_seed_of_a_scaled_loss_is_the_share_times_the_scale() -> None:
    """The scale has the dtype of the loss: one that float16 cannot hold is infinite, as on one device."""
    for scale, expected in ((2.0**15, 2.0**13), (np.inf, np.inf)):
        (seed,) = run(OpName.LOSS_GRADIENT, np.float64(0.25), np.float16(scale), outputs=(tensor("float16"),))
        assert (seed, seed.dtype) == (expected, np.float16)
        (seed,) = run(OpName.LOSS_GRADIENT, np.float16(scale), outputs=(tensor("float16"),))
        assert seed == np.float16(scale)


def test_the_mean_weighs_micro_batches_by_their_samples() -> None:
    (loss,) = run(OpName.MERGE, np.float32(1.0), 0.25, np.float32(5.0), 0.75, kind="mean")
    assert (loss, loss.dtype) == (4.0, np.float32)


def test_outputs_are_merged_as_their_kind_says() -> None:
    (rows,) = run(OpName.MERGE, [1, 2], 0.5, [3], 0.5, kind="concat")
    assert list(rows) == [1, 2, 3]
    (total,) = run(OpName.MERGE, 1, 0.5, 3, 0.5, kind="sum")
    assert total == 4
    (only,) = run(OpName.MERGE, [1, 2], 1.0, kind="concat")
    assert list(only) == [1, 2]


def test_a_checked_loss_must_be_finite() -> None:
    (loss,) = run(OpName.MERGE, 1.0, 1.0, kind="mean", check=True)
    assert loss == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="the loss is not finite"):
        run(OpName.MERGE, 1.0, 0.5, float("nan"), 0.5, kind="mean", check=True)


@pytest.mark.parametrize(
    ("axis", "outer", "counts"), [(0, 1, (2, 3, 0)), (1, 1, (4, 1)), (0, 2, (2, 3)), (1, 3, (1, 2))]
)
def test_rows_of_micro_batches_are_put_together_and_cut_again(axis: int, outer: int, counts: tuple[int, ...]) -> None:
    """Each piece has ``outer`` blocks of its samples; the whole has ``outer`` blocks of all samples."""
    blocks = np.arange(outer * sum(counts) * 2.0).reshape(outer, sum(counts), 2)
    ends = np.cumsum((0, *counts))
    parts = [blocks[:, low:high].reshape(-1, 2) for low, high in itertools.pairwise(ends)]
    whole = blocks.reshape(-1, 2)
    pieces = [part if axis == 0 else part.T for part in parts]
    attrs = {"axes": (axis,), "outer": (outer,), "pieces": len(pieces)}
    found, lengths = run(OpName.GATHER_ROWS, *pieces, **attrs)
    np.testing.assert_array_equal(found, whole if axis == 0 else whole.T)
    assert list(lengths) == [outer * count for count in counts]
    for piece, cut in zip(pieces, run(OpName.CUT_ROWS, found, lengths, **attrs), strict=True):
        np.testing.assert_array_equal(cut, piece)


def test_several_tensors_of_rows_are_cut_each_by_its_own_lengths() -> None:
    attrs = {"axes": (0, 0), "outer": (1, 1), "pieces": 2}
    first, second = np.arange(3.0), np.arange(6)
    first_whole, second_whole, *lengths = run(OpName.GATHER_ROWS, first[:1], first[1:], second[:4], second[4:], **attrs)
    np.testing.assert_array_equal(first_whole, first)
    np.testing.assert_array_equal(second_whole, second)
    cut = run(OpName.CUT_ROWS, first, second, *lengths, **attrs)
    assert [list(piece) for piece in cut] == [[0], [1, 2], [0, 1, 2, 3], [4, 5]]


def test_row_bounds_are_the_rows_that_a_replica_takes_and_the_batch_size() -> None:
    place = {"micro_batch": 1, "micro_batches": 2, "replica": 2, "replicas": 3}
    (found,) = run(OpName.ROW_BOUNDS, np.int64(10), **place)
    assert (list(found), found.dtype) == ([8, 10, 10], np.int64)


def test_row_bounds_without_a_micro_batch_are_the_whole_batch() -> None:
    (found,) = run(OpName.ROW_BOUNDS, np.int64(10), replica=0, stage=0)
    assert (list(found), found.dtype) == ([0, 10, 10], np.int64)


def test_the_seed_of_a_sum_is_one_in_the_dtype_of_the_loss() -> None:
    (seed,) = run(OpName.LOSS_GRADIENT, outputs=(tensor("float16"),))
    assert (seed, seed.dtype, seed.shape) == (1, np.float16, ())


def test_a_shared_output_is_that_of_the_first_micro_batch() -> None:
    (found,) = run(OpName.MERGE, [1, 2], 0.5, [3, 4], 0.5, kind="first")
    assert list(found) == [1, 2]
    (text,) = run(OpName.MERGE, "a", 0.5, "b", 0.5, kind="first")
    assert text == b"a"


def test_a_minibatch_of_a_window_is_its_part_of_the_rows_of_each_tensor() -> None:
    """Minibatch m of W has rows [N m / W, N (m + 1) / W)."""
    rows, labels = np.arange(22.0).reshape(11, 2), np.arange(11)
    found = [run(OpName.MINIBATCH, np.int64(11), rows, labels, minibatch=m, minibatches=4) for m in range(4)]
    assert [list(part) for _, part in found] == [[0, 1], [2, 3, 4], [5, 6, 7], [8, 9, 10]]
    np.testing.assert_array_equal(np.concatenate([part for part, _ in found]), rows)


def test_micro_batches_that_are_numbered_through_a_window_are_cut_from_their_minibatch() -> None:
    rows = np.arange(5)  # those of the second of two minibatches of three micro-batches
    found = [slice_rows(rows, m, 3) for m in (3, 4, 5)]
    assert [list(part) for _, part in found] == [[0], [1, 2], [3, 4]]
    np.testing.assert_array_equal([share for share, _ in found], [0.2, 0.4, 0.4])
    (bounds,) = run(OpName.ROW_BOUNDS, np.int64(5), micro_batch=4, micro_batches=3, replica=0, replicas=1)
    assert list(bounds) == [1, 3, 5]


def test_outputs_of_minibatches_are_merged_as_their_kind_says() -> None:
    """The mean is that of the minibatches, whatever samples each has."""
    (mean,) = run(OpName.MERGE_MINIBATCHES, np.float32(1), np.float32(2), np.float32(6), kind="mean")
    assert (mean, mean.dtype) == (3, np.float32)
    (losses,) = run(OpName.MERGE_MINIBATCHES, 1.0, 2.0, 6.0, kind="stack")
    assert list(losses) == [1, 2, 6]
    (total,) = run(OpName.MERGE_MINIBATCHES, 1, 2, 6, kind="sum")
    assert total == 9
    (rows,) = run(OpName.MERGE_MINIBATCHES, [1, 2], [3], kind="concat")
    assert list(rows) == [1, 2, 3]
    (first,) = run(OpName.MERGE_MINIBATCHES, "a", "b", kind="first")
    assert first == b"a"


@pytest.mark.parametrize("kind", ["mean", "sum", "concat", "first"])
def test_outputs_of_a_window_of_one_minibatch_are_its_own(kind: str) -> None:
    (only,) = run(OpName.MERGE_MINIBATCHES, [1.0, 5.0], kind=kind)
    assert list(only) == [1, 5]
