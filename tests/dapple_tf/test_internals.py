"""The internals of TensorFlow and Keras behave as ``dapple_tf.internals`` relies on."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.ops import gradients_util, handle_data_util

from dapple_tf import internals, variable_values
from tests.dapple_tf.builders import executed_nodes
from tests.processes import run_python

HERE, THERE = "/device:CPU:0", "/device:CPU:3"


def test_the_profiler_names_ops_and_tells_their_times_by_the_systems_clock(tmp_path: Path) -> None:
    @tf.function
    def product(x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("scope"):
            return tf.linalg.matmul(x, x, name="product")

    x = tf.ones([300, 300])
    product(x)
    before = time.time()
    tf.profiler.experimental.start(str(tmp_path))
    product(x)
    tf.profiler.experimental.stop()
    (path,) = tmp_path.rglob("*.xplane.pb")
    runs = [run for run in internals.read_op_runs(str(path)) if run[0].startswith("scope/product:")]
    ((name, start, end),) = runs
    assert "MatMul" in name
    assert before - 0.01 < start < end < time.time() + 0.01


def test_kernels_of_gpus_have_the_name_of_their_op_and_the_systems_time(tmp_path: Path) -> None:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    environment, host, device = (space.planes.add(name=n) for n in ("Task Environment", "/host:CPU", "/device:GPU:0"))
    environment.stat_metadata[1].name = "profile_start_time"
    environment.stats.add(metadata_id=1, uint64_value=10**18)
    host.event_metadata[1].name = "scope/product:MatMul"
    host.lines.add().events.add(metadata_id=1, offset_ps=0, duration_ps=10**9)
    device.event_metadata[1].name = "ampere_sgemm_128x64"
    device.stat_metadata[1].name = "tf_op"
    device.stat_metadata[2].name = "scope/product:MatMul"
    stream = device.lines.add(timestamp_ns=3 * 10**9)
    stream.events.add(metadata_id=1, offset_ps=10**12, duration_ps=5 * 10**11).stats.add(metadata_id=1, ref_value=2)
    stream.events.add(metadata_id=1, offset_ps=10**12, duration_ps=10**11)  # of no op, such as a copy
    path = tmp_path / "gpu.xplane.pb"
    path.write_bytes(space.SerializeToString())
    ((name, *times),) = internals.read_op_runs(str(path))
    assert name == "scope/product:MatMul"
    assert times == pytest.approx([10**9 + 4.0, 10**9 + 4.5], abs=1e-6)


# --- tf.functions


def test_ops_of_a_trace_take_another_tensor() -> None:
    @tf.function
    def f(x: tf.Tensor) -> tf.Tensor:
        return 2 * (x + 1) + (x + 1)

    graph = f.get_concrete_function(tf.TensorSpec([], tf.float32)).graph
    (added, other) = (op.outputs[0] for op in graph.get_operations() if op.type == "AddV2" and op.name != "add_2")
    assert added.consumers()
    internals.replace_tensor(added, other)
    assert not added.consumers()
    assert len(other.consumers()) == 2


def test_a_clone_keeps_the_options_and_shares_no_trace() -> None:
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False, reduce_retracing=True)
    def double(x: tf.Tensor) -> tf.Tensor:
        traces.append(1)
        return 2 * x

    double(tf.ones(3))
    clone = internals.clone_function(double)

    assert clone is not double
    assert clone.python_function is double.python_function
    assert clone.input_signature == double.input_signature
    assert clone._autograph is False
    assert clone._reduce_retracing is True
    assert double.experimental_get_tracing_count() == 1
    assert clone.experimental_get_tracing_count() == 0
    assert clone(tf.ones(2)).numpy().tolist() == [2, 2]
    assert len(traces) == 2
    assert double.experimental_get_tracing_count() == 1


def test_what_batch_norm_computes_is_replaced_in_the_block_only() -> None:
    layer = keras.layers.BatchNormalization(dtype="float64")
    calls = []

    def call(original: Any, layer: Any, inputs: Any, training: Any, mask: Any) -> Any:
        calls.append((layer, training, mask))
        return 2 * original(layer, inputs, training=training, mask=mask)

    rows = tf.constant([[1.0], [3.0]], tf.float64)
    with internals.replace_batch_norm(call):
        doubled = layer(rows, training=True)
    assert calls == [(layer, True, None)]
    assert doubled.numpy() == pytest.approx(2 * layer(rows, training=True).numpy())
    assert keras.layers.BatchNormalization.call is keras.layers.BatchNormalization.__dict__["call"]
    assert len(calls) == 1


@pytest.mark.parametrize("mask", [None, [True, True, False, False]])
def test_batch_norm_normalises_by_and_writes_what_replaces_its_moments(mask: Any) -> None:
    layer = keras.layers.BatchNormalization(momentum=0.5, epsilon=0.0, dtype="float64")
    layer.build((None, 1))
    given, seen = (tf.constant([2.0], tf.float64), tf.constant([4.0], tf.float64)), []

    def moments(layer: Any, inputs: Any, mask: Any, compute: Any) -> Any:
        seen.append((inputs.dtype.name, compute()))
        return given

    rows = tf.constant([[1.0], [3.0], [4.0], [8.0]], tf.float64)
    with internals.replace_moments(moments):
        found = layer(rows, training=True, mask=None if mask is None else tf.constant(mask))
        layer(rows, training=False)
    assert found.numpy().tolist() == [[-0.5], [0.5], [1.0], [3.0]]
    assert layer.moving_mean.numpy().tolist() == [1.0]
    assert layer.moving_variance.numpy().tolist() == [2.5]
    ((dtype, (mean, variance)),) = seen
    assert (dtype, mean.shape, variance.shape) == ("float64", *(((1,), (1,)) if mask is None else ((), ())))
    assert mean.numpy() == pytest.approx(4.0 if mask is None else 2.0)
    layer(rows, training=True)
    assert len(seen) == 1


def test_live_batch_norm_layers_are_found_once_they_are_built() -> None:
    built, unbuilt = keras.layers.BatchNormalization(), keras.layers.BatchNormalization()
    built.build((None, 2))
    found = {id(layer) for layer in internals.batch_norm_layers()}
    assert id(built) in found
    assert id(unbuilt) not in found


def test_a_clone_of_a_function_that_makes_a_variable_makes_its_own() -> None:
    made = []

    @tf.function
    def count() -> tf.Tensor:
        if not made:
            made.append(tf.Variable(0))
        return made[0].assign_add(1)

    count()
    assert internals.clone_function(count)() == 2


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        (tf.function(lambda x: x), True),
        (tf.function(lambda x: x, jit_compile=False), True),
        (lambda x: x, False),
        (keras.layers.Dense(1), False),
        (keras.Sequential(), False),
    ],
)
def test_is_tf_function_tells_tf_functions_from_callables(thing: object, expected: bool) -> None:
    assert internals.is_tf_function(thing) is expected


def test_the_python_function_of_a_tf_function_and_of_any_other() -> None:
    def double(x: int) -> int:
        return 2 * x

    assert internals.python_function_of(tf.function(double)) is double
    assert internals.python_function_of(double) is double


def test_input_signature_is_the_declared_one_or_none() -> None:
    spec = tf.TensorSpec([None, 2], tf.int32)
    assert internals.input_signature(tf.function(lambda x: x)) is None
    assert internals.input_signature(tf.function(lambda x: x, input_signature=[spec])) == (spec,)


@pytest.mark.parametrize("autograph", [True, False])
def test_functions_that_are_called_in_a_trace_add_their_ops_to_it_in_the_block_only(autograph: bool) -> None:
    class Adder:
        amount = 2.0

        @tf.function(autograph=autograph)
        def add(self, x: Any) -> Any:
            if autograph and x > 100:
                x = x - 1
            return x + self.amount

    adder = Adder()
    whole = tf.function(lambda x: adder.add(x))

    def kinds() -> set[str]:
        graph = internals.clone_function(whole).get_concrete_function(tf.TensorSpec([])).graph
        return {op.type for op in graph.get_operations()}

    with internals.inline_functions():
        inside = kinds()
        assert float(adder.add(tf.constant(1.0))) == 3
    assert not inside & internals.CALL_OPS
    assert bool(inside & internals.CONDITION_OPS) is autograph
    assert kinds() & internals.CALL_OPS


def test_a_handle_of_which_nothing_is_known_can_be_scattered_to_once_it_is_described() -> None:
    variable = tf.Variable([1.0, 2.0, 3.0])

    @tf.function(input_signature=[tf.TensorSpec([], tf.resource)])
    def scatter(handle: Any) -> None:
        internals.describe_handle(handle, "float32")
        tf.raw_ops.ResourceScatterNdAdd(ref=handle, indices=[[1]], updates=[5.0])

    scatter(variable.handle)
    assert variable.numpy().tolist() == [1, 7, 3]


def test_reduces_retracing_is_what_a_tf_function_was_declared_with() -> None:
    assert internals.reduces_retracing(tf.function(lambda x: x, reduce_retracing=True))
    assert not internals.reduces_retracing(tf.function(lambda x: x))
    assert not internals.reduces_retracing(lambda x: x)


# --- Keras layers


def test_record_layers_sees_every_call_in_and_out() -> None:
    layers = [keras.Input((2,)), keras.layers.Dense(2, name="a"), keras.layers.Dense(2, name="b")]
    model = keras.Sequential(layers, name="m")
    seen: list[tuple[str, bool]] = []
    with internals.record_layers(lambda layer, entering: seen.append((layer.name, entering))):
        model(tf.ones((1, 2)))
    called = [entry for entry in seen if entry[0] in "abm"]
    assert called[0] == ("m", True)
    assert called[-1] == ("m", False)
    assert [entry for entry in called if entry[0] != "m"] == [("a", True), ("a", False), ("b", True), ("b", False)]


def test_record_layers_restores_the_call_even_on_exceptions() -> None:
    original = keras.Layer.__call__
    seen: list[bool] = []

    class Broken(keras.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), internals.record_layers(lambda _, entering: seen.append(entering)):
        Broken()(tf.ones(1))
    assert seen == [True, False], "the layer is left even when its call fails"
    assert keras.Layer.__call__ is original


# --- running functions


def test_a_loop_that_does_not_end_is_cancelled() -> None:
    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
    def halve(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda y: y > 1, lambda y: (y / 2,), [x])[0]

    concrete = halve.get_concrete_function()
    assert float(internals.run_within(concrete, [tf.constant(8.0)], 60)[()]) == 1
    with pytest.raises(TimeoutError, match=r"did not end within 0\.2 s"):
        internals.run_within(concrete, [tf.constant(np.inf, tf.float32)], 0.2)
    assert float(internals.run_within(concrete, [tf.constant(6.0)], 60)[()]) == 0.75


def test_a_function_that_is_held_up_is_not_cancelled() -> None:
    """Otherwise ranks could decide differently on the same loop, where one of them has to wait for a processor."""
    assert int(internals.run_within(make_waiting_loop(), [tf.constant(15, tf.int64)], 1)[()]) == 15


def test_a_loop_that_waits_and_does_not_end_is_cancelled_after_ten_times_the_limit() -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not end within 0\.1 s"):
        internals.run_within(make_waiting_loop(), [tf.constant(300, tf.int64)], 0.1)
    assert 0.9 < time.monotonic() - begin < 20


def make_waiting_loop() -> Any:
    """Return a function of ``most`` that counts to ``most``, and sleeps for 0.1 s in each round."""

    def wait(number: Any) -> Any:
        time.sleep(0.1)
        return number + 1

    def body(number: tf.Tensor) -> tuple[tf.Tensor]:
        return (tf.ensure_shape(tf.numpy_function(wait, [number], tf.int64), []),)

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)])
    def count(most: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda number: number < most, body, [tf.zeros([], tf.int64)])[0]

    return count.get_concrete_function()


def test_a_function_without_xla_has_the_options_of_the_other() -> None:
    compiled = tf.function(lambda x: x + 1, jit_compile=True, reduce_retracing=True)
    plain = internals.without_xla(compiled)
    assert not internals.is_compiled_by_xla(plain)
    assert internals.reduces_retracing(plain)
    assert internals.is_compiled_by_xla(compiled)
    assert int(plain(tf.constant(1))) == 2


def test_registered_functions_can_be_called_in_the_block_only() -> None:
    definition = tf.function(lambda x: x + 1).get_concrete_function(tf.constant(1)).function_def
    definition.signature.name = "one_more_of_a_test"
    with internals.registered_functions([definition.SerializeToString()]):
        assert context.context().has_function("one_more_of_a_test")
    assert not context.context().has_function("one_more_of_a_test")


# --- moving variables


def test_a_moved_variable_keeps_its_value_and_is_on_the_other_device() -> None:
    with tf.device(HERE):
        variable = tf.Variable([1.0, 2.0], name="w", trainable=False)
    holder = variable
    variable_values.move_variables([(variable, THERE)])
    assert holder.device.endswith(THERE)
    assert holder.handle.device.endswith(THERE)
    assert holder.numpy().tolist() == [1, 2]
    assert holder.trainable is False
    holder.assign([3.0, 4.0])
    holder.assign_add([1.0, 1.0])
    assert (holder + 0.0).numpy().tolist() == [4, 5]


def test_functions_traced_before_a_move_see_the_variable_where_it_is() -> None:
    variable, other = tf.Variable(2.0), tf.Variable(10.0)

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return x * variable

    @tf.function
    def outer(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(x > 0, lambda: inner(x), lambda: variable.read_value()) + other

    @tf.function
    def write() -> None:
        variable.assign_add(1.0)

    x = tf.constant(3.0)
    assert (inner(x), outer(x)) == (6, 16)
    write()
    variable_values.move_variables([(variable, THERE)])
    variable.assign(5.0)

    assert inner(x) == 15
    assert outer(x) == 25
    assert outer(tf.constant(-1.0)) == 15
    write()
    assert variable.numpy() == 6
    assert inner(x) == 18
    assert [f.experimental_get_tracing_count() for f in (inner, outer, write)] == [1, 1, 1]


def test_a_gradient_through_a_function_traced_before_a_move_is_right() -> None:
    variable = tf.Variable(2.0)

    @tf.function
    def square() -> tf.Tensor:
        return variable * variable

    def slope() -> float:
        with tf.GradientTape() as tape:
            result = square()
        return float(tape.gradient(result, variable))

    assert slope() == 4
    variable_values.move_variables([(variable, THERE)])
    variable.assign(5.0)
    assert slope() == 10


@pytest.mark.parametrize("method", ["apply_gradients", "apply"])
def test_what_comes_before_updates_gets_each_optimizer_with_its_variables(method: str) -> None:
    optimizer, variable, found = keras.optimizers.SGD(1.0), keras.Variable(2.0), []
    methods = keras.optimizers.Optimizer.apply_gradients, keras.optimizers.Optimizer.apply
    with internals.before_updates(lambda of, variables: found.append((of, list(variables), of.built))):
        if method == "apply":
            optimizer.apply([tf.constant(0.5)], [variable])
        else:
            optimizer.apply_gradients(iter([(tf.constant(0.5), variable)]))
    assert found[0] == (optimizer, [variable], False)
    assert float(variable.value) == 1.5
    assert (keras.optimizers.Optimizer.apply_gradients, keras.optimizers.Optimizer.apply) == methods


def test_a_moved_keras_variable_is_saved_restored_and_predicted_with(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    x = np.ones((2, 2), np.float32)
    model.predict(x, verbose=0)
    kernel = model.layers[0].kernel
    variable_values.move_variables([(kernel.value, THERE)])
    kernel.assign([[1.0], [2.0]])
    assert kernel.value.device.endswith(THERE)
    assert model.predict(x, verbose=0).tolist() == [[3], [3]]

    checkpoint = tf.train.Checkpoint(kernel=kernel.value)
    saved = checkpoint.save(tmp_path / "c")
    kernel.assign([[0.0], [0.0]])
    checkpoint.restore(saved).assert_consumed()
    assert kernel.numpy().tolist() == [[1], [2]]
    assert kernel.value.device.endswith(THERE)


def test_the_old_memory_is_freed_after_a_move() -> None:
    variable = tf.Variable(tf.ones(4))
    traced = tf.function(lambda: variable + 1.0)
    traced()
    graph = traced.get_concrete_function().graph  # outlives its function
    old = weakref.ref(variable.handle)
    variable_values.move_variables([(variable, THERE)])
    gc.collect()
    assert old() is None
    assert internals.capture_of(graph, variable.handle) is graph.captures[0][1]
    assert traced().numpy().tolist() == [2, 2, 2, 2]


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that walks over all objects of the process."""

    def search(*kinds: type) -> list[object]:
        raise AssertionError(f"searched the process for {kinds}")

    monkeypatch.setattr(internals, "live_instances", search)


