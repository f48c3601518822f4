"""Re-computation: what one device computes, and activations that are really made again, when they are needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from tests.dapple_tf.distributed.programs.cases import CASES
from tests.equality.one_device import TOLERANCE, Problem, compare
from tests.equality.small_models import WIDTH, chain, data, sgd, weights
from tests.kernels import Kernel, run_kernels

# --- equal to one device, whatever is in the model


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("one micro-batch", True),
        ("tied", [False, True]),
        ("skips over two stages", True),
        ("skips, tied", ["layer0", "layer2/Tanh", "layer3"]),
        ("aux, replicated", [True, False]),
        ("integers and booleans, split", True),
        ("batch norm", True),
        ("batch norm", ["first", "dense_1"]),
        ("dropout", True),
        ("dropout", ["drop_0", "dense_2"]),
        ("a GRU", True),
    ],
)
def test_it_equals_one_device(name: str, recompute: Any) -> None:
    case = CASES[name]
    comparison = compare(
        case.make_problem(), case.batches(), in_turn=case.in_turn, **{**case.options, "recompute": recompute}
    )
    comparison.check(case.tolerance)
    assert comparison.step.plan.recomputed


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("DP 2, overlap, M = 1", True), ("2:1, overlap", True), ("tied, overlap", (0, 1, 4, 6, 7, 8))],
)
def test_a_plan_that_says_so_equals_one_device(name: str, recompute: bool | tuple[int, ...]) -> None:
    case = CASES[name]
    plan = dataclasses.replace(case.options["plan"], recompute=recompute)
    comparison = compare(case.make_problem(), case.batches(), plan=plan)
    comparison.check(case.tolerance)


@pytest.mark.parametrize(("name", "recompute"), [("skips, tied", True), ("dropout", ["drop_0", "dense_1"])])
def test_with_gradients_of_weights_put_off_it_equals_one_device(name: str, recompute: Any) -> None:
    case = CASES[name]
    options = {**case.options, "recompute": recompute, "schedule": "zb-h1"}
    comparison = compare(case.make_problem(), case.batches(), in_turn=case.in_turn, **options)
    comparison.check(case.tolerance)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_state_is_written_once_and_what_was_read_of_it_is_what_forward_read(micro_batches: int) -> None:
    """A layer is scaled by how often it was called: read before it is written, and after."""
    matrix, (count,) = weights(2), [tf.Variable(1, name="count", trainable=False)]

    def loss_fn(x: Any, y: Any) -> Any:
        for i in range(2):
            with tf.name_scope(f"layer{i}"):
                before = tf.cast(count, x.dtype)
                x = tf.tanh(x @ matrix[i]) * before
                x = x / tf.cast(count.assign_add(i + 1), x.dtype) if i else x
        return tf.reduce_mean(tf.reduce_sum(tf.square(x - y), 1))

    problem = Problem(loss_fn, {"w0": matrix[0], "w1": matrix[1], "count": count}, sgd)
    batches = [data(6), data(6, seed=2)]
    comparison = compare(problem, batches, in_turn=micro_batches, stages=1, micro_batches=micro_batches, recompute=True)
    comparison.check(TOLERANCE["float64"])
    assert int(count) == 1 + 2 * 2 * micro_batches


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("recompute", [True, ["drop"]])
def test_both_runs_see_the_same_draw(micro_batches: int, recompute: Any) -> None:
    """tf.nn.dropout draws from hidden state; what it has dropped tells the gradient, by hand."""
    (matrix,) = weights(1)
    matrix.assign(np.eye(WIDTH))

    def loss_fn(x: Any, y: Any) -> Any:
        with tf.name_scope("dense"):
            h = tf.exp(x @ matrix)
        with tf.name_scope("drop"):
            d = tf.nn.dropout(h, 0.5)
        with tf.name_scope("loss"):
            return tf.reduce_mean(tf.reduce_sum(tf.square(d) * y, 1)), d

    x, y = data(64)
    step = dapple.pipeline(
        loss_fn,
        optimizer=keras.optimizers.SGD(1.0),
        stages=1,
        micro_batches=micro_batches,
        recompute=recompute,
    )
    before = matrix.numpy()
    _, dropped = step(x, y)
    h = np.exp(x.numpy() @ before)
    kept = dropped.numpy() != 0
    assert 0.2 < kept.mean() < 0.8
    np.testing.assert_allclose(dropped, np.where(kept, 2 * h, 0), rtol=1e-12)
    gradient = x.numpy().T @ (2 * np.where(kept, 2 * h, 0) * y.numpy() * 2 * h) / 64
    np.testing.assert_allclose(before - matrix.numpy(), gradient, rtol=1e-9)
    masks = [port for port in stash_of(step, 0) if port.type.dtype.name == "bool"]
    assert len(masks) == 1
    drawn = [node for node in step.graph.function("stage0/backward").graph.nodes if node.op == "RandomUniform"]
    assert not drawn


# --- what is stashed


def stash_of(step: Any, stage: int) -> list[Any]:
    return [port for _, port in step.graph.function(f"stage{stage}/forward").output_ports("stash")]


def test_nothing_is_stashed_but_sizes_and_the_layers_that_are_kept() -> None:
    step = dapple.pipeline(
        chain(weights(4)), optimizer=sgd(), stages=["layer2"], micro_batches=2, recompute=["layer0", "layer2", "layer3"]
    )
    step.build(*data(8))
    assert [port.name for port in stash_of(step, 0)] == ["%layer1/Tanh:0"]
    # The loss is not among the layers that were named; it keeps what is squared.
    assert [port.type.shape.dims for port in stash_of(step, 1) if port.type.dtype.name != "int32"] == [(None, WIDTH)]
    whole = dapple.pipeline(chain(weights(4)), optimizer=sgd(), stages=["layer2"], micro_batches=2, recompute=True)
    whole.build(*data(8))
    assert stash_of(whole, 0) == []
    assert {port.type.dtype.name for port in stash_of(whole, 1)} == {"int32"}


# --- what TensorFlow runs


def recomputing(recompute: Any, loss_fn: Any = None, overlap: bool = False, **options: Any) -> tuple[Any, Any]:
    """A step of a chain of four layers that has run, and its batch."""
    batch, loss_fn = data(64), loss_fn or chain(weights(4))
    asked = dapple.pipeline(loss_fn, optimizer=sgd(), recompute=recompute, **options)
    asked.build(*batch)
    step = dapple.pipeline(loss_fn, optimizer=sgd(), plan=dataclasses.replace(asked.plan, overlap=overlap))
    step(*batch)
    return step, batch


def without_sizes(squared: bool) -> Any:
    """A loss of four layers (no mean) whose first gradient is known before forward has run, sizes and all."""
    matrices = weights(4)

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ matrix)
        with tf.name_scope("loss"):
            return tf.einsum("bi,bi->", x, x if squared else y) / 64

    return loss_fn


def forwards(kernels: Sequence[Kernel], op: str = "MatMul") -> list[tuple[int, Kernel]]:
    """The kernels of one op that forward has, or that are made again: the number of the layer, and the kernel."""
    own = [k for k in kernels if k.op == op and "layer" in k.name and "gradients" not in k.name]
    return [(int(kernel.name.rpartition("layer")[2][0]), kernel) for kernel in own]


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_activations_are_made_again_when_forward_has_ended(micro_batches: int) -> None:
    """TensorFlow has merged nothing, nor begun early: with one micro-batch it inlines both, and knows the seed."""
    step, batch = recomputing(True, stages=1, micro_batches=micro_batches)
    ran = forwards(run_kernels(lambda: step(*batch)))
    assert [layer for layer, _ in ran] == [0, 1, 2, 3] * 2 * micro_batches
    for (_, last), (_, first) in zip(ran[3::8], ran[4::8], strict=True):
        assert first.begin >= last.end


@pytest.mark.filterwarnings("ignore:the loss of loss_fn goes through:dapple_tf.errors.DappleWarning")
@pytest.mark.parametrize(("squared", "stages"), [(True, 1), (False, ["loss"])])
def test_a_gradient_that_comes_before_forward_has_ended_does_not_begin_them(squared: bool, stages: Any) -> None:
    """The first gradient is known before: stage 0 waits for its own forward."""
    step, batch = recomputing(True, without_sizes(squared=squared), stages=stages, micro_batches=1)
    ran = forwards(run_kernels(lambda: step(*batch)))
    assert [layer for layer, _ in ran] == [0, 1, 2, 3] * 2
    assert ran[4][1].begin >= ran[3][1].end


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_only_the_layers_that_were_named_are_made_again(micro_batches: int) -> None:
    step, batch = recomputing(["layer0", "layer2"], stages=["layer2"], micro_batches=micro_batches)
    kernels = run_kernels(lambda: step(*batch))
    for op in ("MatMul", "Tanh"):
        layers = [layer for layer, _ in forwards(kernels, op)]
        assert [layers.count(layer) for layer in range(4)] == [n * micro_batches for n in (2, 1, 2, 1)]


def test_a_run_is_made_again_when_the_gradient_has_come_to_it() -> None:
    step, batch = recomputing(["layer0", "layer2"], stages=1, micro_batches=3)
    kernels = run_kernels(lambda: step(*batch))
    made = forwards(kernels)
    gradients = {
        layer: [k for k in kernels if k.op == "TanhGrad" and f"gradients/layer{layer}/" in k.name] for layer in range(4)
    }
    assert [layer for layer, _ in made] == [0, 1, 2, 3, 2, 0] * 3
    for m in range(3):
        (_, later), (_, earlier) = made[6 * m + 4 : 6 * m + 6]
        assert gradients[3][m].end <= later.begin
        assert later.end <= gradients[2][m].begin
        assert gradients[1][m].end <= earlier.begin
        assert earlier.end <= gradients[0][m].begin


@pytest.mark.filterwarnings("ignore:the loss of loss_fn goes through:dapple_tf.errors.DappleWarning")
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_backward_that_is_inlined_for_overlap_makes_them_again_as_late(micro_batches: int) -> None:
    """Though the seed is known from the start, and the first gradient is computed from it alone."""
    options = {"stages": 1, "replicas": [2], "micro_batches": micro_batches}
    step, batch = recomputing(True, without_sizes(squared=True), overlap=True, **options)
    ran = forwards(run_kernels(lambda: step(*batch)))
    assert len(ran) == 4 * 2 * 2 * micro_batches
    inlined = [(layer, kernel) for layer, kernel in ran if "backward" in kernel.name]
    assert len(inlined) == 4 * 2
    begins = sorted(kernel.begin for layer, kernel in inlined if layer == 0)
    # Each replica has run its other micro-batches twice by then, and the last one forward.
    ends = sorted(kernel.end for layer, kernel in ran if layer == 3 and "backward" not in kernel.name)
    before = 2 * micro_batches - 1
    assert begins[0] >= ends[before - 1]
    assert begins[1] >= ends[2 * before - 1]
