"""Behaviour of a step besides its numbers: variables, batches of any size, outputs, devices."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import DappleWarning, ExactnessError
from dapple_tf.graph_passes.ir.graph import Effect
from tests.dapple_tf.distributed.programs.writing_cases import totals
from tests.equality.one_device import TOLERANCE, Problem, compare
from tests.equality.small_models import WIDTH, chain, data, sgd, values, weights


def dense_model() -> keras.Model:
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(WIDTH, "tanh", dtype="float64", name=f"dense_{i}") for i in range(3)]
    return keras.Sequential([keras.Input((WIDTH,), dtype="float64"), *layers])


class Weights(NamedTuple):
    first: tf.Variable
    second: tf.Variable
    scale: tf.Variable


def squares(model: Any) -> Any:
    return lambda x, y: tf.reduce_mean(tf.reduce_sum(tf.square(model(x) - y), 1))


def by_hand(model: keras.Model, x: Any) -> Any:
    """Return the model's output, computed in NumPy from the values of its variables."""
    result = x.numpy()
    for layer in model.layers:
        result = np.tanh(result @ layer.kernel.numpy() + layer.bias.numpy())
    return result


# --- variables


def test_the_users_own_variables_are_trained() -> None:
    matrices = weights(3)
    before = values(matrices)
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), stages=3, micro_batches=2)
    step(*data(5))
    for matrix, old in zip(matrices, before, strict=True):
        assert np.abs(matrix.numpy() - old).max() > 1e-6


def test_functions_traced_before_and_predict_see_the_trained_values() -> None:
    model = dense_model()
    x, y = data(5)
    traced = tf.function(model)
    old, predicted = traced(x).numpy(), model.predict(x, verbose=0)
    step = dapple.pipeline(squares(model), optimizer=sgd(), stages=3, micro_batches=2)
    for _ in range(2):
        step(x, y)
    wanted = by_hand(model, x)
    assert np.abs(wanted - old).max() > 1e-4
    np.testing.assert_allclose(traced(x), wanted, rtol=1e-12)
    np.testing.assert_allclose(model(x), wanted, rtol=1e-12)
    np.testing.assert_allclose(model.predict(x, verbose=0), wanted, rtol=1e-6)
    assert np.abs(model.predict(x, verbose=0) - predicted).max() > 1e-4


def test_values_assigned_between_steps_are_used_by_the_next_step() -> None:
    matrices = weights(3)
    start = values(matrices)
    step = dapple.pipeline(chain(matrices), optimizer=sgd(), stages=3, replicas=[1, 2, 1], micro_batches=2)
    losses = []
    for _ in range(2):
        for matrix, value in zip(matrices, start, strict=True):
            matrix.assign(value)
        losses.append(float(step(*data(6))))
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's, with NumPy 2
def test_a_saved_model_has_the_trained_values(tmp_path: Path) -> None:
    model = dense_model()
    x, y = data(5)
    step = dapple.pipeline(squares(model), optimizer=sgd(), stages=2, micro_batches=2)
    step(x, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(by_hand(loaded, x), by_hand(model, x))
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-12)