@pytest.mark.usefixtures("no_search")
def test_moving_no_variables_skips_the_search_and_changes_no_handle() -> None:
    variable = tf.Variable(2.0)
    handle = variable.handle
    variable_values.move_variables([])
    assert variable.handle is handle
    assert variable.numpy() == 2


def test_moving_a_variable_searches_the_process(no_search: None) -> None:
    with pytest.raises(AssertionError, match="searched the process for"):
        variable_values.move_variables([(tf.Variable(2.0), THERE)])


@pytest.mark.usefixtures("thawed")
def test_frozen_objects_are_found() -> None:
    variable = keras.Variable([1.0, 2.0])
    gc.freeze()
    assert internals.keras_variables([variable.value]) == [variable]


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


# --- releasing variables

ADVICE = "ask for it"


def test_a_released_variable_cannot_be_read_until_it_is_assigned() -> None:
    variable, other = tf.Variable([1.0, 2.0], name="w"), tf.Variable(1.0)

    @tf.function
    def double() -> tf.Tensor:
        return 2 * variable + other

    outer = tf.function(lambda: tf.reduce_sum(double()))
    outer()
    wrapped = tf.compat.v1.wrap_function(lambda: 2 * variable, [])  # a ConcreteFunction of another class
    for value in ([3.0, 4.0], [5.0, 6.0]):
        variable_values.release_variables([variable], ADVICE)
        for read in (variable.numpy, variable.read_value, double, outer, wrapped):
            with pytest.raises(tf.errors.FailedPreconditionError, match=r"w \(ask for it\)"):
                read()
        assert other.numpy() == 1
        variable.assign(value)
        assert variable.numpy().tolist() == value
        assert outer().numpy() == 2 * sum(value) + 2
        assert wrapped().numpy().tolist() == [2 * x for x in value]
        late = tf.function(lambda: variable.read_value()).get_concrete_function()
        assert late.outputs[0].shape == (2,)  # the static shape, in a new trace
    assert double.experimental_get_tracing_count() == 1


