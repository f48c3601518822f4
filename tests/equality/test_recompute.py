"""Re-computation equals one device, and activations are really computed again, at the time they are needed."""

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

# --- equal to one device


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("skips, tied", ["layer0", "layer2/Tanh", "layer3"]),
        ("integers and booleans, split", True),
        ("dropout", ["drop_0", "dense_2"]),
        ("one micro-batch", True),
        ("tied", [False, True]),
        ("skips over two stages", True),
        ("aux, replicated", [True, False]),
        ("batch norm", True),
        ("batch norm", ["first", "dense_1"]),
        ("dropout", True),
        ("a GRU", True),
    ],
)
def test_recomputing_equals_one_device(name: str, recompute: Any) -> None:
    case = CASES[name]
    comparison = compare(
        case.make_problem(), case.batches(), in_turn=case.in_turn, **{**case.options, "recompute": recompute}
    )
    comparison.check(case.tolerance)
    assert comparison.step.plan.recomputed


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("DP 2, overlap, M = 1", True),
        ("2:1, overlap", True),
        ("tied, overlap", (0, 1, 4, 6, 7, 8)),
    ],
)
def test_a_plan_that_recomputes_equals_one_device(name: str, recompute: bool | tuple[int, ...]) -> None:
    case = CASES[name]
    plan = dataclasses.replace(case.options["plan"], recompute=recompute)
    comparison = compare(case.make_problem(), case.batches(), plan=plan)
    comparison.check(case.tolerance)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("skips, tied", True), ("dropout", ["drop_0", "dense_1"])],
)
def test_recomputing_under_zb_h1_equals_one_device(name: str, recompute: Any) -> None:
    case = CASES[name]
    options = {**case.options, "recompute": recompute, "schedule": "zb-h1"}
    comparison = compare(case.make_problem(), case.batches(), in_turn=case.in_turn, **options)
    comparison.check(case.tolerance)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_state_is_written_once_and_recomputed_layers_read_what_forward_read(micro_batches: int) -> None:
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
    comparison = compare(problem, batches, stages=1, micro_batches=micro_batches, recompute=True)
    comparison.check(TOLERANCE["float64"])
    assert int(count) == 1 + 2 * 2, "written once a step"


@pytest.mark.parametrize(
    ("micro_batches", "recompute"),
    [(1, True), (2, ["drop"]), (2, True), (1, ["drop"])],
)
def test_recomputed_layers_use_the_random_draw_of_forward(micro_batches: int, recompute: Any) -> None:
    """tf.nn.dropout draws from hidden state; the gradient is computed by hand from what it has dropped."""
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


def test_only_sizes_and_layers_that_are_not_recomputed_are_stashed() -> None:
    step = dapple.pipeline(
        chain(weights(4)), optimizer=sgd(), stages=["layer2"], micro_batches=2, recompute=["layer0", "layer2", "layer3"]
    )
    step.build(*data(8))
    assert [port.name for port in stash_of(step, 0)] == ["%layer1/Tanh:0"]
    # The loss is not recomputed, and stashes what it squares.
    assert [port.type.shape.dims for port in stash_of(step, 1) if port.type.dtype.name != "int32"] == [(None, WIDTH)]
    whole = dapple.pipeline(chain(weights(4)), optimizer=sgd(), stages=["layer2"], micro_batches=2, recompute=True)
    whole.build(*data(8))
    assert stash_of(whole, 0) == []
    assert {port.type.dtype.name for port in stash_of(whole, 1)} == {"int32"}


# --- kernels that TensorFlow runs


def recomputing(recompute: Any, loss_fn: Any = None, overlap: bool = False, **options: Any) -> tuple[Any, Any]:
    """Return a step of a chain of four layers that has run once, and its batch."""
    batch, loss_fn = data(64), loss_fn or chain(weights(4))
    step = dapple.pipeline(loss_fn, optimizer=sgd(), recompute=recompute, **options)
    if overlap:  # no option of pipeline, but a field of the plan
        step.build(*batch)
        step = dapple.pipeline(loss_fn, optimizer=sgd(), plan=dataclasses.replace(step.plan, overlap=True))
    step(*batch)
    return step, batch


def without_sizes(squared: bool) -> Any:
    """Return a loss of four layers (no mean) whose first gradient does not depend on forward, not even on sizes."""
    matrices = weights(4)

    def loss_fn(x: Any, y: Any) -> Any:
        for i, matrix in enumerate(matrices):
            with tf.name_scope(f"layer{i}"):
                x = tf.tanh(x @ matrix)
        with tf.name_scope("loss"):
            return tf.einsum("bi,bi->", x, x if squared else y) / 64

    return loss_fn


def forwards(kernels: Sequence[Kernel], op: str = "MatMul") -> list[tuple[int, Kernel]]:
    """Return the kernels of one op in forward or recomputed, each with the number of its layer."""
    own = [k for k in kernels if k.op == op and "layer" in k.name and "gradients" not in k.name]
    return [(int(kernel.name.rpartition("layer")[2][0]), kernel) for kernel in own]


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_activations_are_recomputed_after_forward_has_ended(micro_batches: int) -> None:
    """TensorFlow merges nothing and begins nothing early, though with one micro-batch it inlines both functions."""
    step, batch = recomputing(True, stages=1, micro_batches=micro_batches)
    ran = forwards(run_kernels(lambda: step(*batch)))
    assert [layer for layer, _ in ran] == [0, 1, 2, 3] * 2 * micro_batches
    for (_, last), (_, first) in zip(ran[3::8], ran[4::8], strict=True):
        assert first.begin >= last.end


@pytest.mark.filterwarnings("ignore:the loss of loss_fn goes through:dapple_tf.errors.DappleWarning")
@pytest.mark.parametrize(("squared", "stages"), [(True, 1), (False, ["loss"])])
def test_an_early_gradient_does_not_start_recomputation_before_forward_has_ended(squared: bool, stages: Any) -> None:
    """Stage 0 still waits for its own forward."""
    step, batch = recomputing(True, without_sizes(squared=squared), stages=stages, micro_batches=1)
    ran = forwards(run_kernels(lambda: step(*batch)))
    assert [layer for layer, _ in ran] == [0, 1, 2, 3] * 2
    assert ran[4][1].begin >= ran[3][1].end


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_only_the_named_layers_are_recomputed(micro_batches: int) -> None:
    step, batch = recomputing(["layer0", "layer2"], stages=["layer2"], micro_batches=micro_batches)
    kernels = run_kernels(lambda: step(*batch))
    for op in ("MatMul", "Tanh"):
        layers = [layer for layer, _ in forwards(kernels, op)]
        assert [layers.count(layer) for layer in range(4)] == [n * micro_batches for n in (2, 1, 2, 1)]


def test_a_run_is_recomputed_when_the_gradient_has_reached_it() -> None:
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
def test_a_backward_that_is_inlined_for_overlap_recomputes_as_late(micro_batches: int) -> None:
    """Though the first gradient is computed from the seed alone, which is known from the start."""
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
