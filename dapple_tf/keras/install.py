"""``dapple.keras.pipeline`` and ``dapple.keras.restore``: run a compiled model over a pipeline, and undo that."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import Unpack

from dapple_tf import internals
from dapple_tf.autoplan.option_help import document_options, make_options
from dapple_tf.autoplan.options import OptionTypes
from dapple_tf.distributed import membership
from dapple_tf.errors import BatchError, CaptureError, PlanError, UsageError
from dapple_tf.frontend.captured import TrainingStep
from dapple_tf.frontend.optimizer_update import build_optimizer
from dapple_tf.frontend.trace_inputs import TRAINED
from dapple_tf.keras import ranks
from dapple_tf.keras.batches import BatchCheck, BatchNames, DataNames
from dapple_tf.keras.loops import Loops, OnOneDevice
from dapple_tf.runtime.shard import beside_steps
from dapple_tf.runtime.step import PipelinedStep

# --- Prefetch batches of tf.data sets, so that they are read while steps run
# Keras reads arrays, generators and PyDatasets ahead itself, but takes a ``tf.data.Dataset`` as it is: its batches are
# read between the steps unless the user has called ``prefetch``.

METHODS = ("fit", "evaluate", "predict")
"""The methods that are replaced."""

_BATCHES = 2  # with one, a step would wait whenever reading its batch takes a little longer than a step


def _read_ahead(model: keras.Model, check: Callable[[], None]) -> None:
    """Replace ``fit``, ``evaluate`` and ``predict`` on this model: they prefetch from every data set they are given.

    Each of them first calls ``check``.
    """
    for name in METHODS:
        setattr(model, name, _reading_ahead(model, getattr(model, name), check))


def _reading_ahead(model: keras.Model, method: Callable[..., Any], check: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        check()
        args, options = tuple(map(_prefetched, args)), {name: _prefetched(value) for name, value in options.items()}
        if method.__name__ == "fit":
            given = inspect.signature(method).bind(*args, **options).arguments
            installed_in(model).fit_data = given.get("x"), given.get("steps_per_epoch")
        return method(*args, **options)

    return run


def _prefetched(value: Any) -> Any:
    return beside_steps(value).prefetch(_BATCHES) if isinstance(value, tf.data.Dataset) else value


# --- ``dapple.keras.pipeline`` and ``dapple.keras.restore``: run a compiled model over a pipeline, and undo that


_KINDS = ("train", "test", "predict")
_STEP = "_pipelined_step"
"""The attribute of a model that holds the step of its pipeline."""

_SETTINGS = ("optimizer", "run_eagerly", "jit_compile", "steps_per_execution")
"""Attributes that ``compile`` sets on a model, and that must not change under a pipeline."""

_BY_CALLBACK = (
    "do what it adds in a callback (on_train_batch_end, on_test_batch_end, on_predict_batch_end), or write the loss as "
    "a function of the batch and call dapple.pipeline(loss_fn, optimizer=model.optimizer, ...)"
)
REFUSED = dict.fromkeys([*(f"make_{kind}_function" for kind in _KINDS), *internals.MAKING_FUNCTIONS], _BY_CALLBACK)
"""The methods of a model that Keras calls and a pipeline does not call, each with what to do instead."""


@document_options()
def pipeline(
    model: keras.Model, *, example_batch: Sequence[Any] | None = None, **options: Unpack[OptionTypes]
) -> PipelinedStep:
    """Have a compiled model train, evaluate and predict over a pipeline; return the step that ``fit`` will call.

    ``fit``, ``evaluate``, ``predict``, ``train_on_batch``, ``test_on_batch`` and ``predict_on_batch`` then give the
    same results as before, with the losses and metrics of ``compile``, and any callbacks and data. ``evaluate`` and
    ``predict`` run forward only, over the same stages. If the model overrides ``train_step``, it is pipelined as by
    ``dapple.train_step``; an overridden ``test_step`` or ``predict_step`` runs on one device, as Keras runs it.
    ``compile`` removes the pipeline: call this again after it.

    Args:
        model: A Functional, Sequential or subclassed model after ``model.compile(...)``.
        example_batch: A batch (x, y) or (x, y, sample_weight) like those of ``fit``. With it the plan is made and the
            step is built now, else at the first batch.
        {options}
            ``jit_compile=None`` follows the option of ``model.compile``.

    Raises:
        UsageError: The model is not compiled.
        BatchError: ``example_batch`` is no tuple.
        CaptureError: The model overrides a method that a pipeline would not run, such as ``make_train_function``, or
            its ``train_step`` cannot be pipelined.
        PlanError: The model is compiled with options that contradict a pipeline, or the ``options`` do.
    """
    if "optimizer" in options:
        raise TypeError("dapple.keras.pipeline() takes no optimizer: the model trains with that of model.compile")
    made = make_options("dapple.keras.pipeline", options)
    if _is_installed(model):
        restore(model)
    _check(model)
    if example_batch is not None and not isinstance(example_batch, tuple | list):
        kind = type(example_batch).__name__
        raise BatchError(f"example_batch is a {kind}: give a tuple (x, y) or (x, y, sample_weight), as fit takes them")
    names = BatchNames()
    own_steps = _own_steps(model)
    own_names = DataNames() if "train" in own_steps else None
    if own_names is not None:
        step = PipelinedStep(TrainingStep(_own_training_function(model, own_names)), None, made)
    else:
        step = PipelinedStep(_training_function(model, names), model.optimizer, made)
    test = step.forward_of(_evaluation_function(model, names))
    predict = step.forward_of(_prediction_function(model, names))
    job = membership.current()
    check = None if job.is_alone else BatchCheck(job, model.optimizer)
    own = {name: vars(model)[name] for name in _REPLACED if name in vars(model)}
    installed = _Installed(step, {name: getattr(model, name) for name in _SETTINGS}, own, {}, own_steps)
    setattr(model, _STEP, installed)
    on_one_device = {
        kind: OnOneDevice(model, kind, lambda: step.release() if step.built else None) for kind in own_steps - {"train"}
    }
    loops = Loops(model, names, step, test, predict, check, own_names, on_one_device)
    installed.loops = loops
    for kind in _KINDS:
        function = getattr(loops, f"{kind}_function")
        setattr(model, f"{kind}_function", function)
        setattr(model, f"make_{kind}_function", _maker(model, kind, function))
    _read_ahead(model, lambda: _check_methods(model))
    if check is not None:
        ranks.adapt_to_ranks(model, step, job, check)
    if example_batch is not None:
        step.build((names if own_names is None else own_names).name(tuple(example_batch)))
        installed.built.update(_attributes(model))
    return step


def restore(model: keras.Model) -> None:
    """Remove the pipeline from the model, which then runs as Keras runs it, with the same variables.

    Variables are moved back to the devices on which they were before. In a job every rank must call it, and has all
    trained values afterwards. Raises UsageError for a model without a pipeline.
    """
    installed = installed_in(model)
    if installed.step.built:
        installed.step.release()
    delattr(model, _STEP)
    for name in _REPLACED:
        if name in vars(model):
            delattr(model, name)
        if name in installed.own:
            setattr(model, name, installed.own[name])
    for kind in _KINDS:
        setattr(model, f"{kind}_function", None)


_REPLACED = (*(f"make_{kind}_function" for kind in _KINDS), *{*METHODS, *ranks.METHODS})


@dataclass
class _Installed:
    """The pipeline of a model: its ``step``, and the ``settings`` of the model when the pipeline was made.

    ``own``: attributes of the model itself that were replaced, by name. ``built``: the attributes of its layers and
    optimizer when the step was built for an example batch; else none. ``own_steps``: see ``_own_steps``.
    ``loops``: the functions that Keras calls. ``fit_data``: the data and ``steps_per_epoch`` of the ``fit`` that runs.
    """

    step: PipelinedStep
    settings: Mapping[str, Any]
    own: Mapping[str, Any]
    built: dict[str, Any]
    own_steps: frozenset[str]
    loops: Loops | None = None
    fit_data: tuple[Any, int | None] = (None, None)


def _own_steps(model: keras.Model) -> frozenset[str]:
    """Return the kinds, train, test and predict, whose step the model overrides."""
    return frozenset(kind for kind in _KINDS if internals.overrides(model, keras.Model, f"{kind}_step"))


def _check_unchanged(built: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in built.items():
        plain = isinstance(value, bool | int | float | str | tuple)
        if now.get(name) is not value and not (plain and now.get(name) == value):
            raise UsageError(
                f"{name} was changed after dapple.keras.pipeline had built the step for its example_batch: change it "
                "before, or leave example_batch out"
            )


def _attributes(model: keras.Model) -> dict[str, Any]:
    """Return the attributes of a model's layers and optimizer that a trace of it may use, by name."""
    owners = {layer.path or layer.name: layer for layer in internals.flatten_layers(model)}
    owners["optimizer"] = model.optimizer
    if (inner := getattr(model.optimizer, "inner_optimizer", None)) is not None:  # of a LossScaleOptimizer
        owners["optimizer.inner_optimizer"] = inner
    found = {f"{model.name}.trainable": model.trainable}
    for where, owner in owners.items():
        own = {name: value for name, value in vars(owner).items() if not name.startswith("_")}
        own |= {name: getattr(owner, name) for name in ("trainable", "_learning_rate") if hasattr(owner, name)}
        found |= {f"{where}.{name.lstrip('_')}": value for name, value in own.items()}
    return found


