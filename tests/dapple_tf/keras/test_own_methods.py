"""Each method that a user overrides is called as Keras calls it, or refused by name; none is passed over in silence."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import CaptureError, UsageError
from dapple_tf.keras.install import REFUSED
from tests.dapple_tf.keras import models
from tests.dapple_tf.keras.models import X, Y
from tests.dapple_tf.keras.plain import assert_equal_to_plain

SGD = keras.optimizers.SGD

# --- all methods of Keras's classes

# What Keras tracks of the attributes that are set on a model: the functions of a batch, which the pipeline sets.
TRACKING = {"_deferred_dependencies", "_handle_deferred_dependencies", "_lookup_dependency", "_track_trackable"}
SAVING = ("from_config", "get_config", "load_own_variables", "save_own_variables")
DESCRIBING = ("dtype", "dtype_policy", "path", "input", "output", "count_params", "quantize", "quantized_build")
LAYER = (
    *("add_loss", "add_metric", "add_variable", "add_weight", "build", "call", "compute_dtype", "compute_mask"),
    *("compute_output_shape", "compute_output_spec", "input_dtype", "input_spec", "losses", "metrics", "trainable"),
    *("metrics_variables", "non_trainable_variables", "non_trainable_weights", "quantization_mode", "quantized_call"),
    *("rematerialized_call", "supports_masking", "symbolic_call", "trainable_variables", "trainable_weights"),
    *("variable_dtype", "variables", "weights"),
)
HOOKS = [f"on_{kind}_{end}" for kind in ("train", "test", "predict", "epoch", "batch") for end in ("begin", "end")]
HOOKS += [f"on_{kind}_batch_{end}" for kind in ("train", "test", "predict") for end in ("begin", "end")]

CALLED: Mapping[type[Any], tuple[str, ...]] = {
    keras.Model: (
        *LAYER,
        *("compile", "compute_loss", "compute_metrics", "evaluate", "fit", "get_metrics_result", "jit_compile"),
        *("predict", "predict_on_batch", "reset_metrics", "run_eagerly", "test_on_batch", "train_on_batch"),
        *(
            "distribute_strategy",
            "layers",
            "loss",
            "metrics_names",
            "get_layer",
            "save",
            "save_weights",
            "load_weights",
        ),
        *("export", "get_weights", "set_weights", "train_step", "test_step", "predict_step"),
    ),
    keras.optimizers.Optimizer: (
        *("add_optimizer_variables", "add_variable", "add_variable_from_reference", "apply", "apply_gradients"),
        *("assign", "assign_add", "assign_sub", "build", "exclude_from_weight_decay", "finalize_variable_values"),
        *("iterations", "learning_rate", "scale_loss", "update_step", "variables", "set_weights"),
    ),
    keras.optimizers.LossScaleOptimizer: ("check_finite",),
    keras.metrics.Metric: ("add_variable", "add_weight", "dtype", "reset_state", "result", "update_state", "variables"),
    keras.losses.Loss: ("call", "dtype"),
    keras.layers.Layer: LAYER,
    keras.callbacks.Callback: (*HOOKS, "model", "set_model", "set_params"),
}
NO_PART_IN_TRAINING: Mapping[type[Any], tuple[str, ...]] = {
    keras.Model: (
        *("build_from_config", "get_build_config", "compile_from_config", "get_compile_config", "summary", "to_json"),
        *("get_state_tree", "set_state_tree", "stateless_call", "stateless_compute_loss"),  # of JAX
        *("compiled_loss", "compiled_metrics", "distribute_reduction_method"),  # of older train steps, and strategies
        "get_quantization_layer_structure",
    ),
    keras.optimizers.Optimizer: ("stateless_apply",),  # Keras refuses it under TensorFlow
    keras.optimizers.LossScaleOptimizer: (),
    keras.metrics.Metric: ("stateless_reset_state", "stateless_result", "stateless_update_state"),
    keras.losses.Loss: (),
    keras.layers.Layer: ("build_from_config", "get_build_config", "get_weights", "set_weights", "stateless_call"),
    keras.callbacks.Callback: (),
}


@pytest.mark.parametrize("kind", CALLED, ids=lambda kind: kind.__name__)
def test_every_public_method_of_keras_is_called_or_refused_or_has_no_part_in_training(kind: type[Any]) -> None:
    known = {*SAVING, *DESCRIBING, *REFUSED}
    for base in inspect.getmro(kind):
        known |= {*CALLED.get(base, ()), *NO_PART_IN_TRAINING.get(base, ())}
    assert {name for name in dir(kind) if not name.startswith("_")} <= known, "new in this Keras: which of these is it?"


def noting(name: str, method: Any, calls: set[str]) -> Any:
    """``method`` of a class of Keras, a function or a property, which notes its calls."""
    if isinstance(method, property):

        def get(self: Any) -> Any:
            calls.add(name)
            return method.fget(self)

        return property(get, method.fset, method.fdel)

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        calls.add(name)
        return method(*args, **options)

    return call


def overriding_all(base: type[Any], calls: set[str], but: Any = ()) -> type[Any]:
    """A subclass that overrides every method and property of ``base``, also private ones, and notes the calls."""
    body = {}
    for name in dir(base):
        method = inspect.getattr_static(base, name)
        overridable = inspect.isfunction(method) or isinstance(method, property)
        if overridable and name not in but and (name == "__call__" or not name.startswith("__")):
            body[name] = noting(name, method, calls)
    return type(f"Own{base.__name__}", (base,), body)


def use_all(pipelined: bool) -> dict[str, set[str]]:
    """The methods of each kind of object that are called while a model is used in every way."""
    calls: dict[str, set[str]] = {kind: set() for kind in ("model", "optimizer", "metric", "loss", "layer", "callback")}
    dense = overriding_all(keras.layers.Dense, calls["layer"])

    class Net(overriding_all(keras.Model, calls["model"], REFUSED)):  # type: ignore[misc]  # made here
        def __init__(self) -> None:
            super().__init__()
            self.dense = [dense(4), dense(1)]

        def call(self, x: Any) -> Any:
            return self.dense[1](self.dense[0](x))

    model = Net()
    model.compile(
        overriding_all(keras.optimizers.Adam, calls["optimizer"])(),
        overriding_all(keras.losses.MeanSquaredError, calls["loss"])(),
        metrics=[overriding_all(keras.metrics.MeanAbsoluteError, calls["metric"])()],
    )
    if pipelined:
        dapple.keras.pipeline(model, stages=2, micro_batches=2)
    for called in calls.values():
        called.clear()
    callback = overriding_all(keras.callbacks.Callback, calls["callback"])()
    model.fit(X[:8], Y[:8], verbose=0, validation_data=(X[:8], Y[:8]), callbacks=[callback])
    model.evaluate(X[:8], Y[:8], verbose=0)
    model.predict(X[:8], verbose=0, callbacks=[callback])
    model.train_on_batch(X[:8], Y[:8])
    model.test_on_batch(X[:8], Y[:8])
    model.predict_on_batch(X[:8])
    return calls


def test_every_method_that_keras_calls_is_called_over_a_pipeline() -> None:
    plain, piped = use_all(pipelined=False), use_all(pipelined=True)
    assert {"apply_gradients", "update_step", "scale_loss", "finalize_variable_values"} <= plain["optimizer"]
    for kind, called in plain.items():
        assert called - piped[kind] <= TRACKING, kind


# --- methods of a model that are refused


def wrapped(method: Any) -> Any:
    @functools.wraps(method)
    def own(*args: Any, **options: Any) -> Any:
        return method(*args, **options)

    return own


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_a_pipeline_would_not_run_is_refused_with_the_alternative(name: str) -> None:
    layers = [keras.Input([6]), keras.layers.Dense(1)]
    model = type("Own", (keras.Sequential,), {name: wrapped(getattr(keras.Model, name))})(layers)
    model.compile("sgd", "mse")
    with pytest.raises(
        CaptureError, match=rf"Own overrides {name}, which a pipeline would not run: .* dapple.pipeline"
    ):
        dapple.keras.pipeline(model)
    model = models.sequential()
    setattr(model, name, wrapped(getattr(model, name)))
    with pytest.raises(CaptureError, match=f"overrides {name}"):
        dapple.keras.pipeline(model)


@pytest.mark.parametrize("name", [*REFUSED, "train_step", "test_step", "predict_step"])
def test_a_method_that_is_replaced_after_the_line_is_refused(name: str) -> None:
    model = models.sequential()
    dapple.keras.pipeline(model, stages=2, micro_batches=2)
    setattr(model, name, wrapped(getattr(keras.Sequential, name).__get__(model)))
    with pytest.raises((CaptureError, UsageError), match=f"{name}|a step of its own"):
        model.fit(X, Y, verbose=0)


def test_a_function_of_a_batch_of_ones_own_is_refused() -> None:
    model = models.sequential()
    model.train_function = lambda batches: {"loss": 0.0}
    with pytest.raises(CaptureError, match="net has a train_function of its own, which a pipeline would not run"):
        dapple.keras.pipeline(model)
    model.train_function = None
    model.train_on_batch(X, Y)  # Keras makes its own
    dapple.keras.pipeline(model, stages=2, micro_batches=2)
    assert model.train_on_batch(X, Y) > 0
    model.train_function = lambda batches: {"loss": 0.0}
    with pytest.raises(UsageError, match=r"net.train_function was replaced after dapple.keras.pipeline: call dapple"):
        model.train_on_batch(X, Y)


@pytest.mark.parametrize(
    ("name", "value"),
    [("optimizer", SGD(1.0)), ("run_eagerly", True), ("jit_compile", True), ("steps_per_execution", 2)],
)
def test_what_compile_sets_cannot_be_changed_after_the_line(name: str, value: Any) -> None:
    model = models.sequential()
    dapple.keras.pipeline(model, stages=2, micro_batches=2)
    setattr(model, name, value)
    with pytest.raises(UsageError, match=f"net.{name} was changed after dapple.keras.pipeline: call dapple.keras.pipe"):
        model.fit(X, Y, verbose=0)


def test_a_restored_model_has_its_own_methods_again() -> None:
    model = models.sequential()
    own = model.fit = wrapped(model.fit)
    dapple.keras.pipeline(model, stages=2)
    assert model.fit is not own
    dapple.keras.restore(model)
    assert model.fit is own
    assert not {name for name in REFUSED if name in vars(model)}


# --- methods of an optimizer

Pairs = Any


class Scaling(SGD):
    def apply_gradients(self, grads_and_vars: Pairs) -> Any:
        return super().apply_gradients([(None if g is None else 100 * g, v) for g, v in grads_and_vars])


class OnlyKernels(keras.optimizers.Adam):
    """An optimizer that Keras builds for fewer variables than it is given."""

    def apply_gradients(self, grads_and_vars: Pairs) -> Any:
        return super().apply_gradients([(g, v) for g, v in grads_and_vars if "kernel" in v.name])


class WithoutTheFirst(SGD):
    def apply_gradients(self, grads_and_vars: Pairs) -> Any:
        return super().apply_gradients([(g / (i + 1), v) for i, (g, v) in enumerate(grads_and_vars)][1:])


class Twice(SGD):
    def apply_gradients(self, grads_and_vars: Pairs) -> Any:
        pairs = list(grads_and_vars)
        super().apply_gradients(pairs)
        return super().apply_gradients([(0.5 * g, v) for g, v in pairs])


class OwnNorm(SGD):
    def apply_gradients(self, grads_and_vars: Pairs) -> Any:
        gradients, variables = zip(*grads_and_vars, strict=True)
        clipped, _ = tf.clip_by_global_norm(list(gradients), 0.01)
        return super().apply_gradients(zip(clipped, variables, strict=True))


class Averaging(SGD):
    def build(self, variables: Any) -> None:
        super().build(variables)
        self.averages = self.add_optimizer_variables(variables, "mine")

    def apply_gradients(self, grads_and_vars: Pairs) -> Any:
        pairs = list(grads_and_vars)
        result = super().apply_gradients(pairs)
        for average, (_, variable) in zip(self.averages, pairs, strict=True):
            average.assign(0.9 * average + 0.1 * variable)
        return result


class ByHand(SGD):
    """An optimizer that is never built."""

    def apply_gradients(self, grads_and_vars: Pairs) -> None:
        for gradient, variable in grads_and_vars:
            variable.assign_sub(0.1 * gradient)
            variable.assign(0.99 * variable)
        self.iterations.assign_add(1)


class EverySecond(SGD):
    def apply_gradients(self, grads_and_vars: Pairs) -> None:
        pairs = list(grads_and_vars)
        apply = super().apply_gradients

        def update() -> None:
            apply(pairs)

        def count() -> None:
            self._iterations.assign_add(1)

        tf.cond(self._iterations % 2 == 0, update, count)


class ByAllWeights(SGD):
    def apply_gradients(self, grads_and_vars: Pairs) -> Any:
        pairs = list(grads_and_vars)
        size = tf.add_n([tf.reduce_sum(tf.square(variable)) for _, variable in pairs])
        return super().apply_gradients([(g / (1 + size), v) for g, v in pairs])


class Zeros(keras.optimizers.Adam):
    """An optimizer that updates variables without a gradient too."""

    def apply_gradients(self, grads_and_vars: Pairs) -> Any:
        return super().apply_gradients([(tf.zeros_like(v) if g is None else g, v) for g, v in grads_and_vars])


class Centred(SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient - keras.ops.mean(gradient), variable, learning_rate)


class Applying(SGD):
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([2 * gradient for gradient in grads], trainable_variables)


class Subtracting(SGD):
    def assign_sub(self, variable: Any, value: Any) -> None:
        super().assign_sub(variable, 2 * value)


class CopyingBack(SGD):
    """An optimizer that writes a variable of the first layer by the values of one of the last."""

    def apply_gradients(self, grads_and_vars: Pairs) -> Any:
        pairs = list(grads_and_vars)
        first, last = pairs[0][1], pairs[-1][1]
        first.assign(tf.fill(first.shape, tf.convert_to_tensor(last)[0]))
        return super().apply_gradients(pairs)


class Halving(SGD):
    def finalize_variable_values(self, var_list: Any) -> None:
        for variable in var_list:
            variable.assign(0.5 * variable)


def with_own_function() -> Any:
    optimizer = SGD(0.1)
    apply = optimizer.apply_gradients
    optimizer.apply_gradients = lambda pairs: apply([(3 * g, v) for g, v in pairs])
    return optimizer


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "scales gradients before they are clipped": lambda: Scaling(0.1, global_clipnorm=0.5),
    "inside a LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(Applying(0.1, global_clipnorm=0.1)),
    "builds itself for some variables": lambda: OnlyKernels(0.01),
    "takes variables by position": lambda: WithoutTheFirst(0.1),
    "steps twice": lambda: Twice(0.1),
    "clips by a norm of its own": lambda: OwnNorm(0.1),
    "averages variables": lambda: Averaging(0.1),
    "writes by hand": lambda: ByHand(0.1),
    "steps in every second step": lambda: EverySecond(0.1),
    "divides by a number of all weights": lambda: ByAllWeights(0.1),
    "overrides update_step": lambda: Centred(0.1),
    "overrides apply": lambda: Applying(0.1),
    "overrides assign_sub": lambda: Subtracting(0.1),
    "overrides finalize_variable_values": lambda: Halving(0.1),
    "copies a variable of the last stage to one of the first": lambda: CopyingBack(0.1),
    "has a function of its own": with_own_function,
    "is a MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(SGD(0.1), {"last/.*": keras.optimizers.Adam(0.01)})
    ),
}


def fit(model: keras.Model) -> Any:
    return model.fit(X[:16], Y[:16], batch_size=8, epochs=2, verbose=0).history


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_with_methods_of_its_own_trains_as_in_keras(make: Callable[[], Any]) -> None:
    assert_equal_to_plain(lambda: models.sequential(optimizer=make()), fit)


@pytest.mark.parametrize(
    "make",
    [lambda: Zeros(0.01), OPTIMIZERS["is a MultiOptimizer"], lambda: SGD(0.1, use_ema=True, ema_overwrite_frequency=2)],
    ids=["makes zeros of them", "MultiOptimizer", "averages"],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist", "ignore:no gradient reaches")
def test_an_optimizer_gets_none_as_the_gradient_of_a_variable_without_one(make: Callable[[], Any]) -> None:
    targets = {"value": Y[:16], "kind": Y[:16]}
    assert_equal_to_plain(
        lambda: models.two_outputs(as_dict=True, loss={"value": "mse", "kind": None}, optimizer=make()),
        lambda model: model.fit(X[:16], targets, batch_size=8, epochs=2, verbose=0).history,
    )


class Squaring(SGD):
    def scale_loss(self, loss: Any) -> Any:
        return loss * loss


def test_an_optimizer_that_scales_the_loss_by_the_loss_is_refused() -> None:
    model = models.sequential(optimizer=Squaring(0.1))
    dapple.keras.pipeline(model, stages=2, micro_batches=2)
    with pytest.raises(CaptureError, match=r"Squaring.scale_loss returns something else than the loss times a factor"):
        model.train_on_batch(X, Y)


def test_a_trainable_variable_that_is_none_of_the_models_is_not_trained() -> None:
    """The loss uses a network of its own, as a perceptual loss does."""

    def make() -> keras.Model:
        judge = keras.Sequential([keras.Input([1]), keras.layers.Dense(2)])
        return models.sequential(loss=lambda y, outputs: keras.ops.square(judge(y) - judge(outputs)))

    assert_equal_to_plain(make, fit)


class OnlyTheLast(keras.Sequential):
    @property
    def trainable_weights(self) -> Any:
        return self.layers[-1].trainable_weights


def test_a_model_says_by_a_property_what_is_trained() -> None:
    def make() -> keras.Model:
        model = OnlyTheLast([keras.Input([6]), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    assert_equal_to_plain(make, fit)
