"""Predicted bytes of small models, counted by hand."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.compiler import PlannedModel
from dapple_tf.errors import DappleWarning, LossError
from dapple_tf.frontend.capture import capture
from dapple_tf.frontend.shapes import infer_batch_axes
from dapple_tf.graph_passes.analysis.layers import find_layers
from dapple_tf.memory.predict import StageMemory, predict_plan_memory
from dapple_tf.memory.stash import StashedTensor
from dapple_tf.sharding import Sharding
from dapple_tf.staged_model import StagedModel, stage_model
from tests.dapple_tf.builders import make_plan

ROWS, WIDTH = 6, 8  # samples of a micro-batch, and the width of each layer
TENSOR, KERNEL, BIAS = ROWS * WIDTH * 4, WIDTH * WIDTH * 4, WIDTH * 4

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": keras.optimizers.Adam,
    "clipped": lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0),
}


def stage(
    loss: Callable[..., Any],
    batch: Any,
    start: str,
    samples: int,
    optimizer: str = "sgd",
    sharding: Sharding | None = None,
) -> StagedModel:
    """Return a loss cut before the layer ``start``; ``samples`` of a micro-batch."""
    captured, _ = infer_batch_axes(capture(loss, (batch,)), samples)
    layers = find_layers(captured.graph)
    return stage_model(captured, layers, [layers.find(start)], OPTIMIZERS[optimizer](), sharding=sharding)


def predict(model: StagedModel, micro_batches: int, samples: int, **options: Any) -> tuple[StageMemory, ...]:
    """Return the predicted memory of a model's two stages, for micro-batches of ``samples``."""
    replicas: Sequence[int] = options.pop("replicas", (1, 1))
    ranks, packs = options.pop("ranks", False), options.pop("packs", False)
    devices = tuple(range(replicas[0])), tuple(range(replicas[0], sum(replicas)))
    sizes = {"global_batch_size": samples * micro_batches, "micro_batch_size": samples, "micro_batches": micro_batches}
    plan = make_plan((0, 0, devices[0]), (1, 1, devices[1]), **sizes, **{"schedule": "dapple-a", **options})
    return predict_plan_memory(PlannedModel(model, plan, samples * micro_batches), ranks=ranks, packs=packs)


@functools.cache
def dense(optimizer: str = "sgd", shards: int = 0) -> StagedModel:
    """Return four dense layers with relu, two a stage; ``shards``: replicas that share the first stage's update out."""
    stack = [keras.layers.Dense(WIDTH, activation="relu", name=f"d{i}") for i in range(4)]
    net = keras.Sequential([keras.Input((WIDTH,)), *stack])
    sharding = Sharding((shards, 1), {}) if shards else None
    return stage(lambda x: tf.reduce_mean(tf.square(net(x))), tf.ones((24, WIDTH)), "d2", ROWS, optimizer, sharding)


def predict_dense(optimizer: str = "sgd", micro_batches: int = 4, **options: Any) -> tuple[StageMemory, ...]:
    return predict(dense(optimizer), micro_batches, ROWS, **options)


def test_weights_gradients_and_slots() -> None:
    weights = 2 * (KERNEL + BIAS)
    for memory in predict_dense():
        assert (memory.weights, memory.gradients, memory.slots, memory.copies) == (weights, weights, 0, 0)
    for memory in predict_dense("momentum"):
        assert (memory.slots, memory.fixed) == (weights, 3 * weights)
    for memory in predict_dense("adam"):
        assert memory.slots == 2 * weights


def test_micro_batches_of_given_sizes_count_as_the_largest() -> None:
    cut = {"global_batch_size": 12, "micro_batch_size": ROWS, "micro_batches": 4, "micro_batch_sizes": (1, 2, 3, ROWS)}
    plan = make_plan((0, 0, (0,)), (1, 1, (1,)), **cut)
    assert predict_plan_memory(PlannedModel(dense("sgd"), plan, 12), ranks=False) == predict_dense()