def test_a_variable_that_is_released_again_keeps_its_handle() -> None:
    """So no search for functions that captured the old handle is needed."""
    variable = tf.Variable([1.0, 2.0])
    variable_values.release_variables([variable], ADVICE)
    variable.assign([3.0, 4.0])
    handle = variable.handle
    variable_values.release_variables([variable], ADVICE)
    assert variable.handle is handle
    assert not variable.is_initialized()


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")  # a warning of Keras itself
def test_a_released_variable_of_keras_is_trained_saved_and_restored_again(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    kernel, x = model.layers[0].kernel, np.ones((2, 2), np.float32)
    model.predict(x, verbose=0)
    variable_values.release_variables([kernel.value], ADVICE)
    for read in (kernel.numpy, lambda: model.predict(x, verbose=0), lambda: model.save(tmp_path / "model.keras")):
        with pytest.raises(tf.errors.FailedPreconditionError, match="ask for it"):
            read()
    kernel.assign([[1.0], [2.0]])
    assert model.predict(x, verbose=0).tolist() == [[3], [3]]
    saved = tf.train.Checkpoint(kernel=kernel.value).save(tmp_path / "c")
    variable_values.release_variables([kernel.value], ADVICE)
    tf.train.Checkpoint(kernel=kernel.value).restore(saved).assert_consumed()
    assert kernel.numpy().tolist() == [[1], [2]]
    model.export(tmp_path / "saved", verbose=False)
    assert tf.saved_model.load(tmp_path / "saved").serve(x).numpy().tolist() == [[3], [3]]


def test_the_memory_of_a_released_variable_is_freed() -> None:
    variable = tf.Variable(tf.ones(4))
    traced = tf.function(lambda: variable + 1.0)
    traced()
    old = weakref.ref(variable.handle)
    variable_values.release_variables([variable], ADVICE)
    gc.collect()
    assert old() is None


def test_a_released_and_assigned_variable_is_freed_when_it_is_garbage() -> None:
    variable = tf.Variable(tf.ones(4))
    variable_values.release_variables([variable], ADVICE)
    variable.assign(tf.zeros(4))
    same = tf.identity(variable.handle)  # does not keep the resource alive
    assert tf.raw_ops.VarIsInitializedOp(resource=same)
    with tf.Graph().as_default():  # garbage collection may run here
        del variable
        gc.collect()
        assert not tf.compat.v1.get_default_graph().get_operations()
    assert not tf.raw_ops.VarIsInitializedOp(resource=same)


@pytest.mark.usefixtures("no_search")
def test_releasing_no_variables_skips_the_search_and_frees_no_value() -> None:
    variable = tf.Variable(2.0)
    variable_values.release_variables([], ADVICE)
    assert variable.is_initialized()
    assert variable.numpy() == 2


# --- other lookups


def test_keras_variables_finds_the_wrappers_and_leaves_the_rest() -> None:
    wrapped, plain = keras.Variable([1.0]), tf.Variable([2.0])
    found = internals.keras_variables([plain, wrapped.value])
    assert found[0] is plain
    assert found[1] is wrapped


def wrapper_of(variable: tf.Variable) -> keras.Variable:
    """A Keras variable whose value is the given variable: older versions of Keras copy what they wrap."""
    wrapper = keras.Variable(variable)
    wrapper._value = variable
    return wrapper


def test_a_variable_is_searched_for_until_its_wrapper_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = tf.Variable([1.0])
    assert internals.keras_variables([variable])[0] is variable
    wrapped = wrapper_of(variable)
    assert internals.keras_variables([variable])[0] is wrapped
    monkeypatch.setattr(internals, "live_instances", None)
    assert internals.keras_variables([variable])[0] is wrapped


def test_a_variable_whose_wrapper_is_gone_is_searched_for_again() -> None:
    variable = tf.Variable([1.0])
    gone = wrapper_of(variable)
    assert internals.keras_variables([variable])[0] is gone
    del gone
    gc.collect()
    wrapped = wrapper_of(variable)
    assert internals.keras_variables([variable])[0] is wrapped
    wrapped._value = tf.Variable([2.0])
    assert internals.keras_variables([variable])[0] is variable


def test_variables_of_called_layers_are_not_searched_for(no_search: None) -> None:
    inner = keras.layers.Dense(1)
    outer = keras.Sequential([inner])
    with internals.record_layers(lambda layer, begins: None):
        outer(tf.ones((1, 2)))
    found = internals.keras_variables([inner.kernel.value, inner.bias.value])
    assert found[0] is inner.kernel
    assert found[1] is inner.bias


def test_a_variable_that_two_layers_wrap_is_that_of_the_layer_called_last() -> None:
    class Scale(keras.Layer):
        def __init__(self, factor: tf.Variable) -> None:
            super().__init__()
            self.factor = wrapper_of(factor)

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return inputs * self.factor

    variable = tf.Variable([1.0])
    layers = [Scale(variable), Scale(variable)]
    for layer in (*layers, *layers):
        with internals.record_layers(lambda layer, begins: None):
            layer(tf.ones(1))
        assert internals.keras_variables([variable])[0] is layer.factor


def test_keras_variables_carry_constraints() -> None:
    layer = keras.layers.Dense(1, kernel_constraint="non_neg")
    layer.build((None, 2))
    (found,) = internals.keras_variables([layer.kernel.value])
    assert isinstance(found.constraint, keras.constraints.NonNeg)


# --- gradients


def slopes(stop: bool) -> tuple[float | None, float]:
    """Gradients of z = y * y, y = call(x) by x and by y, with or without a stop at y."""
    square = tf.function(lambda x: x * x)
    found = []

    def trace(x: tf.Tensor) -> tf.Tensor:
        y = square(x)
        stops = [y] if stop else []
        with internals.stop_gradients_at_calls(stops):
            found.extend(tf.gradients(y * y, [x, y], stop_gradients=stops))
        return tf.stack([gradient for gradient in found if gradient is not None])

    values = tf.function(trace, autograph=False)(tf.constant(3.0)).numpy().tolist()
    return (None, *values) if stop else tuple(values)


def test_gradients_stop_at_the_given_calls() -> None:
    assert slopes(stop=False) == (108, 18)
    assert slopes(stop=True) == (None, 18)


def test_stopping_at_calls_restores_tensorflows_rule_after_an_exception() -> None:
    original = gradients_util._IsPartitionedCall
    with pytest.raises(ZeroDivisionError), internals.stop_gradients_at_calls([]):
        raise ZeroDivisionError
    assert gradients_util._IsPartitionedCall is original


@pytest.mark.parametrize("op", ["ReadVariableOp", "AssignVariableOp", "RandomUniform", "Assert", "PrintV2", "While"])
def test_stateful_ops(op: str) -> None:
    assert internals.is_stateful_op(op)


@pytest.mark.parametrize("op", ["MatMul", "Identity", "StatelessWhile", "StatelessIf", "PartitionedCall"])
def test_stateless_ops(op: str) -> None:
    assert not internals.is_stateful_op(op)


def test_an_unknown_op_counts_as_stateful() -> None:
    assert internals.is_stateful_op("NoSuchOpEver")


def test_capture_of_gives_the_placeholder_the_graph_already_has() -> None:
    variable, constant = tf.Variable(1.0), tf.constant(2.0)
    graph = tf.function(lambda: variable * constant).get_concrete_function().graph
    captured = {id(outside): inside for outside, inside in graph.captures}
    assert internals.capture_of(graph, variable.handle) is captured[id(variable.handle)]
    assert internals.capture_of(graph, constant) is captured[id(constant)]


# --- options of functions and of their execution


@pytest.mark.parametrize("whole", [True, False])
def test_functions_with_no_inline_are_not_inlined(whole: bool) -> None:
    body = tf.function(
        lambda x: tf.math.softsign(x, name="tell_tale"),
        experimental_attributes={internals.NO_INLINE: whole},
        input_signature=[tf.TensorSpec([2])],
    ).get_concrete_function()
    outer = tf.function(lambda x: body(x) + body(-x)).get_concrete_function(tf.TensorSpec([2]))
    assert {op.type for op in outer.graph.get_operations()} & internals.CALL_OPS
    assert any("tell_tale" in node.name for node in executed_nodes(outer, tf.ones(2))) is not whole


def test_kept_for_gradients_are_values_of_forward_and_captures_of_the_outside() -> None:
    variable, numbers, large = tf.Variable(2.0), tf.constant([3.0, 4.0]), tf.ones([1000])

    @tf.custom_gradient
    def scaled(x: tf.Tensor) -> Any:
        slope = tf.cos(x, name="slope")
        return tf.sin(x), lambda dy: dy * slope * variable * numbers * tf.reduce_mean(large)

    graph = tf.function(lambda x: scaled(x)).get_concrete_function(tf.TensorSpec([2])).graph
    assert len(graph.captures) == 0
    ((name, kept),) = internals.kept_for_gradients(graph).items()
    assert graph.get_operation_by_name(name).type == "IdentityN"
    outside = [tensor for tensor, _ in graph.captures]
    assert {id(tensor) for tensor in outside} == {id(variable.handle), id(numbers), id(large)}
    assert {t.name for t in kept} == {"slope:0", *(placeholder.name for _, placeholder in graph.captures)}
    assert internals.kept_for_gradients(graph, {name}) == {}


@pytest.mark.parametrize("kind", ["PartitionedCall", "StatefulPartitionedCall"])
def test_calls_of_functions_are_call_ops(kind: str) -> None:
    variable = tf.Variable(1.0)
    body = tf.function(lambda: variable + 1.0) if kind.startswith("Stateful") else tf.function(lambda: tf.constant(1.0))
    graph = tf.function(lambda: body()).get_concrete_function().graph
    assert [op.type for op in graph.get_operations() if "Call" in op.type] == [kind]
    assert kind in internals.CALL_OPS


@pytest.mark.parametrize("automatic", [True, False])
def test_no_automatic_control_adds_no_edges(automatic: bool) -> None:
    variable = tf.Variable(1.0)

    def step() -> tf.Tensor:
        variable.assign_add(1.0)
        variable.assign_add(2.0)
        return tf.constant(0.0) + 1.0

    attributes = {} if automatic else {internals.NO_AUTOMATIC_CONTROL: True}
    graph = tf.function(step, autograph=False, experimental_attributes=attributes).get_concrete_function().graph
    assert any(op.control_inputs for op in graph.get_operations()) is automatic


def function_optimization() -> int:
    serialized = context.context().function_call_options.config_proto_serialized
    return config_pb2.ConfigProto.FromString(serialized).graph_options.rewrite_options.function_optimization


def test_specialisation_is_off_in_the_block_and_on_again_after_it() -> None:
    before = context.context().function_call_options
    assert function_optimization() != rewriter_config_pb2.RewriterConfig.OFF
    with internals.without_specialisation():
        assert function_optimization() == rewriter_config_pb2.RewriterConfig.OFF
    assert context.context().function_call_options is before


def test_specialisation_is_on_again_after_an_exception() -> None:
    before = context.context().function_call_options
    with pytest.raises(ZeroDivisionError), internals.without_specialisation():
        raise ZeroDivisionError
    assert context.context().function_call_options is before


def test_specialisation_is_off_in_this_thread_only() -> None:
    found: list[int] = []
    with internals.without_specialisation():
        thread = threading.Thread(target=lambda: found.append(function_optimization()))
        thread.start()
        thread.join()
    assert found != [rewriter_config_pb2.RewriterConfig.OFF]
    assert len(found) == 1


def test_callees_are_not_specialised_for_each_call() -> None:
    """Otherwise TensorFlow runs a copy of the callee for each call."""
    body = tf.function(
        lambda x, y: x * y, experimental_attributes={internals.NO_INLINE: True}, input_signature=[tf.TensorSpec([])] * 2
    ).get_concrete_function()

    def callees() -> set[str]:
        outer = tf.function(lambda x: body(x, tf.constant(2.0)) + body(x, tf.constant(3.0)))
        called = {node.attr["f"].func.name for node in executed_nodes(outer, tf.constant(1.0))}
        # TensorFlow lists other functions of the process too; a specialised copy's name begins with the original's.
        return {name for name in called if name.startswith(body.name.decode())}

    assert len(callees()) == 2
    with internals.without_specialisation():
        assert len(callees()) == 1


def test_the_body_of_a_loop_is_as_it_was_before_its_gradient() -> None:
    """The gradient of a loop adds inputs to the FuncGraph of its body."""
    w = tf.Variable(2.0)

    @tf.function
    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * w), (0, x))[1]

    graph = loss.get_concrete_function(tf.TensorSpec([])).graph
    (loop,) = (op for op in graph.get_operations() if op.type in ("While", "StatelessWhile"))
    name = loop.get_attr("body").name
    before = internals.function_graph(graph, name)
    inputs = len(before.inputs)
    with graph.as_default():
        tf.gradients([tensor for tensor in loop.outputs if tensor.dtype == tf.float32], graph.inputs[0])
    assert len(before.inputs) > inputs
    after = internals.function_graph(graph, name)
    assert len(after.inputs) == inputs
    (handle,) = (tensor for tensor in after.inputs if tensor.dtype == tf.resource)
    data = handle_data_util.get_resource_handle_data(handle)
    assert [tf.as_dtype(item.dtype) for item in data.shape_and_type] == [tf.float32]