def test_a_checkpoint_saves_and_restores_the_trained_values(tmp_path: Path) -> None:
    model = dense_model()
    batch = data(5)
    adam = keras.optimizers.Adam(0.05)
    step = dapple.pipeline(squares(model), optimizer=adam, stages=2, micro_batches=2)
    step(*batch)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=adam)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    saved = [variable.numpy() for variable in (*model.variables, *adam.variables)]
    losses = [float(step(*batch)) for _ in range(2)]
    checkpoint.restore(path)
    for variable, value in zip((*model.variables, *adam.variables), saved, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert [float(step(*batch)) for _ in range(2)] == losses


def test_a_tied_weight_has_one_owner() -> None:
    matrices = weights(2)
    tied = [matrices[0], matrices[1], matrices[0]]
    adam = keras.optimizers.Adam(0.05)
    step = dapple.pipeline(chain(tied), optimizer=adam, stages=["layer1", "layer2"], micro_batches=2)
    step(*data(5))
    assert [v.device[-5:] for v in matrices] == ["CPU:0", "CPU:1"]
    writers = [
        function.name
        for function in step.graph.functions
        for node in function.graph.nodes
        if node.effect == Effect.WRITE and "w0" in node.strings("writes")
    ]
    assert writers == ["stage0/update"]
    assert sum(v.name.startswith("w0") for v in adam.variables) == 2  # one momentum, one velocity


def test_no_stage_is_sent_the_gradients_of_another() -> None:
    matrices = weights(3)
    step = dapple.pipeline(chain(matrices), optimizer=keras.optimizers.Adam(), stages=["layer1", "layer2"])
    step.build(*data(8))
    for stage in range(3):
        function = step.graph.function(f"stage{stage}/update")
        assert [port.name for _, port in function.input_ports("gradient")] == [f"w{stage}"]


def test_weights_and_slots_live_on_the_device_of_their_stage() -> None:
    matrices = weights(4)
    adam = keras.optimizers.Adam(0.05)
    step = dapple.pipeline(
        chain(matrices),
        optimizer=adam,
        stages=["layer1", "layer3"],
        replicas=[2, 1, 1],
        micro_batches=2,
        devices=[5, 1, 6, 2],
    )
    step(*data(6))
    homes = dict(zip(("w0", "w1", "w2", "w3"), ("CPU:5", "CPU:6", "CPU:6", "CPU:2"), strict=True))
    for matrix in matrices:
        assert matrix.device.endswith(homes[matrix.name.removesuffix(":0")])
    slots = [v for v in adam.variables if v.name.startswith("w")]
    assert len(slots) == 8
    for slot in slots:
        assert slot.value.device.endswith(homes[slot.name[:2]]), slot.name


# --- batches


@pytest.mark.parametrize(
    ("sizes", "replicas"),
    [
        ((12, 7, 1, 12), [2, 1]),
        ((12, 12, 7, 5, 3, 2, 1, 12), [2, 1, 3, 1]),
    ],
)
def test_short_batches_after_a_full_one_equal_one_device(sizes: tuple[int, ...], replicas: list[int]) -> None:
    matrices = weights(len(replicas))
    problem = Problem(chain(matrices), {v.name[:2]: v for v in matrices}, lambda: keras.optimizers.Adam(0.01))
    batches = [data(size, seed=size) for size in sizes]
    comparison = compare(problem, batches, stages=len(replicas), replicas=replicas, micro_batches=4)
    comparison.check(TOLERANCE["float64"])


def test_new_inner_shapes_are_traced_again_and_equal_one_device() -> None:
    matrices = weights(3)

    def loss_fn(x: Any) -> Any:  # [batch, time, WIDTH]
        for matrix in matrices:
            x = tf.tanh(x @ matrix)
        return tf.reduce_mean(tf.square(x))

    random = np.random.default_rng(0)
    batches = [(tf.constant(random.normal(size=(6, time, WIDTH))),) for time in (3, 5, 3)]
    problem = Problem(loss_fn, {v.name[:2]: v for v in matrices}, lambda: keras.optimizers.Adam(0.01))
    comparison = compare(problem, batches, stages=3, micro_batches=4)
    comparison.check(TOLERANCE["float64"])


def test_nested_arguments_equal_one_device() -> None:
    matrices = weights(2)
    loss = chain(matrices)
    problem = Problem(lambda batch: loss(batch["x"], batch["y"]), {v.name[:2]: v for v in matrices}, sgd)
    batches = [({"x": x, "y": y},) for x, y in (data(5), data(5, 2))]
    compare(problem, batches, stages=2, micro_batches=2).check(TOLERANCE["float64"])


def test_a_loop_reads_what_another_stage_has_written_before_it() -> None:
    """The stage of the loop writes its copy too."""
    matrices = weights(2)
    scale = tf.Variable(1.0, dtype=tf.float64, trainable=False, name="scale")

    def loss_fn(x: Any, y: Any) -> Any:
        scale.assign(scale * 0.9)
        with tf.name_scope("layer0"):
            x = tf.tanh(x @ matrices[0]) * scale
        with tf.name_scope("layer1"):
            x = tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, tf.tanh(v * scale)), [0, x])[1]
            x = tf.tanh(x @ matrices[1])
        return tf.reduce_mean(tf.square(x - y))

    problem = Problem(loss_fn, {v.name[:5]: v for v in (*matrices, scale)}, sgd)
    compare(problem, [data(5), data(6, 2)], stages=["layer1"], micro_batches=2).check(TOLERANCE["float64"])


def scaled_three_times(v: Weights, x: Any, y: Any) -> Any:
    v.scale.assign(v.scale * 0.9)
    h = tf.tanh(x @ v.first) * v.scale
    v.scale.assign(v.scale * 0.8)
    return h @ v.second * v.scale - y