def test_a_single_micro_batch_needs_no_accumulation_buffers() -> None:
    """Its gradients are outputs of the backward function, and count there."""
    for memory in predict_dense(micro_batches=1):
        assert memory.gradients == 0
        assert memory.working["B"] >= 2 * (KERNEL + BIAS)
        assert memory.update >= 2 * (KERNEL + BIAS)


def test_the_stash_is_what_backward_reads() -> None:
    """The first stage stashes the results of its two relus; the second its own, and the tensor that it received."""
    first, second = predict_dense()
    assert first.stash == 2 * TENSOR
    assert [tensor for tensor in second.stashed if tensor.origin == "previous stage"] == [
        StashedTensor("previous stage", "B", TENSOR, second.stashed[0].name)
    ]
    whole = [tensor.bytes for tensor in second.stashed if tensor.bytes >= TENSOR and tensor.origin == "F"]
    assert whole == [TENSOR, TENSOR]
    assert 0 <= second.stash - 3 * TENSOR < 100  # and a few integers for the mean's gradient


def test_memory_while_a_backward_runs() -> None:
    """K stashes, the gradient received, the gradients of weights, and the chain of gradients at its widest."""
    first, second = predict_dense()
    weights = 2 * (KERNEL + BIAS)
    assert (first.in_flight, second.in_flight) == (2, 1)
    assert weights < first.working["B"] <= weights + 3 * TENSOR
    assert first.in_step == 2 * first.stash + TENSOR + first.working["B"]
    assert second.waiting == TENSOR
    assert second.in_step == second.stash + TENSOR + second.working["B"]  # one more tensor has been received
    assert first.peak == first.fixed + first.in_step


MIXED = "0F0 0F1 0I0 0B1 0W0; 1F0 1B0 1F1 1I1 1W1"


def test_whole_backwards_beside_split_ones_hold_the_same_tensors() -> None:
    """A whole backward counts the tensors that I would carry to W as stashed, so its working set is smaller by them."""
    found = predict_dense(micro_batches=2, schedule=MIXED)
    split = predict_dense(micro_batches=2, schedule="zb-h1")
    whole = predict_dense(micro_batches=2)
    for memory, halves, alone in zip(found, split, whole, strict=True):
        assert set(memory.working) == {"F", "B", "I", "W"}
        assert memory.stashed == halves.stashed
        carried = sum(tensor.bytes for tensor in memory.stashed if tensor.origin == "I")
        if memory.stage == 1:
            assert {**memory.working, **halves.working} == memory.working
            assert memory.working["B"] == alone.working["B"] - carried
        else:  # 0B1 comes before 0W0: the calls return their gradients, which are added in micro-batch order
            assert memory.working["B"] > alone.working["B"] - carried
            assert memory.working["W"] > halves.working["W"]
        assert (memory.weights, memory.gradients, memory.update) == (alone.weights, alone.gradients, alone.update)
    assert [memory.in_flight for memory in found] == [2, 1]


def test_the_memory_of_a_mixed_schedule_by_hand() -> None:
    first, second = predict_dense(micro_batches=2, schedule=MIXED)
    # While 0B1 runs, the stash and the gradient of micro-batch 0 wait for 0W0.
    assert first.in_step == 2 * first.stash + 2 * TENSOR + first.working["B"]
    # While 1B0 runs, micro-batch 1 has been received; B also has what I would pass to W.
    until_inputs = sum(t.bytes for t in second.stashed if (t.origin, t.last_use) == ("F", "I"))
    carried = sum(t.bytes for t in second.stashed if t.origin == "I")
    assert (TENSOR <= until_inputs < TENSOR + 100, carried) == (True, 2 * TENSOR)
    assert second.in_step == 2 * TENSOR + TENSOR + until_inputs + carried + second.working["B"]


def test_the_slices_of_whole_and_split_backwards_stay_until_the_update() -> None:
    kept = [predict(embedding(), 2, ROWS, schedule=name)[0] for name in ("dapple-a", "zb-h1", MIXED)]
    assert [memory.slices for memory in kept] == [ROWS * IDS * (WIDTH * 4 + 4)] * 3
    assert len({memory.update for memory in kept}) == 1


