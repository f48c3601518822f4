"""Variables made in ``dapple.scope()`` have no memory until they are needed, and then the values of eager building."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf import variable_values
from dapple_tf.errors import UsageError
from tests.dapple_tf.builders import step_of

WIDTH = 48  # a kernel of 9 KB
X = np.random.default_rng(0).normal(size=(12, WIDTH)).astype("float32")


def sequential() -> keras.Model:
    layers = [keras.layers.Dense(WIDTH, "relu", name=f"layer{i}") for i in range(4)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


def functional() -> keras.Model:
    """A tied layer, a skip connection, layer norm, an embedding, and initialisers of several kinds."""
    initialisers = ["he_normal", keras.initializers.TruncatedNormal(seed=4), keras.initializers.Orthogonal()]
    inputs = keras.Input((WIDTH,))
    table = keras.layers.Embedding(60, WIDTH, name="table")(tf.range(3))
    tied = keras.layers.Dense(WIDTH, name="tied", kernel_initializer="random_uniform")
    y = tied(inputs) + keras.ops.sum(table)
    for i, initialiser in enumerate(initialisers):
        y = keras.layers.LayerNormalization()(y)
        y = keras.layers.Dense(WIDTH, "tanh", name=f"dense{i}", kernel_initializer=initialiser)(y)
    return keras.Model(inputs, tied(y) + inputs)


class Subclassed(keras.Model):
    """Builds its layers at its first call, and a weight of its own with a seeded initialiser."""

    def __init__(self) -> None:
        super().__init__()
        self.layers_of_mine = [keras.layers.Dense(WIDTH, name=f"own{i}") for i in range(3)]

    def build(self, shape: Sequence[Any]) -> None:
        self.gain = self.add_weight(shape=(WIDTH, WIDTH), initializer=keras.initializers.RandomNormal(seed=7))
        for layer in self.layers_of_mine:
            layer.build(shape)

    def call(self, x: Any) -> Any:
        for layer in self.layers_of_mine:
            x = layer(x)
        return x @ self.gain


def subclassed() -> keras.Model:
    model = Subclassed()
    model.build((None, WIDTH))
    return model


def from_configuration() -> keras.Model:
    model = keras.Model.from_config(functional().get_config())
    assert isinstance(model, keras.Model)
    return model


def build(make: Callable[[], keras.Model], *, deferred: bool) -> keras.Model:
    keras.utils.set_random_seed(11)
    if not deferred:
        return make()
    with dapple.scope():
        return make()


def has_memory(variable: tf.Variable) -> bool:
    return bool(tf.raw_ops.VarIsInitializedOp(resource=variable_values.raw_handle(variable)))


class Scaled(keras.layers.Layer):
    """A layer whose result's shape Keras learns by calling it."""

    def build(self, shape: Sequence[Any]) -> None:
        self.matrix = self.add_weight(shape=(WIDTH, WIDTH), initializer="glorot_uniform", name="matrix")

    def call(self, x: Any) -> Any:
        return tf.function(lambda: keras.ops.tanh(x @ self.matrix))() + x


def of_own_layers() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    y = inputs
    for i in range(4):
        y = Scaled(name=f"scaled{i}")(y)
    return keras.Model(inputs, y)


MODELS = [sequential, functional, subclassed, from_configuration, of_own_layers]


@pytest.mark.parametrize("make", MODELS)
def test_values_are_those_of_eager_building_in_any_order(make: Callable[[], keras.Model]) -> None:
    eager, deferred = build(make, deferred=False), build(make, deferred=True)
    large = [w for w in deferred.weights if w.shape.num_elements() >= WIDTH * WIDTH]
    assert len(large) >= 4
    assert not any(has_memory(w.value) for w in large)
    pairs = list(zip(eager.weights, deferred.weights, strict=True))
    random.Random(5).shuffle(pairs)
    for one, other in pairs:
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert all(has_memory(w.value) for w in deferred.weights)


@pytest.mark.parametrize("make", MODELS)
def test_training_equals_that_of_a_model_built_eagerly_and_no_value_is_made_at_home(
    make: Callable[[], keras.Model],
) -> None:
    eager, deferred = build(make, deferred=False), build(make, deferred=True)
    results = []
    for model in (eager, deferred):
        optimizer = keras.optimizers.Adam(0.01)

        def loss(x: tf.Tensor, model: keras.Model = model) -> tf.Tensor:
            return tf.reduce_mean((model(x) - x) ** 2)

        step = step_of(loss, optimizer=optimizer, stages=3, micro_batches=3, schedule="dapple-a")
        losses = [float(step(X)) for _ in range(3)]
        values = [w.numpy() for w in model.weights] + [v.numpy() for v in optimizer.variables]
        results.append((losses, values, [w.value.device for w in model.weights]))
    assert results[0][0] == results[1][0]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert results[0][2] == results[1][2]
    assert len(set(results[1][2])) > 1