def normalised_between_two_uses(v: Weights, x: Any, y: Any) -> Any:
    h = tf.tanh(x @ v.first)
    v.first.assign(v.first / tf.norm(v.first))
    return tf.tanh(h @ v.second) @ v.first * v.scale - y


def some_rows_before_and_some_after(v: Weights, x: Any, y: Any) -> Any:
    h = x + tf.gather(v.first, [0, 2, 2])[1]
    v.first.assign(v.first * 0.9)
    return tf.tanh(h @ v.second) + v.first[1] * v.scale - y


def copied_from_another(v: Weights, x: Any, y: Any) -> Any:
    h = tf.tanh(x @ v.first) @ v.second
    v.second.assign(0.5 * v.second + 0.5 * v.first)
    v.first.assign(v.second * 1.1)
    return h @ v.second @ v.first * v.scale - y


@pytest.mark.parametrize(
    "errors",
    [scaled_three_times, normalised_between_two_uses, some_rows_before_and_some_after, copied_from_another],
)
@pytest.mark.parametrize("batch_loss", [False, True])
def test_trained_variables_are_used_before_and_after_the_loss_writes_them(errors: Any, batch_loss: bool) -> None:
    """Spectral norms do so where a network is called twice; each use has its own value, and its own gradient."""
    first, second = weights(2)
    v = Weights(first, second, tf.Variable(1.3, dtype=tf.float64, name="scale"))

    def loss_fn(x: Any, y: Any) -> Any:
        found = errors(v, x, y)
        return tf.linalg.logdet(tf.transpose(found) @ found) if batch_loss else tf.reduce_mean(tf.square(found))

    named = {"first": first, "second": second, "scale": v.scale}
    options: dict[str, Any] = {"batch_loss": True} if batch_loss else {}
    problem = Problem(loss_fn, named, sgd)
    comparison = compare(problem, [data(6), data(9, 2)], stages=2, micro_batches=3, replicas=[2, 1], **options)
    comparison.check(TOLERANCE["float64"])


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_the_loss_head_writes_a_variable_that_stages_read_before(stages: int, recompute: bool, trained: bool) -> None:
    """A running mean of the loss scales the activations of each stage; micro-batches use the value from before."""
    first, second = weights(2)
    scale = tf.Variable(1.3, dtype=tf.float64, trainable=trained, name="scale")

    def loss_fn(x: Any, y: Any) -> Any:
        h = tf.tanh(x @ first) * scale
        scale.assign(0.9 * scale)
        loss = tf.sqrt(tf.reduce_mean(tf.square(tf.tanh(h @ second) * scale - y)))
        scale.assign(0.8 * scale + 0.2 * loss)
        return loss * scale

    problem = Problem(loss_fn, {"first": first, "second": second, "scale": scale}, sgd)
    options: dict[str, Any] = {"stages": stages, "recompute": recompute, "micro_batches": 3, "batch_loss": True}
    compare(problem, [data(6), data(9, 2)], **options).check(TOLERANCE["float64"])


# --- outputs


def test_a_network_that_follows_another_is_written_after_all_micro_batches_have_used_it() -> None:
    first, second = weights(2)
    following = tf.Variable(first * 0.5, name="following")

    def loss_fn(x: Any, y: Any) -> Any:
        wanted = tf.stop_gradient(tf.tanh(x @ following) + y)
        found = tf.tanh(tf.tanh(x @ first) @ second)
        following.assign(0.9 * following + 0.1 * first)
        return tf.reduce_mean(tf.square(found - wanted))

    named = {"first": first, "second": second, "following": following}
    comparison = compare(Problem(loss_fn, named, sgd), [data(6), data(4, 2)], stages=2, micro_batches=3)
    comparison.check(TOLERANCE["float64"])


def test_aux_outputs_are_joined_in_sample_order() -> None:
    matrices = weights(3)
    loss = chain(matrices)

    def loss_fn(x: Any, y: Any, number: Any) -> Any:
        result = loss(x, y)
        aux = {
            "number": number,
            "nested": [number * 10, tf.reduce_mean(x)],
            "odd": tf.reduce_sum(number % 2),
        }
        return result, aux

    x, y = data(11)
    number = tf.range(11)
    step = dapple.pipeline(loss_fn, optimizer=sgd(), stages=3, replicas=[1, 2, 3], micro_batches=3)
    value, aux = step(x, y, number)
    assert value.shape == ()
    np.testing.assert_array_equal(aux["number"], np.arange(11))
    np.testing.assert_array_equal(aux["nested"][0], np.arange(11) * 10)
    np.testing.assert_allclose(aux["nested"][1], x.numpy().mean(), rtol=1e-12)
    assert aux["odd"].numpy() == 5
    assert aux["odd"].dtype == tf.int32