def test_a_ragged_tensor_of_which_all_is_given_is_that_of_tensorflow() -> None:
    wanted = tf.RaggedTensor.from_row_lengths([1.0, 2.0, 3.0], [2, 0, 1])
    facts = internals.RaggedPartition(wanted.value_rowids(), wanted.row_lengths(), wanted.nrows(), tf.constant(2))
    found = internals.ragged_tensor(wanted.values, facts, {})
    assert found.to_list() == wanted.to_list()
    assert found.value_rowids() is facts.row_ids


def test_ragged_tensors_are_reduced_and_padded_by_what_is_known_in_the_block_only() -> None:
    values, lengths = tf.constant([1.0, 2.0, 3.0]), tf.constant([2, 0, 1], tf.int64)
    row_ids, rows, longest = tf.constant([0, 0, 2], tf.int64), tf.constant(3, tf.int64), tf.constant(4, tf.int64)
    with internals.use_ragged_partitions() as known:
        ragged = internals.ragged_tensor(values, internals.RaggedPartition(row_ids, lengths, rows, longest), known)
        turned = internals.ragged_tensor(values, internals.RaggedPartition(2 - row_ids, lengths, rows, longest), known)
        other = tf.ragged.constant([[1.0], [2.0]])
        assert tf.reduce_sum(turned, axis=1).numpy().tolist() == [3.0, 0.0, 3.0]
        assert tf.reduce_max(turned, axis=1).numpy().tolist()[0] == 3.0
        assert tf.reduce_sum(other, axis=1).numpy().tolist() == [1.0, 2.0]
        assert ragged.to_tensor().shape == (3, 4)
        assert other.to_tensor().shape == (2, 1)
        assert ragged.to_tensor(shape=[None, 3]).shape == (3, 3)
    assert tf.reduce_max(turned, axis=1).numpy().tolist()[0] == 2.0
    assert ragged.to_tensor().shape == (3, 2)