READERS: dict[str, Callable[[keras.Model, Path], Any]] = {
    "numpy": lambda model, _: model.weights[0].numpy(),
    "get_weights": lambda model, _: model.get_weights()[0],
    "a call": lambda model, _: model(X).numpy(),
    "predict": lambda model, _: model.predict(X, verbose=0),
    "a function": lambda model, _: tf.function(lambda: model.weights[0].value * 2.0)().numpy(),
    "an op of TensorFlow": lambda model, _: tf.square(model.weights[0].value).numpy(),
    "a product": lambda model, _: tf.matmul(model.weights[0].value, model.weights[0].value).numpy(),
    "repr": lambda model, _: repr(model.weights[0].value),
    "assign_add": lambda model, _: model.weights[0].value.assign_add(tf.ones((WIDTH, WIDTH))).numpy(),
    "a file": lambda model, folder: (
        (model.save(folder / "m.keras"), keras.models.load_model(folder / "m.keras"))[1].weights[0].numpy()
    ),
    "a checkpoint": lambda model, folder: tf.train.load_variable(
        tf.train.Checkpoint(w=model.weights[0].value).save(str(folder / "c")), "w/.ATTRIBUTES/VARIABLE_VALUE"
    ),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")  # Keras's own
@pytest.mark.parametrize("reader", READERS)
def test_who_reads_early_gets_the_value_of_eager_building(reader: str, tmp_path: Path) -> None:
    found = []
    for deferred in (False, True):
        folder = tmp_path / str(deferred)
        folder.mkdir()
        found.append(READERS[reader](build(sequential, deferred=deferred), folder))
    if reader == "repr":
        assert found[0].partition("numpy=")[2] == found[1].partition("numpy=")[2]
    else:
        np.testing.assert_array_equal(found[0], found[1])


def test_summary_and_set_weights_make_no_first_value(tmp_path: Path) -> None:
    model = build(sequential, deferred=True)
    model.summary(print_fn=lambda text: None)
    assert not has_memory(model.layers[0].kernel.value)
    wanted = [np.full(w.shape, i, "float32") for i, w in enumerate(model.weights)]
    model.set_weights(wanted)
    for weight, value in zip(model.weights, wanted, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)


def test_a_failed_assignment_leaves_the_first_value_to_be_made() -> None:
    eager, deferred = (build(sequential, deferred=d).layers[0].kernel.value for d in (False, True))
    with pytest.raises(ValueError, match="shape"):
        deferred.assign(tf.zeros((3, 3)))
    assert not has_memory(deferred)
    np.testing.assert_array_equal(eager.numpy(), deferred.numpy())


def test_functions_are_called_once() -> None:
    calls = []

    def value() -> tf.Tensor:
        calls.append(1)
        return tf.zeros((WIDTH, WIDTH))

    with dapple.scope():
        variable = tf.Variable(value)
    assert not has_memory(variable)
    assert variable.numpy().sum() == 0
    assert calls == [1]


def test_values_that_another_order_would_change_are_made_at_once() -> None:
    def make() -> list[tf.Variable]:
        tf.random.set_seed(3)
        np.random.seed(4)  # what users write
        generator = tf.random.Generator.from_seed(5)
        shape = (WIDTH, WIDTH)
        first = tf.Variable(lambda: tf.random.normal(shape))
        return [
            first,
            tf.Variable(lambda: generator.normal(shape)),
            tf.Variable(lambda: tf.constant(np.random.normal(size=shape))),
            tf.Variable(lambda: first * 2.0),
            tf.Variable(tf.random.normal(shape)),
            tf.Variable(np.ones(shape)),
            tf.Variable(lambda: tf.random.uniform(shape, seed=8)),
        ]

    eager = make()
    with dapple.scope():
        at_once = make()
    assert all(map(has_memory, at_once))
    for one, other in zip(eager, at_once, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


class Counted:
    """An initialiser whose values depend on how often it was called before, and on its own generator of numbers."""

    def __init__(self) -> None:
        self.calls, self.generator = 0, np.random.default_rng(3)

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        self.calls += 1
        return tf.constant(self.generator.normal(size=shape), dtype) * self.calls


@pytest.mark.parametrize("rows", [1, WIDTH])
def test_an_initialiser_with_state_of_its_own_is_called_once_for_each_variable(rows: int) -> None:
    def make() -> list[np.ndarray]:
        initialiser = Counted()
        return [tf.Variable(lambda: initialiser((rows, WIDTH), "float32")).numpy() for _ in range(3)]

    eager = make()
    with dapple.scope():
        deferred = make()
    np.testing.assert_array_equal(eager, deferred)


def test_values_too_large_to_be_folded_are_rounded_as_in_eager_building() -> None:
    def make() -> tf.Variable:
        return tf.Variable(lambda: tf.random.stateless_normal((400, 400), [1, 2]) / 3.0 * 1.7)

    eager = make()
    with dapple.scope():
        deferred, moved = make(), make()
    variable_values.move_variables([(moved, tf.config.list_logical_devices("CPU")[1].name)])
    np.testing.assert_array_equal(eager.numpy(), deferred.numpy())
    np.testing.assert_array_equal(eager.numpy(), moved.numpy())


def test_threads_that_ask_for_a_value_together_all_get_it() -> None:
    eager, deferred = build(functional, deferred=False), build(functional, deferred=True)
    start, found = threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        found.append([weight.numpy() for weight in deferred.weights])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for values in found:
        for one, other in zip(eager.get_weights(), values, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_deferred_variable_takes_the_value_of_another_one() -> None:
    with dapple.scope():
        one, other = (tf.Variable(lambda i=i: tf.fill((WIDTH, WIDTH), float(i))) for i in range(2))
    one.assign(other)
    assert one.numpy().sum() == WIDTH * WIDTH


def test_a_function_that_fails_raises_its_error_where_the_variable_is_made() -> None:
    def broken() -> tf.Tensor:
        raise ZeroDivisionError("the user's mistake")

    with dapple.scope(), pytest.raises(ZeroDivisionError, match="the user's mistake"):
        tf.Variable(broken)


def test_a_variable_that_is_released_before_it_had_a_value_says_so_when_it_is_read() -> None:
    variable = build(sequential, deferred=True).layers[0].kernel.value
    variable_values.release_variables([variable], "ask for it")
    with pytest.raises(tf.errors.FailedPreconditionError, match="ask for it"):
        variable.numpy()


def test_slots_are_made_where_their_variables_are() -> None:
    model, optimizer = build(sequential, deferred=True), keras.optimizers.Adam()
    step = step_of(lambda x: tf.reduce_mean(model(x) ** 2), optimizer=optimizer, stages=2, micro_batches=2)
    step.build(X)
    places = {w.path: w.value.device for w in model.weights}
    slots = [v for v in optimizer.variables if v.shape.rank == 2]
    assert len(slots) == 8
    for slot in slots:
        (path,) = (p for p in places if p.replace("/", "_") in slot.path)
        assert slot.value.device == places[path]


@pytest.mark.parametrize("scope", [False, True])
def test_a_checkpoint_restored_before_the_step_is_built_restores_slots(scope: bool, tmp_path: Path) -> None:
    def make() -> tuple[tf.train.Checkpoint, Any]:
        model, optimizer = build(sequential, deferred=scope), keras.optimizers.Adam(0.01)
        step = step_of(lambda x: tf.reduce_mean((model(x) - x) ** 2), optimizer=optimizer, stages=2, micro_batches=3)
        return tf.train.Checkpoint(model=model, optimizer=optimizer), step

    checkpoint, step = make()
    step(X)
    path = checkpoint.save(str(tmp_path / "c"))
    wanted = [float(step(X)) for _ in range(2)]
    checkpoint, step = make()
    checkpoint.restore(path)
    assert [float(step(X)) for _ in range(2)] == wanted


class HalfOf(keras.layers.Layer):
    """Multiplies by half of the kernel that another layer had when this one was built."""

    def __init__(self, other: keras.layers.Dense) -> None:
        super().__init__()
        self.others = [other]

    def build(self, shape: Sequence[Any]) -> None:
        self.half = self.add_weight(shape=(WIDTH, WIDTH), initializer=lambda *_, **__: self.others[0].kernel * 0.5)

    def call(self, x: Any) -> Any:
        return x @ self.half


class MadeFromOthers(keras.Model):
    """While it is traced first, it reads a weight, and makes another one from it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(WIDTH)
        self.first.build((None, WIDTH))
        self.last = HalfOf(self.first)

    def call(self, x: Any) -> Any:
        with tf.init_scope():
            norm = float(np.linalg.norm(self.first.kernel.numpy()))
        return self.last(self.first(x)) / norm


def test_values_that_a_trace_reads_are_made() -> None:
    losses = []
    for deferred in (False, True):
        model = build(MadeFromOthers, deferred=deferred)
        optimizer = keras.optimizers.SGD(0.1)
        step = step_of(
            lambda x, model=model: tf.reduce_mean((model(x) - x) ** 2), optimizer=optimizer, stages=2, micro_batches=3
        )
        losses.append([float(step(X)) for _ in range(2)])
    assert losses[0] == losses[1]
    assert np.isfinite(losses[0]).all()


class Keeping(keras.initializers.Initializer):
    """Makes a tensor at its first call, and uses it at all later ones, as it is or times a number."""

    def __init__(self, factor: float | None) -> None:
        self.kept: Any = None
        self.factor = factor

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        if self.kept is None:
            self.kept = tf.random.stateless_normal(shape, seed=[1, 2], dtype=dtype)
        return self.kept if self.factor is None else self.kept * self.factor


@pytest.mark.parametrize("factor", [None, 2.0])
def test_an_initialiser_that_keeps_a_tensor_of_its_own_is_refused_with_what_to_do(factor: float | None) -> None:
    initialiser = Keeping(factor)
    layers = [keras.layers.Dense(WIDTH, kernel_initializer=initialiser, name=f"layer{i}") for i in range(2)]
    message = (
        r"'.*kernel' keeps a tensor that it made when it was called for another variable.*: make the tensor before"
    )
    with pytest.raises(UsageError, match=message), dapple.scope():
        keras.Sequential([keras.Input((WIDTH,)), *layers])


def test_a_tensor_that_is_made_before_the_scope_is_the_value() -> None:
    outside = tf.random.stateless_normal((WIDTH, WIDTH), seed=[1, 2])
    with dapple.scope():
        layer = keras.layers.Dense(WIDTH, kernel_initializer=lambda shape, dtype: outside)
        layer.build((None, WIDTH))
    np.testing.assert_array_equal(layer.kernel.numpy(), outside.numpy())


def test_of_borrowed_variables_one_at_a_time_is_in_memory() -> None:
    stored = {f"v{i}": np.full((WIDTH, WIDTH), float(i), "float32") for i in range(4)}
    variables = {name: tf.Variable(value, name=name) for name, value in stored.items()}
    variable_values.release_variables(list(variables.values()), "ask for it")
    returned: list[str] = []

    def name_of(variable: tf.Variable) -> str:
        return next(name for name, other in variables.items() if other is variable)

    def give_back(variable: tf.Variable) -> None:
        returned.append(name_of(variable))
        stored[returned[-1]] = variable.numpy()

    def held() -> list[str]:
        return [name for name, variable in variables.items() if has_memory(variable)]

    with variable_values.borrowing(list(variables.values()), lambda v: stored[name_of(v)], give_back):
        assert held() == []
        assert variables["v1"].numpy()[0, 0] == 1
        assert held() == ["v1"]
        result = variables["v2"].assign(tf.fill((WIDTH, WIDTH), 20.0))
        assert held() == []  # given back at once
        assert result.numpy()[0, 0] == 20
        variables["v2"].assign_add(tf.ones((WIDTH, WIDTH)))
        assert held() == ["v2"]
        with pytest.raises(ValueError, match="shape"):
            variables["v0"].assign(tf.zeros((3, 3)))
        assert held() == []
        assert tf.reduce_sum(variables["v1"]).numpy() == WIDTH * WIDTH
        variables["v3"].assign(variables["v2"])
    assert held() == []
    assert returned == ["v1", "v2", "v2", "v1", "v2", "v3"]
    assert [stored[name][0, 0] for name in sorted(stored)] == [0, 1, 21, 21]
    with pytest.raises(tf.errors.FailedPreconditionError, match="ask for it"):
        variables["v2"].numpy()


def test_a_traced_function_may_assign_a_borrowed_variable() -> None:
    """Tracing once tried to give the value back, which is there only when the function runs."""
    variable = tf.Variable(tf.zeros((WIDTH, WIDTH)))
    variable_values.release_variables([variable], "ask for it")
    returned: list[Any] = []

    @tf.function
    def double(value: Any) -> None:
        variable.assign(2.0 * value)

    with variable_values.borrowing([variable], lambda v: tf.zeros(v.shape), lambda v: returned.append(v.numpy())):
        double(tf.ones((WIDTH, WIDTH)))
    np.testing.assert_array_equal(returned, [np.full((WIDTH, WIDTH), 2.0, "float32")])
    assert not has_memory(variable)


def test_borrowed_variables_are_released_when_their_use_fails() -> None:
    variable = tf.Variable(tf.ones((WIDTH, WIDTH)))
    variable_values.release_variables([variable], "ask for it")

    def use() -> None:
        with variable_values.borrowing([variable], lambda v: np.zeros((WIDTH, WIDTH), "float32"), lambda v: None):
            assert variable.numpy().sum() == 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert not has_memory(variable)
    assert not variable_values.is_deferred(variable)
    variable.assign(tf.ones((WIDTH, WIDTH)))
    assert variable.numpy().sum() == WIDTH * WIDTH
