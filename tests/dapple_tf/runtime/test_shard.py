"""A data set of the rows that a rank needs of each batch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import BatchError, UsageError
from dapple_tf.graph_passes.analysis.input_needs import InputNeeds, RankInputs, Use
from dapple_tf.runtime.shard import beside_steps, take_rows
from tests.equality.small_models import chain, data, sgd, weights

NONE, OWN, ALL = Use.NONE, Use.OWN, Use.ALL


def needs(*uses: Use, replica: int = 0, replicas: int = 2) -> InputNeeds:
    """What a replica needs of batches of 8 samples in two micro-batches."""
    names = tuple(map(str, range(len(uses))))
    return InputNeeds(names, RankInputs(uses, (0,), replica, replicas), 2, replicas, 8)


def numbers(count: int) -> tf.data.Dataset:
    """Samples of two arguments: a number, and a row of two."""
    return tf.data.Dataset.range(count).map(lambda n: (n, tf.stack([n, -n])))


def as_lists(dataset: tf.data.Dataset) -> list[Any]:
    return [tuple(None if leaf is None else leaf.numpy().tolist() for leaf in element) for element in dataset]


def test_a_replica_gets_its_rows_of_every_micro_batch_and_of_a_short_last_batch() -> None:
    found = as_lists(take_rows(numbers(19), needs(OWN, NONE, replica=1), 8))
    assert found == [([2, 3, 6, 7], None), ([10, 11, 14, 15], None), ([17, 18], None)]


def test_rows_are_those_that_needs_names_for_batches_of_every_size() -> None:
    for size in range(1, 9):
        own = needs(OWN, ALL)
        ((rows, whole),) = as_lists(take_rows(numbers(size), own, 8))
        assert rows == [row for bounds in own.rows(size)["0"] for row in range(*bounds)]
        assert whole == [[n, -n] for n in range(size)]


def test_all_rows_and_the_rows_of_a_single_replica_are_whole_batches() -> None:
    assert as_lists(take_rows(numbers(3), needs(OWN, ALL, replicas=1), 2)) == [
        ([0, 1], [[0, 0], [1, -1]]),
        ([2], [[2, -2]]),
    ]


def test_ranks_that_shuffle_alike_get_the_parts_of_the_same_batches() -> None:
    def local(replica: int) -> list[Any]:
        tf.random.set_seed(1)
        shuffled = numbers(20).shuffle(20, seed=3).repeat(2)
        return as_lists(take_rows(shuffled, needs(OWN, NONE, replica=replica), 8))

    rows = [sorted(a + b) for (a, _), (b, _) in zip(local(0), local(1), strict=True)]
    assert [len(batch) for batch in rows] == [8] * 5
    assert sorted(itertools.chain(*rows)) == sorted([*range(20)] * 2)


def untouched(count: int | None) -> tf.data.Dataset:
    """Samples that raise when they are read; endless where ``count`` is None."""

    def touch(n: Any) -> Any:
        raise AssertionError("a sample was read")

    made = tf.data.Dataset.range(count or 1) if count else tf.data.Dataset.range(1).repeat()
    return made.map(lambda n: (tf.ensure_shape(tf.numpy_function(touch, [n], tf.int64), []), tf.stack([n, n])))


@pytest.mark.parametrize(("dataset", "batches"), [(untouched(19), 3), (untouched(16), 2), (untouched(None).take(9), 2)])
def test_a_rank_that_needs_nothing_reads_nothing(dataset: tf.data.Dataset, batches: int) -> None:
    assert as_lists(take_rows(dataset, needs(NONE, NONE), 8)) == [([], None)] * batches


def test_a_rank_that_needs_nothing_of_endless_samples_goes_on_without_end() -> None:
    found = take_rows(untouched(None), needs(NONE, NONE), 8)
    assert found.cardinality() == tf.data.INFINITE_CARDINALITY
    assert as_lists(found.take(2)) == [([], None)] * 2


def test_samples_of_unknown_number_are_counted() -> None:
    odd = numbers(19).filter(lambda n, _: n % 2 == 1)
    assert as_lists(take_rows(odd, needs(NONE, NONE), 8)) == [([], None)] * 2


def test_rows_of_unknown_shape_are_empty_where_they_are_not_needed() -> None:
    unknown = tf.data.Dataset.range(3).map(lambda n: (tf.numpy_function(np.float32, [n], tf.float32),))
    ((rows,),) = take_rows(unknown, needs(NONE), 8)
    assert (rows.shape, rows.dtype) == ((0,), tf.float32)


def test_one_process_gets_whole_batches_and_trains_on_them() -> None:
    x, y = data(11)
    matrices = weights(2)
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), stages=2, micro_batches=2, example_batch=data(4))
    assert step.needs.rows() == {"0": ((0, 4),), "1": ((0, 4),)}
    whole = weights(2)
    plain = dapple.pipeline(chain(whole), optimizer=sgd(), stages=2, micro_batches=2)
    for i, batch in enumerate(dapple.shard(tf.data.Dataset.from_tensor_slices((x, y)), step)):
        loss = step(*batch, local=True)
        assert float(loss) == float(plain(x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]))
    for found, wanted in zip(matrices, whole, strict=True):
        np.testing.assert_array_equal(found.numpy(), wanted.numpy())


def test_nested_and_single_arguments_keep_their_form() -> None:
    step = dapple.pipeline(
        lambda batch: tf.reduce_mean(tf.square(batch["x"] @ W)),
        optimizer=sgd(),
        stages=1,
        micro_batches=2,
        example_batch=({"x": data(4)[0]},),
    )
    samples = tf.data.Dataset.from_tensor_slices({"x": data(4)[0]})
    (batch,) = dapple.shard(samples, step)
    assert [sorted(argument) for argument in batch] == [["x"]]
    np.testing.assert_array_equal(batch[0]["x"], data(4)[0])


W = tf.Variable(np.eye(4), name="w")


def test_a_step_must_have_been_built() -> None:
    step = dapple.pipeline(chain(weights(2)), optimizer=sgd(), stages=2)
    with pytest.raises(UsageError, match="nothing has been built"):
        dapple.shard(numbers(3), step)
    with pytest.raises(UsageError, match="nothing has been built"):
        step.needs  # noqa: B018  # reading it raises


def test_samples_must_have_the_arguments_of_the_loss() -> None:
    step = dapple.pipeline(chain(weights(2)), optimizer=sgd(), stages=2, micro_batches=2, example_batch=data(4))
    with pytest.raises(BatchError, match=r"has arguments 0, but the step was built for arguments 0, 1: give a data"):
        dapple.shard(tf.data.Dataset.range(3), step)


@pytest.mark.parametrize(("chosen", "wanted"), [(None, 0), (3, 3)])  # 0: as many as there are cores
def test_a_data_set_is_read_in_threads_of_its_own_unless_the_user_chose(chosen: int | None, wanted: int) -> None:
    options = tf.data.Options()
    if chosen is not None:
        options.threading.private_threadpool_size = chosen
    found = beside_steps(tf.data.Dataset.range(4).with_options(options))
    assert found.options().threading.private_threadpool_size == wanted
    assert [int(element) for element in found] == [0, 1, 2, 3]
    assert beside_steps([1]) == [1]
