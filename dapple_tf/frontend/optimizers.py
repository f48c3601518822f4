"""Convert the optimizers that users give into optimizers of Keras 3."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import PlanError, warn_user

_GIVE = "give a Keras 3 optimizer, such as keras.optimizers.Adam(learning_rate)"
# What Keras 2 has in the config of an optimizer and Keras 3 does not, which changes nothing in a pipeline.
_LEFT_OUT = ("jit_compile", "is_legacy_optimizer")
# What the options of hvd.DistributedOptimizer do on a pipeline, where one does something.
_IN_PLACE = {
    "backward_passes_per_step": ": give the optimizer gradient_accumulation_steps",
    "sparse_as_dense": ': give the pipeline sparse_gradients="dense"',
}


def as_keras_optimizer(optimizer: Any) -> Any:
    """Return the Keras 3 optimizer for what a user gave; an optimizer of Keras 3 itself.

    That is its name or configuration, as in ``model.compile``; an optimizer of Keras 2 (tf_keras) whose configuration
    Keras 3 has, which a DappleWarning tells; or one in hvd.DistributedOptimizer, which is taken out of it, in place,
    with a DappleWarning. Raises PlanError for anything else, with what to give.
    """
    if isinstance(optimizer, keras.optimizers.Optimizer):
        if type(optimizer).__module__ == "horovod._keras":
            _take_out_of_horovod(optimizer)
        return optimizer
    if isinstance(optimizer, str | Mapping):
        try:
            return keras.optimizers.get(optimizer)
        except (ValueError, TypeError) as error:
            near = difflib.get_close_matches(str(optimizer).lower(), _names_of_optimizers())
            hint = f"the nearest are {', '.join(map(repr, near))}" if near else str(error)
            raise PlanError(f"optimizer={optimizer!r} is not known to Keras: {hint}") from error
    if isinstance(optimizer, type):
        raise PlanError(
            f"optimizer is the class {optimizer.__name__}: call it, as in {optimizer.__name__}(learning_rate)"
        )
    name, packages = type(optimizer).__name__, {base.__module__.split(".")[0] for base in type(optimizer).__mro__}
    if "tf_keras" in packages:
        return _convert(optimizer)
    if "sonnet" in packages:
        raise PlanError(f"optimizer is Sonnet's {name}: {_GIVE}, which trains the variables of Sonnet's modules too")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise PlanError(f"optimizer is a {name} of tf.compat.v1: {_GIVE}")
    if optimizer is None:
        raise PlanError("optimizer is None: give a keras.optimizers.Optimizer")
    raise PlanError(f"optimizer is a {name}, not a keras.optimizers.Optimizer: {_GIVE}")


def _names_of_optimizers() -> list[str]:
    """Return the names by which ``model.compile`` knows optimizers, in lower case."""
    kinds = {name: kind for name, kind in vars(keras.optimizers).items() if isinstance(kind, type)}
    base = keras.optimizers.Optimizer
    return [name.lower() for name, kind in kinds.items() if issubclass(kind, base) and kind is not base]


def _convert(optimizer: Any) -> Any:
    """Return the Keras 3 optimizer with the configuration of one of Keras 2, which has not trained yet."""
    name, module = type(optimizer).__name__, type(optimizer).__module__
    kind = getattr(keras.optimizers, name, None)
    refused = f"the optimizer is {name} of Keras 2 (tf_keras)"
    if kind is None or not module.startswith("tf_keras.") or ".legacy" in module or "mixed_precision" in module:
        raise PlanError(f"{refused}, which Keras 3 does not have in this form: {_GIVE}")
    if int(optimizer.iterations) > 0:
        raise PlanError(f"{refused} that has trained already, and its state cannot be taken over: {_GIVE}")
    config = {key: value for key, value in optimizer.get_config().items() if key not in _LEFT_OUT}
    rate: Any = config.get("learning_rate")
    known = {*inspect.signature(kind).parameters, *inspect.signature(keras.optimizers.Optimizer).parameters}
    if strange := [*sorted(config.keys() - known), *(["use_ema"] if config.get("use_ema") else [])]:
        raise PlanError(f"{refused} with {', '.join(strange)}, which Keras 3 handles in another way: {_GIVE}")
    try:
        if isinstance(rate, Mapping):
            given = {key: value for key, value in rate["config"].items() if value is not None}
            schedule = {"class_name": rate["class_name"], "config": given}
            config["learning_rate"] = keras.optimizers.schedules.deserialize(schedule)
        else:
            config["learning_rate"] = float(rate)
        converted = kind.from_config(config)
    except (ValueError, TypeError) as error:
        raise PlanError(f"{refused}, whose configuration Keras 3 does not take ({error}): {_GIVE}") from error
    warn_user(
        f"the optimizer is {name} of Keras 2 (tf_keras): a new keras.optimizers.{name} with the same configuration "
        "trains in its place"
    )
    return converted


def _take_out_of_horovod(optimizer: Any) -> None:
    """Make an optimizer in hvd.DistributedOptimizer one of the user's class again.

    Its class is made by Horovod, from the user's. The pipeline sums gradients itself.
    """
    name = type(optimizer).__mro__[1].__name__
    options = internals.horovod_options(optimizer)
    if options:
        advice = "".join(_IN_PLACE.get(option, "") for option in options)
        raise PlanError(
            f"the optimizer is in hvd.DistributedOptimizer with {', '.join(options)}, which a pipeline does not do in "
            f"its way: give {name} without hvd.DistributedOptimizer{advice}"
        )
    optimizer.__class__ = type(optimizer).__mro__[1]
    warn_user(
        f"{name} is taken out of hvd.DistributedOptimizer: the pipeline sums gradients itself, and every rank reads "
        "the same data; pass the plain optimizer"
    )