def test_only_callees_are_optimised_where_that_is_asked_for() -> None:
    """Grappler folds the constant product of the callee, and leaves that of the graph which calls it."""

    @tf.function(input_signature=[tf.TensorSpec([])], experimental_attributes={internals.NO_INLINE: True})
    def body(x: tf.Tensor) -> tf.Tensor:
        return x + tf.constant(2.0) * tf.constant(3.0)

    @tf.function
    def outer(x: tf.Tensor) -> tf.Tensor:
        return body(x) + tf.constant(5.0) * tf.constant(7.0)

    def products(optimise_caller: bool) -> int:
        with internals.without_specialisation(optimise_caller=optimise_caller):
            return [node.op for node in executed_nodes(outer, tf.constant(1.0))].count("Mul")

    assert products(True) == 0
    assert products(False) == 1


def test_the_optimiser_makes_one_round_where_that_is_asked_for() -> None:
    """Two constants are added in the second round: in the first, transposes stood between their sums."""

    def body(x: tf.Tensor) -> tf.Tensor:
        return tf.transpose(tf.transpose(x + tf.constant(2.0))) + tf.constant(3.0)

    function = tf.function(body).get_concrete_function(tf.TensorSpec([2, 3]))

    def sums() -> int:
        return [node.op for node in executed_nodes(function, tf.ones([2, 3]))].count("AddV2")

    assert sums() == 1
    with internals.one_grappler_iteration():
        assert sums() == 2