def test_an_aux_output_that_cannot_be_joined_is_refused() -> None:
    loss = chain(weights(2))
    w = weights(1)[0]
    step = dapple.pipeline(lambda x, y: (loss(x, y), tf.reduce_any(x @ w > y)), optimizer=sgd(), stages=2)
    with pytest.raises(ExactnessError, match=r"(?s)aux output 0.*return it per sample"):
        step(*data(4))


def test_pipeline_is_a_decorator_too() -> None:
    matrices = weights(2)
    loss = chain(matrices)
    wanted = float(loss(*data(6)))

    @dapple.pipeline(optimizer=sgd(), stages=2, micro_batches=3)
    def step(x: Any, y: Any) -> Any:
        return loss(x, y)

    assert float(step(*data(6))) == pytest.approx(wanted, rel=1e-12)
    assert float(step(*data(6))) < wanted


def test_python_side_effects_happen_once() -> None:
    seen: list[int] = []
    loss = chain(weights(2))

    def loss_fn(x: Any, y: Any) -> Any:
        seen.append(1)
        return loss(x, y)

    step = dapple.pipeline(loss_fn, optimizer=sgd(), stages=2, micro_batches=3)
    for size in (6, 6, 4, 1):
        step(*data(size))
    step.record(*data(6))
    step.run_exposed(*data(6))
    assert len(seen) == 1


def test_a_variable_that_no_gradient_reaches_is_named_and_not_trained() -> None:
    matrices = weights(3)
    loss = chain(matrices[:2])

    def loss_fn(x: Any, y: Any) -> Any:
        return loss(x, y) + 0.0 * tf.reduce_mean(tf.stop_gradient(x @ matrices[2]))

    step = dapple.pipeline(loss_fn, optimizer=keras.optimizers.AdamW(0.1), stages=2, micro_batches=2)
    before = values(matrices)
    with pytest.warns(DappleWarning, match=r"no gradient reaches w2:"):
        step(*data(4))
    after = values(matrices)
    np.testing.assert_array_equal(after[2], before[2])
    assert np.abs(after[0] - before[0]).max() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*data(4))  # warns once


@pytest.mark.parametrize("replicas", [[1, 1], [2, 2]])
def test_sums_that_the_loss_adds_to_variables_are_those_of_all_replicas(replicas: list[int]) -> None:
    batches = [(np.random.default_rng(n).normal(size=(n, WIDTH)),) * 2 for n in (12, 7)]
    compare(totals(sgd), batches, stages=2, micro_batches=3, replicas=replicas).check(TOLERANCE["float64"])


@pytest.mark.parametrize("replicas", [[1, 1], [2, 2]])
def test_means_that_the_loss_adds_to_variables_are_those_of_the_batch(replicas: list[int]) -> None:
    """As Keras's metrics do: the loss of the batch to a total, which is divided by the number of batches elsewhere."""
    first, last = weights(2)
    total, left = (tf.Variable(tf.zeros([], tf.float64), trainable=False, name=name) for name in ("total", "left"))
    means = tf.Variable(tf.zeros([WIDTH], tf.float64), trainable=False, name="means")

    def loss_fn(x: Any) -> Any:
        hidden = tf.tanh(x @ first)
        means.assign_add(tf.reduce_mean(hidden, 0))
        loss = tf.reduce_mean(tf.square(hidden @ last - 1.0))
        total.assign(total + loss)
        left.assign(left - 0.5 * loss)
        return loss

    problem = Problem(loss_fn, {"first": first, "last": last, "total": total, "left": left, "means": means}, sgd)
    batches = [(np.random.default_rng(n).normal(size=(n, WIDTH)),) for n in (12, 7)]
    compare(problem, batches, stages=2, micro_batches=3, replicas=replicas).check(TOLERANCE["float64"])


def test_a_sum_that_something_else_takes_is_not_an_addition() -> None:
    total = tf.Variable(tf.zeros([], tf.float64), trainable=False, name="total")
    first, last = weights(2)

    def loss_fn(x: Any) -> Any:
        loss = tf.reduce_mean(tf.tanh(x @ first) @ last)
        return loss, total.assign(total + loss)

    x = np.random.default_rng(0).normal(size=(8, WIDTH))
    with pytest.raises(ExactnessError, match=r"total"):
        dapple.pipeline(loss_fn, optimizer=sgd(), stages=2, micro_batches=2)(x)