def installed_in(model: keras.Model) -> _Installed:
    """Return the pipeline under the model; UsageError where there is none."""
    if not _is_installed(model):
        name = getattr(model, "name", type(model).__name__)
        raise UsageError(f"{name} has no pipeline: dapple.keras.pipeline(model, ...) puts one under it")
    installed: _Installed = getattr(model, _STEP)
    return installed


def _is_installed(model: Any) -> bool:
    return isinstance(model, keras.Model) and _STEP in vars(model)


def _maker(model: keras.Model, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what Keras calls to make the function of this ``kind``, which is there already."""

    def make(force: bool = False) -> Callable[..., Any]:
        again = "call dapple.keras.pipeline(model, ...) again, or dapple.keras.restore(model) to train without it"
        if getattr(model, f"{kind}_function") is None:  # ``compile`` has removed it
            raise UsageError(f"{model.name} was compiled again after dapple.keras.pipeline: {again}")
        if getattr(model, f"{kind}_function") != function:
            raise UsageError(f"{model.name}.{kind}_function was replaced after dapple.keras.pipeline: {again}")
        installed: _Installed = getattr(model, _STEP)
        for name, value in installed.settings.items():
            if getattr(model, name) != value:
                raise UsageError(f"{model.name}.{name} was changed after dapple.keras.pipeline: {again}")
        if installed.own_steps != _own_steps(model):
            raise UsageError(f"{model.name} was given a step of its own after dapple.keras.pipeline: {again}")
        if kind == "train" and installed.built:
            _check_unchanged(installed.built, _attributes(model))
            # Keras traces at the first fit, too: a change after it has no effect until the model is compiled again.
            installed.built.clear()
        _check_methods(model)
        return function

    make.__module__ = __name__
    return make


def _check(model: keras.Model) -> None:
    """Raise the errors of ``pipeline`` for a model that cannot be pipelined."""
    if not isinstance(model, keras.Model):
        kind = type(model).__name__
        if any(base.__module__.split(".")[0] == "tf_keras" for base in type(model).__mro__):
            raise UsageError(
                f"{kind} is a model of Keras 2 (tf_keras), whose fit cannot run over a pipeline: write its loss as a "
                "function of the batch that calls the model, and train by dapple.pipeline(loss_fn, optimizer=...)"
            )
        raise UsageError(f"model is a {kind}, not a keras.Model: dapple.pipeline takes any function")
    if not model.compiled or model.optimizer is None:
        raise UsageError(f"{model.name} has no optimizer: call model.compile(optimizer, loss, ...) before")
    _check_methods(model)
    for kind in _KINDS:
        function = getattr(model, f"{kind}_function")
        if function is not None and not internals.is_of_keras(function):
            raise CaptureError(
                f"{model.name} has a {kind}_function of its own, which a pipeline would not run: {_BY_CALLBACK}"
            )
    if model.run_eagerly:
        raise PlanError(
            f"{model.name} is compiled with run_eagerly=True, but a pipeline is a graph: compile it without run_eagerly"
        )
    if internals.has_strategy(model):
        raise PlanError(
            f"{model.name} was made under a tf.distribute strategy: make it without, and give replicas=[...] for data "
            "parallelism"
        )


def _check_methods(model: keras.Model) -> None:
    """Raise CaptureError for a method of the user's that a pipeline would not run."""
    for name, advice in REFUSED.items():
        replaced = _is_installed(model) and name in _REPLACED and vars(model).get(name).__module__ == __name__
        if not replaced and internals.overrides(model, keras.Model, name):
            raise CaptureError(f"{type(model).__name__} overrides {name}, which a pipeline would not run: {advice}")


# --- The functions of a batch by which a pipeline trains, evaluates and predicts with a compiled Keras model
# They compute the forward pass and the loss of a micro-batch. Metrics are updated once a step, on the whole batch (see
# ``loops``): the tensors that they need are returned as aux outputs.


Function = Callable[[dict[str, Any]], Any]
"""A function of a named batch (see ``BatchNames``)."""


def _training_function(model: keras.Model, names: BatchNames) -> Any:
    """Return the tf.function that computes the loss of a batch in training, with what metrics need as aux outputs.

    The first trace builds what ``fit`` would build: the model, its losses, and the optimizer for all trainable
    variables.
    """

    def train(batch: dict[str, Any]) -> Any:
        loss, aux = _compute(model, names.nest(batch), training=True)
        build_optimizer(model.optimizer, model.trainable_weights)
        return loss, aux

    function = _named(train, model, names)
    setattr(function, TRAINED, lambda: model.trainable_weights)
    return function


def _own_training_function(model: keras.Model, names: DataNames) -> Any:
    """Return the tf.function that calls the model's own ``train_step`` on a batch, and returns the metrics."""

    def train(batch: dict[str, Any]) -> Any:
        return model.train_step(names.nest(batch))

    return _named(train, model, names)


def _evaluation_function(model: keras.Model, names: BatchNames) -> Any:
    """Return the tf.function that computes the loss of a batch in evaluation, with what metrics need as aux outputs."""

    def evaluate(batch: dict[str, Any]) -> Any:
        return _compute(model, names.nest(batch), training=False)

    return _named(evaluate, model, names)


def _prediction_function(model: keras.Model, names: BatchNames) -> Any:
    """Return the tf.function that computes the model's outputs for a batch, with a zero in place of the loss."""

    def predict(batch: dict[str, Any]) -> Any:
        x, _, _ = names.nest(batch)
        return tf.zeros([]), {"outputs": internals.call_model(model, x, training=False)}

    return _named(predict, model, names)


def _compute(model: keras.Model, batch: tuple[Any, Any, Any], *, training: bool) -> tuple[Any, dict[str, Any]]:
    """Return the loss and the aux outputs.

    ``outputs``: the model's outputs, if metrics are computed from them; ``masks``: their Keras masks, by position.
    ``losses``: the loss of each output, if there are several; Keras reports each as a metric.
    """
    x, y, sample_weight = batch
    outputs = internals.call_model(model, x, training=training)
    with internals.output_losses(model) as losses:
        loss = internals.compute_loss(model, x, y, outputs, sample_weight, training=training)
    aux: dict[str, Any] = {"losses": list(losses)}
    if internals.has_metrics(model):
        masks = enumerate(internals.keras_mask(tensor) for tensor in keras.tree.flatten(outputs))
        aux |= {"outputs": outputs, "masks": {str(i): mask for i, mask in masks if mask is not None}}
    return loss, aux


def _named(function: Function, model: keras.Model, names: BatchNames | DataNames) -> Any:
    """Return the tf.function of a ``function`` of a named batch; it has the model's name, which messages show.

    As in Keras's own steps, there is no autograph, lengths that vary are left unknown, and XLA compiles it if the model
    has ``jit_compile``. It raises BatchError for arguments other than one dictionary, by ``names``.
    """

    def run(*batch: Any) -> Any:
        if len(batch) != 1 or not isinstance(batch[0], dict):
            given = f"{len(batch)} arguments" if len(batch) != 1 else f"a {type(batch[0]).__name__}"
            raise BatchError(
                f"a step of dapple.keras.pipeline takes the batch as one dictionary, as in "
                f"step.record({names.example}), not {given}"
            )
        return function(*batch)

    run.__name__ = model.name
    return tf.function(run, autograph=False, jit_compile=bool(model.jit_compile), reduce_retracing=True)
