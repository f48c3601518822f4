"""``dapple.keras.pipeline`` and ``dapple.keras.restore``: put a pipeline under a compiled model, and take it off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from dapple_tf import internals
from dapple_tf.distributed import membership
from dapple_tf.errors import CaptureError, PlanError, UsageError
from dapple_tf.keras import ranks
from dapple_tf.keras.batches import BatchNames
from dapple_tf.keras.functions import evaluation_function, prediction_function, training_function
from dapple_tf.keras.loops import Loops
from dapple_tf.keras.rank_batches import BatchCheck
from dapple_tf.keras.read_ahead import METHODS, read_ahead
from dapple_tf.pipeline import pipeline as pipeline_step
from dapple_tf.runtime.step import PipelinedStep

_STEPS = ("train_step", "test_step", "predict_step")
_KINDS = ("train", "test", "predict")
_STEP = "_pipelined_step"
"""The attribute of a model that holds the step of its pipeline."""


def pipeline(model: keras.Model, *, example_batch: Sequence[Any] | None = None, **options: Any) -> PipelinedStep:
    """Have a compiled model train, evaluate and predict over a pipeline; return the step that ``fit`` will call.

    ``fit``, ``evaluate``, ``predict``, ``train_on_batch``, ``test_on_batch`` and ``predict_on_batch`` then give what
    they gave before: losses, metrics, callbacks and data are the model's. ``evaluate`` and ``predict`` run forward
    only, over the same stages. A call of ``compile`` takes the pipeline off: call this again after it.

    Args:
        model: A Functional, Sequential or subclassed model after ``model.compile(...)``.
        example_batch: A batch (x, y) or (x, y, sample_weight) like those to come: the plan is made and the step built
            now, not at the first batch.
        **options: The options of ``dapple.pipeline``: stages, micro_batches, plan and so on. ``jit_compile=None``
            follows the option of ``model.compile``.

    Raises:
        UsageError: The model is not compiled.
        CaptureError: The model overrides ``train_step``, ``test_step`` or ``predict_step``, which a pipeline would not
            run.
        PlanError: The model is compiled with options that contradict a pipeline, or the ``options`` do.
    """
    _check(model)
    if _is_installed(model):
        restore(model)
    names = BatchNames()
    step: PipelinedStep = pipeline_step(training_function(model, names), optimizer=model.optimizer, **options)
    test = step.forward_of(evaluation_function(model, names))
    predict = step.forward_of(prediction_function(model, names))
    job = membership.current()
    check = None if job is None else BatchCheck(job)
    setattr(model, _STEP, step)
    loops = Loops(model, names, step, test, predict, check)
    for kind in _KINDS:
        function = getattr(loops, f"{kind}_function")
        setattr(model, f"{kind}_function", function)
        setattr(model, f"make_{kind}_function", _maker(model, kind, function))
    read_ahead(model)
    if job is not None and check is not None:
        ranks.adapt_to_ranks(model, step, job, check)
    if example_batch is not None:
        step.build(names.name(tuple(example_batch)))
    return step


def restore(model: keras.Model) -> None:
    """Take the pipeline off the model: it then trains, evaluates and predicts as Keras does, with the same variables.

    Variables are back on the devices on which they were before the pipeline. In a job every rank must call it, and has
    all trained values afterwards. Raises UsageError for a model without a pipeline.
    """
    if not _is_installed(model):
        raise UsageError(f"{model.name} has no pipeline: dapple.keras.pipeline(model, ...) puts one under it")
    step: PipelinedStep = getattr(model, _STEP)
    if step.built:
        step.release()
    delattr(model, _STEP)
    for name in {*METHODS, *ranks.METHODS}:
        if name in vars(model):
            delattr(model, name)
    for kind in _KINDS:
        delattr(model, f"make_{kind}_function")
        setattr(model, f"{kind}_function", None)


def _is_installed(model: keras.Model) -> bool:
    return "make_train_function" in vars(model)


def _maker(model: keras.Model, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what Keras calls to make the function of this ``kind``, which is there already."""

    def make(force: bool = False) -> Callable[..., Any]:
        if getattr(model, f"{kind}_function") != function:  # ``compile`` has removed it
            raise UsageError(
                f"{model.name} was compiled again after dapple.keras.pipeline: call dapple.keras.pipeline(model, ...) "
                "again, or dapple.keras.restore(model) to train without it"
            )
        return function

    return make


def _check(model: keras.Model) -> None:
    """Raise the errors of ``pipeline`` for a model that cannot be pipelined."""
    if not isinstance(model, keras.Model):
        raise UsageError(f"model is a {type(model).__name__}, not a keras.Model: dapple.pipeline takes any function")
    if not model.compiled or model.optimizer is None:
        raise UsageError(f"{model.name} has no optimizer: call model.compile(optimizer, loss, ...) before")
    for name in _STEPS:
        if internals.overrides(model, name):
            raise CaptureError(
                f"{type(model).__name__} overrides {name}, which a pipeline would not run: override compute_loss and "
                "compute_metrics instead, or write the loss as a function of the batch and call "
                "dapple.pipeline(loss_fn, optimizer=model.optimizer, ...)"
            )
    if model.run_eagerly:
        raise PlanError(f"{model.name} is compiled with run_eagerly=True, but a pipeline is a graph: compile without")
    if internals.has_strategy(model):
        raise PlanError(
            f"{model.name} was made under a tf.distribute strategy: make it without, and give replicas=[...] for data "
            "parallelism"
        )