def test_a_call_traced_for_one_grappler_iteration_says_so_where_it_runs() -> None:
    inner = tf.function(lambda x: x + 1.0, experimental_attributes={internals.NO_INLINE: True})

    def rounds() -> int:
        outer = tf.function(lambda x: inner(x)).get_concrete_function(tf.TensorSpec([]))
        (op,) = (op for op in outer.graph.get_operations() if op.type in internals.CALL_OPS)
        options = config_pb2.ConfigProto.FromString(op.get_attr("config_proto")).graph_options.rewrite_options
        return int(options.meta_optimizer_iterations)

    assert rounds() == rewriter_config_pb2.RewriterConfig.DEFAULT_NUM_ITERS
    with internals.one_grappler_iteration():
        assert rounds() == rewriter_config_pb2.RewriterConfig.ONE
    assert rounds() == rewriter_config_pb2.RewriterConfig.DEFAULT_NUM_ITERS


def test_inlined_calls_wait_for_their_control_inputs_without_specialisation() -> None:
    """With it, Grappler inlines calls so that their writes may run before the call's control inputs."""
    read, written = tf.Variable(0.0), tf.Variable(0.0)
    specs = [tf.TensorSpec([], tf.resource)] * 2

    @tf.function(autograph=False, input_signature=specs, experimental_attributes={internals.NO_INLINE: False})
    def inner(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
        tf.raw_ops.AssignVariableOp(resource=target, value=tf.constant(7.0))
        return tf.raw_ops.ReadVariableOp(resource=source, dtype=tf.float32)

    concrete = inner.get_concrete_function()

    @tf.function(autograph=False, experimental_attributes={internals.NO_AUTOMATIC_CONTROL: True})
    def outer(start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        slow = tf.ones([600, 600]) * start
        for _ in range(8):
            slow = tf.matmul(slow, slow) * 0.0 + start
        handles = [internals.capture_of(tf.compat.v1.get_default_graph(), v.handle) for v in (read, written)]
        early = tf.raw_ops.ReadVariableOp(resource=handles[1], dtype=tf.float32)
        with tf.control_dependencies([slow]):
            late = tf.raw_ops.ReadVariableOp(resource=handles[1], dtype=tf.float32)
        with tf.control_dependencies([late]):
            assign = tf.raw_ops.AssignVariableOp(resource=handles[0], value=tf.constant(1.0))
        with tf.control_dependencies([assign, early]):
            result = concrete(*handles)
        return result, late

    with internals.without_specialisation():
        result, before = outer(tf.constant(1.0))
    assert float(result) == 1.0  # its read waited for the assignment
    assert float(before) == 0.0  # its write did not come before
    assert float(written) == 7.0


# --- functions of a trace, and copies of ops


def test_is_op_knows_tensorflows_ops_and_nothing_else() -> None:
    assert internals.is_op("MatMul")
    assert internals.is_op("StatelessRandomNormalV2")
    assert not internals.is_op("__inference_loss_12")
    assert not internals.is_op("matmul")


def called(graph: tf.Graph) -> str:
    """The name of the function that the only call in ``graph`` calls."""
    (op,) = (op for op in graph.get_operations() if op.type in internals.CALL_OPS)
    return str(op.get_attr("f").name)


def test_function_graph_gives_the_body_of_a_called_function() -> None:
    inner = tf.function(lambda x: tf.tanh(x) * 2)
    outer = tf.function(lambda x: inner(x) + 1).get_concrete_function(tf.TensorSpec([None, 2])).graph
    body = internals.function_graph(outer, called(outer))
    assert [op.type for op in body.get_operations() if op.type in ("Tanh", "Mul", "AddV2")] == ["Tanh", "Mul"]
    assert len(body.inputs) == len(body.outputs) == 1


def test_function_graph_gives_the_body_of_a_restored_function(tmp_path: Path) -> None:
    module = tf.Module()
    module.call = tf.function(lambda x: tf.tanh(x), input_signature=[tf.TensorSpec([None])])
    tf.saved_model.save(module, tmp_path)
    restored = tf.saved_model.load(tmp_path)
    outer = tf.function(lambda x: restored.call(x)).get_concrete_function(tf.TensorSpec([None])).graph
    body = internals.function_graph(outer, called(outer))
    while any(op.type in internals.CALL_OPS for op in body.get_operations()):
        body = internals.function_graph(body, called(body))
    assert "Tanh" in [op.type for op in body.get_operations()]


def test_a_placeholder_like_a_list_knows_the_shapes_of_its_elements() -> None:
    with tf.Graph().as_default():
        elements = tf.raw_ops.TensorListFromTensor(tensor=tf.zeros([5, 3]), element_shape=tf.constant([3]))
        like = internals.placeholder_like(elements, [])
        item = tf.raw_ops.TensorListGetItem(
            input_handle=like, index=0, element_shape=tf.constant(-1), element_dtype=tf.float32
        )
    assert (like.op.type, like.dtype, like.shape) == ("Placeholder", tf.variant, ())
    assert item.shape == (3,)


def test_a_placeholder_like_a_variable_can_be_read() -> None:
    variable = tf.Variable([[1.0, 2.0]])
    with tf.Graph().as_default():
        like = internals.placeholder_like(variable.handle, [])
        value = tf.raw_ops.ReadVariableOp(resource=like, dtype=tf.float32)
    assert value.shape == (1, 2)


def test_a_placeholder_like_a_tensor_has_the_shape_that_is_asked_for() -> None:
    with tf.Graph().as_default():
        like = internals.placeholder_like(tf.zeros([2], tf.int64), [7, None])
    assert like.dtype == tf.int64
    assert like.shape.as_list() == [7, None]


def test_a_copy_of_an_op_has_its_attributes_and_other_inputs() -> None:
    @tf.function(autograph=False)
    def product(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        result = tf.matmul(x, y, transpose_b=True)
        copy = internals.copy_op(tf.compat.v1.get_default_graph(), result.op, [y, x])
        assert copy.type == "MatMul"
        assert copy.get_attr("transpose_b") is True
        return result, copy.outputs[0]

    result, copied = product(tf.ones([2, 3]), 2 * tf.ones([5, 3]))
    assert copied.shape == (5, 2)
    np.testing.assert_array_equal(copied, tf.transpose(result))


def test_a_copy_of_an_op_is_differentiated() -> None:
    @tf.function(autograph=False)
    def slope(x: tf.Tensor) -> tf.Tensor:
        squared = tf.square(x)
        copy = internals.copy_op(tf.compat.v1.get_default_graph(), squared.op, [3 * x])
        return tf.gradients(copy.outputs, x)[0]

    assert slope(tf.constant(2.0)) == 36


def test_the_gradient_of_an_op_is_traced_as_a_function_of_gradients_and_captured_tensors() -> None:
    @tf.custom_gradient
    def scaled(x: Any, y: Any) -> Any:
        return x * y, lambda dy: (dy * y, None)

    @tf.function
    def function(x: Any, y: Any) -> Any:
        return scaled(x, y)

    graph = function.get_concrete_function(*[tf.TensorSpec([3], tf.float32)] * 2).graph
    (op,) = (op for op in graph.get_operations() if op.type == "IdentityN")
    assert not internals.has_library_gradient(graph, op.name)
    traced = internals.trace_gradient(graph, op.name)
    assert [tensor is graph.inputs[1] for tensor in traced.captured] == [True]
    (place,) = traced.places
    assert op.inputs[place] is graph.inputs[0]
    assert len(traced.func_graph.inputs) == len(op.outputs) + 1


def test_a_gradient_of_tensorflow_is_known() -> None:
    traced = tf.function(tf.nn.silu).get_concrete_function(tf.TensorSpec([3], tf.float32))
    (op,) = (op for op in traced.graph.get_operations() if op.type == "IdentityN")
    assert internals.has_library_gradient(traced.graph, op.name)


def test_a_function_of_tensorflow_that_a_user_gives_as_gradient_is_the_users() -> None:
    signed = tf.custom_gradient(lambda x: (tf.identity(x), tf.sign))
    graph = tf.function(lambda x: signed(x)).get_concrete_function(tf.TensorSpec([3], tf.float32)).graph
    (op,) = (op for op in graph.get_operations() if op.type == "IdentityN")
    assert not internals.has_library_gradient(graph, op.name)


# --- the start of TensorFlow


def test_the_start_of_tensorflow_is_noticed() -> None:
    """In a process of its own: here it has started long ago."""
    program = """
from dapple_tf import internals, variable_values
import tensorflow as tf
assert not internals.tensorflow_has_started()
tf.constant(1)
assert internals.tensorflow_has_started()
"""
    run_python("-c", program)


# --- compiled Keras models


def two_losses() -> keras.Model:
    inputs = keras.Input([2])
    outputs = [keras.layers.Dense(1, name=name)(inputs) for name in ("first", "second")]
    model = keras.Model(inputs, outputs, name="net")
    model.compile("sgd", ["mse", "mae"])
    return model


def test_the_losses_of_outputs_are_collected_and_their_metrics_left_alone() -> None:
    model = two_losses()
    x, y = tf.ones([3, 2]), [tf.ones([3, 1]), tf.zeros([3, 1])]
    outputs = internals.call_model(model, x, training=True)
    for _ in range(2):  # the first call makes the metrics
        with internals.output_losses(model) as losses:
            total = internals.compute_loss(model, x, y, outputs, None, training=True)
        assert float(total) == pytest.approx(float(sum(losses)))
        expected = [tf.reduce_mean(tf.square(outputs[0] - 1)), tf.reduce_mean(tf.abs(outputs[1]))]
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert [metric.name for metric in internals.loss_metrics(model)] == ["first_loss", "second_loss"]
    assert [float(metric.result()) for metric in internals.loss_metrics(model)] == [0, 0]
    assert internals.loss_tracker(model) is model.metrics[0]
    with internals.output_losses(keras.Sequential()) as none:
        assert none == []


def test_a_model_is_called_as_a_step_of_keras_calls_it() -> None:
    class Plain(keras.Model):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x

    model = Plain()
    assert internals.call_model(model, tf.ones([1, 2]), training=True).shape == (1, 2)
    dropout = keras.Sequential([keras.layers.Dropout(0.999)])
    assert float(tf.reduce_sum(internals.call_model(dropout, tf.ones([1, 50]), training=False))) == 50
    assert float(tf.reduce_sum(internals.call_model(dropout, tf.ones([1, 50]), training=True))) != 50


def test_methods_that_keras_calls_are_where_they_were() -> None:
    newer = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 12)
    assert ("_autoconvert_optionals" in internals.MAKING_FUNCTIONS) == newer
    assert "_make_function" in internals.MAKING_FUNCTIONS
    for name in internals.BEFORE_CLIPPING:
        assert callable(getattr(keras.optimizers.Optimizer, name))


def test_an_optimizer_knows_the_variables_for_which_it_was_built() -> None:
    kept, plain, optimizer = keras.Variable(1.0), tf.Variable(1.0), keras.optimizers.SGD()
    assert internals.built_for(optimizer) == []
    optimizer.build([kept, plain])
    assert [id(variable) for variable in internals.built_for(optimizer)] == [id(kept), id(plain)]
    assert internals.as_tf_variable(kept) is kept.value
    assert internals.as_tf_variable(plain) is plain


def test_functions_that_keras_makes_are_told_from_others() -> None:
    model = two_losses()
    model.compile("sgd", ["mse", "mae"])
    for kind in ("train", "test", "predict"):
        getattr(model, f"make_{kind}_function")()
        assert internals.is_of_keras(getattr(model, f"{kind}_function"))
    assert internals.is_of_keras(keras.optimizers.SGD().apply)
    assert not internals.is_of_keras(lambda batches: None)


def test_methods_and_metrics_of_ones_own_are_found() -> None:
    class Own(keras.Model):
        def compute_metrics(self, *args: object, **options: object) -> dict[str, object]:
            return {}

    assert internals.overrides(Own(), keras.Model, "compute_metrics")
    assert not internals.overrides(Own(), keras.Model, "train_step")
    assert internals.has_metrics(Own())
    model = two_losses()
    assert not internals.has_metrics(model)
    model.train_step = lambda data: {}
    assert internals.overrides(model, keras.Model, "train_step")
    model.compile("sgd", ["mse", "mae"], metrics=["mae", "mae"])
    assert internals.has_metrics(model)


def test_a_model_knows_its_strategy() -> None:
    assert not internals.has_strategy(two_losses())
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        assert internals.has_strategy(two_losses())
        assert internals.has_strategy(keras.optimizers.SGD())
    assert not internals.has_strategy(keras.optimizers.SGD())


def test_masks_are_kept_with_tensors() -> None:
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(tf.constant([[1, 0]]))
    mask = internals.keras_mask(embedded)
    np.testing.assert_array_equal(mask, [[True, False]])
    other = tf.ones([1, 2])
    assert internals.keras_mask(other) is None
    internals.set_keras_mask(other, mask)
    assert keras.losses.MeanAbsoluteError()(tf.zeros([1, 2, 1]), tf.reshape(other, [1, 2, 1])) == 1
    metric = keras.metrics.MeanMetricWrapper(lambda y, p: keras.ops.cast(p, "float32"))
    predicted = tf.constant([[1.0, 5.0]])
    internals.set_keras_mask(predicted, mask)
    metric.update_state(
        predicted, predicted, sample_weight=tf.ones([1, 2])
    )  # before Keras 3.12, only weights are masked
    assert float(metric.result()) == 1


def test_the_global_seed() -> None:
    before = internals.global_seed()
    tf.random.set_seed(5)
    assert internals.global_seed() == 5
    tf.random.set_seed(before)
    assert internals.global_seed() == before


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")  # Keras's own
def test_a_backup_is_loaded_and_saved_by_methods_of_the_callback(tmp_path: Path) -> None:
    calls = []
    model = two_losses()
    callback = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    for name in (internals.BACKUP_LOAD, internals.BACKUP_SAVE):
        original = getattr(callback, name)
        setattr(callback, name, lambda name=name, original=original: [calls.append(name), original()])
    assert internals.initial_epoch(model) is None
    model.fit(np.ones([2, 2]), [np.ones([2, 1])] * 2, verbose=0, callbacks=[callback])
    assert calls == [internals.BACKUP_LOAD, internals.BACKUP_SAVE]
    assert internals.backup_path(callback).startswith(str(tmp_path / "backup"))
    internals.set_initial_epoch(model, 3)
    history = model.fit(np.ones([2, 2]), [np.ones([2, 1])] * 2, verbose=0, epochs=4)
    assert history.epoch == [3]


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")  # Keras's own
def test_saving_through_files_holds_no_copy_of_the_weights_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    made: list[str] = []
    real = tempfile.NamedTemporaryFile
    monkeypatch.setattr(
        tempfile, "NamedTemporaryFile", lambda **options: made.append(options["dir"]) or real(**options)
    )
    model.save(tmp_path / "in_memory.keras")
    assert made == []
    with internals.saving_through_files():
        model.save(tmp_path / "through_file.keras")
    assert made == [tmp_path]
    model.save(tmp_path / "in_memory.keras")
    assert len(made) == 1
    saved = keras.models.load_model(tmp_path / "through_file.keras")
    np.testing.assert_array_equal(saved.get_weights()[0], model.get_weights()[0])


@pytest.mark.parametrize("jit_compile", [None, False, True])
def test_is_compiled_by_xla(jit_compile: bool | None) -> None:
    assert internals.is_compiled_by_xla(tf.function(lambda x: x, jit_compile=jit_compile)) is bool(jit_compile)
    assert internals.is_compiled_by_xla(len) is False


DTYPES = (
    tf.float32,
    tf.float16,
    tf.bfloat16,
    tf.dtypes.experimental.float8_e4m3fn,
    tf.bool,
    tf.int8,
    tf.uint64,
    tf.complex128,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (100, 100)])
def test_arrays_become_tensors_and_values_arrays(dtype: tf.DType, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype.as_numpy_dtype)
    tensor = internals.as_tensor(array.copy())
    assert tensor.dtype == dtype
    assert tensor.shape == shape
    value = np.asarray(internals.view_value(tf.Variable(tensor)))
    assert value.dtype == array.dtype
    np.testing.assert_array_equal(value, array)


def test_an_aligned_array_and_the_view_of_a_value_are_not_copied() -> None:
    raw = np.zeros(64 + 4000, np.uint8)
    begin = -raw.ctypes.data % 64
    array = raw[begin : begin + 4000].view(np.float32)
    variable = tf.Variable(internals.as_tensor(array))
    assert internals.view_value(variable).ctypes.data == internals.view_value(variable).ctypes.data
    assert internals.view_value(variable).ctypes.data == array.ctypes.data


def test_an_update_does_not_change_an_array_that_is_read_only() -> None:
    raw = np.zeros(64 + 4000, np.uint8)
    begin = -raw.ctypes.data % 64
    array = raw[begin : begin + 4000].view(np.float32)
    array.flags.writeable = False
    variable = tf.Variable(internals.as_tensor(array))
    variable.assign_add(tf.ones([1000]))
    assert not raw.any()
    assert variable.numpy().all()


def test_find_xla_problem() -> None:
    with tf.device("CPU:1"):
        variable = tf.Variable([1.0, 2.0])

    def problem(function: Any, device: str = variable.device) -> Any:
        spec = tf.TensorSpec([2], tf.float32)
        return internals.find_xla_problem(tf.function(function).get_concrete_function(spec), device)

    assert problem(lambda x: x * variable) is None
    assert problem(lambda x: variable.assign_sub(x)) is None
    assert variable.numpy().tolist() == [1, 2]  # nothing ran
    assert "No registered 'AsString' OpKernel" in problem(lambda x: tf.strings.as_string(x))
    assert "must be a compile-time constant" in problem(lambda x: tf.zeros(tf.cast(x, tf.int32)))
    assert "located in device" in problem(lambda x: x * variable, tf.constant(0.0).device)


def test_constant_value() -> None:
    values: list[Any] = []

    @tf.function
    def function(x: Any, y: Any) -> None:
        shapes = tf.raw_ops.ShapeN(input=[x, y], out_type=tf.int64)
        values.extend(map(internals.constant_value, (tf.shape(x)[0] * 2, shapes[1], x[0], tf.constant([3]))))

    function.get_concrete_function(tf.TensorSpec([6, 2]), tf.TensorSpec([4, 5]))
    assert [None if value is None else value.tolist() for value in values] == [12, [4, 5], None, [3]]
    assert values[1].dtype == np.int64


def test_the_names_of_all_ops_are_those_of_the_registry() -> None:
    names = internals.op_names()
    assert {"AddV2", "Unique", "AssignVariableOp"} <= set(names)
    assert all(map(internals.is_op, names))


def test_flatten_layers_finds_layers_in_layers() -> None:
    inner = keras.layers.Dense(2)
    outer = keras.layers.TimeDistributed(inner)
    model = keras.Sequential([keras.Input((3, 2)), keras.Sequential([keras.Input((3, 2)), outer])])
    found = internals.flatten_layers(model)
    assert inner in found
    assert outer in found
    assert model not in found


@pytest.mark.parametrize(("iteration", "waits"), [(5, True), (6, False)])
def test_the_outputs_of_a_loop_wait_for_iterations_before_it_ends(iteration: int, waits: bool) -> None:
    """Of 8 iterations, 3 side by side: the outputs come from iteration 8, which begins after the end of iteration 5.

    ``SteadyState`` relies on this, to find loops of ranks that would wait for each other.
    """
    given, arrived = threading.Event(), []

    def hold(number: Any) -> Any:
        if number == iteration:
            arrived.append(given.wait(1.0 if waits else 20.0))
        return number

    def note(number: Any) -> Any:
        given.set()
        return number

    def run() -> Any:
        def body(number: Any, _: Any) -> tuple[Any, Any]:
            held = tf.numpy_function(hold, [number], tf.int64)
            return number + 1, tf.ensure_shape(held, [])

        zero = tf.zeros([], tf.int64)
        count, last = tf.while_loop(lambda number, _: number < 8, body, [zero, zero], parallel_iterations=3)
        return tf.numpy_function(note, [count], tf.int64), last

    unordered = {internals.NO_AUTOMATIC_CONTROL: True}
    tf.function(run, autograph=False, experimental_attributes=unordered)()
    assert arrived == [not waits]