def test_only_gpipe_needs_more_memory_for_more_micro_batches() -> None:
    for schedule in ("dapple-a", "dapple-b"):
        few, many = (predict_dense(micro_batches=m, schedule=schedule) for m in (4, 16))
        assert [memory.in_step for memory in few] == [memory.in_step for memory in many]
    few, many = (predict_dense(micro_batches=m, schedule="gpipe") for m in (4, 16))
    for before, after in zip(few, many, strict=True):
        assert after.in_step - before.in_step >= 12 * before.stash


def test_replicas_stash_their_share_of_each_micro_batch() -> None:
    first, second = predict_dense(replicas=(2, 1))
    alone, _ = predict_dense()
    assert first.stash == alone.stash // 2
    assert first.weights == alone.weights
    assert first.update == alone.update + first.gradients  # the sum over replicas
    assert second.stash > 2 * first.stash


def test_gradients_of_replicas_on_other_ranks_arrive_during_the_last_backward() -> None:
    """The first message of a ring of three has a third of them; in one process nothing is sent."""
    sent = 2 * (KERNEL + BIAS)
    (ring, last), (local, _) = (predict_dense(replicas=(3, 1), ranks=ranks) for ranks in (True, False))
    assert (ring.arriving, last.arriving, local.arriving) == (-(-sent // 3), 0, 0)
    many = 16 * ROWS  # so that activations take more than an update of the weights
    ring, local = (predict(dense(), 1, many, replicas=(3, 1), ranks=ranks)[0] for ranks in (True, False))
    assert ring.in_step == local.in_step + ring.transit + ring.arriving > ring.update


def test_a_replica_of_a_sharded_update_is_sent_what_it_sums_by_all_others() -> None:
    own = KERNEL + BIAS  # each of two replicas updates one layer
    for replicas, shared in ((2, own), (1, 0)):
        model = dense("sgd", replicas)
        memory, _ = predict(model, 4, ROWS, replicas=(replicas, 1), ranks=True, shard_optimizer=replicas > 1)
        assert memory.arriving == shared
        assert memory.weights == (own if replicas > 1 else 2 * own)


def test_products_that_pack_their_operands_work_with_more() -> None:
    """The widest point of backward is a product with a kernel or of two tensors."""
    for packing, plain in zip(predict_dense(packs=True), predict_dense(), strict=True):
        assert 2 * TENSOR <= packing.working["B"] - plain.working["B"] <= TENSOR + KERNEL
        assert packing.stash == plain.stash


def loss_in_pairs() -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a loss whose second stage, which starts at "pairs", takes its samples in pairs."""
    first, second = (tf.Variable(tf.random.normal([WIDTH, WIDTH], seed=i), name=f"w{i}") for i in range(2))

    def loss_fn(x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("alone"):
            h = tf.tanh(x @ first)
        with tf.name_scope("pairs"):
            return tf.reduce_mean(tf.tanh(tf.reshape(h, [-1, 2, WIDTH]) @ second))

    return loss_fn


def test_each_stage_is_predicted_for_its_own_share_of_a_micro_batch() -> None:
    """The second stage would refuse the one sample that a replica of the first has."""
    model = stage(loss_in_pairs(), tf.ones([8, WIDTH]), "pairs", 2)
    first, second = predict(model, 4, 2, replicas=(2, 1))
    assert first.stash == WIDTH * 4  # the result of tanh
    assert [tensor.bytes for tensor in second.stashed if tensor.origin == "previous stage"] == [2 * WIDTH * 4]


def test_a_model_that_cannot_run_on_a_micro_batch_is_refused() -> None:
    with pytest.raises(LossError, match="cannot run on a micro-batch of 3 samples"):
        dapple.pipeline(
            loss_in_pairs(),
            optimizer=keras.optimizers.SGD(0.1),
            stages=["pairs"],
            micro_batches=2,
            example_batch=(tf.ones([6, WIDTH]),),
            inexact="allow",
        )


def test_clipping_by_the_global_norm_allocates_clipped_gradients() -> None:
    clipped, _ = predict_dense("clipped")
    plain, _ = predict_dense()
    assert clipped.update == plain.update + plain.gradients


IDS, TABLE_ROWS = 5, 10_000  # of a sample, and rows of the table


@functools.cache
def embedding(optimizer: str = "sgd") -> StagedModel:
    """Return a table, looked up in the first stage, and a dense layer in the second."""
    table = keras.layers.Embedding(TABLE_ROWS, WIDTH, name="table")
    head = keras.layers.Dense(WIDTH, name="head")
    table.build()
    head.build((None, WIDTH))
    ids = tf.zeros([24, IDS], tf.int32)
    return stage(lambda x: tf.reduce_mean(head(tf.reduce_mean(table(x), 1))), ids, "head", ROWS, optimizer)


def test_the_slices_of_all_micro_batches_stay_until_the_update() -> None:
    """No buffer of the table's size is allocated; for each id there is a row of floats, and an index."""
    slices = ROWS * IDS * (WIDTH * 4 + 4)
    few, many = (predict(embedding(), m, ROWS)[0] for m in (4, 16))
    for memory, micro_batches in ((few, 4), (many, 16)):
        assert (memory.gradients, memory.slices) == (0, slices)
        assert memory.update == 2 * micro_batches * slices  # one after the other, and gathered
        assert memory.in_step < TABLE_ROWS * WIDTH * 4
    assert predict(embedding(), 4, ROWS)[1].slices == 0


def test_slices_of_replicas_are_gathered_on_the_first() -> None:
    alone, shared = (predict(embedding(), 4, ROWS, replicas=(r, 1))[0] for r in (1, 2))
    assert shared.slices == alone.slices // 2
    assert shared.update == alone.update


def test_slices_that_are_clipped_by_the_global_norm_become_dense() -> None:
    plain, clipped = (predict(embedding(name), 4, ROWS)[0] for name in ("sgd", "clipped"))
    assert clipped.update >= plain.update // 2 + TABLE_ROWS * WIDTH * 4


def test_state_that_forward_writes_is_copied() -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.BatchNormalization(name="norm")])
    head = keras.layers.Dense(WIDTH, name="head")
    head.build((None, WIDTH))
    staged = stage(lambda x: tf.reduce_mean(head(model(x, training=True))), tf.ones([8, WIDTH]), "head", 4)
    first, second = predict(staged, 2, 4)
    assert (first.weights, first.copies) == (4 * BIAS, 2 * BIAS)  # scale, offset; and the two moving averages
    assert second.copies == 0


@pytest.mark.parametrize("kind", ["gru", "lookup", "mask"])
def test_other_models_are_predicted_too(kind: str) -> None:
    """Loops, whose insides are not counted; integers; lengths that only the data tells."""
    batch: Any = tf.ones([8, 5], tf.int32) if kind == "lookup" else tf.ones([8, 5, 4])
    layers = {
        "gru": [keras.layers.Dense(2, name="a"), keras.layers.GRU(3, name="b", return_sequences=True)],
        "lookup": [keras.layers.Embedding(7, 3, name="a"), keras.layers.Dense(2, name="b")],
        "mask": [keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")],
    }[kind]
    model = keras.Sequential([keras.Input(batch.shape[1:], dtype=batch.dtype), *layers])

    def loss(x: tf.Tensor) -> tf.Tensor:
        result = tf.boolean_mask(model(x), tf.reduce_all(x > 0, [1, 2])) if kind == "mask" else model(x)
        return tf.reduce_mean(tf.square(result))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DappleWarning)  # of means that depend on the data: nothing is trained here
        memory = predict(stage(loss, batch, "b", 4), 2, 4)
    assert all(stage.in_step > 0 for stage in memory)
    assert [stage.loops > 0 for stage in memory] == [False, kind == "gru"]
