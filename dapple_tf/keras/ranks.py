"""Adapt a pipelined model to a job, in which every rank runs the same script, and rank 0 prints and writes.

Methods of the model that print, read all variables or touch files are replaced on the model itself. Every rank must
call them, in the same order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.variable_transfer import lend_values, share_variables
from dapple_tf.errors import UsageError
from dapple_tf.frontend.optimizer_update import build_optimizer
from dapple_tf.keras.batches import BatchCheck, align_randomness
from dapple_tf.keras.rank_callbacks import GatherValues, adapted, check_callbacks, reads_values
from dapple_tf.runtime.step import PipelinedStep

_SAVING = ("save", "save_weights")
_RUNNING = ("fit", "evaluate", "predict")
METHODS = (*_SAVING, *_RUNNING, "export", "get_weights", "load_weights")
"""The methods that are replaced."""


def adapt_to_ranks(model: keras.Model, step: PipelinedStep, job: Job, check: BatchCheck) -> None:
    """Replace the methods of the model that must work differently in a job of several processes."""
    methods = _RankMethods(model, step, job, check)
    for name in METHODS:
        original = getattr(model, name)
        kind = "save" if name in _SAVING else "run" if name in _RUNNING else name
        setattr(model, name, getattr(methods, kind)(original))


class _RankMethods:
    """Makes the replacements: each public method takes a method of the model, and returns its replacement."""

    def __init__(self, model: keras.Model, step: PipelinedStep, job: Job, check: BatchCheck) -> None:
        self._model = model
        self._step = step
        self._job = job
        self._check = check

    def gather(self) -> None:
        """Give this rank the trained values of all ranks."""
        if self._step.built:
            self._step.gather()

    def save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Rank 0 writes, and gets the values of other ranks one at a time; an error of rank 0 is raised on all."""

        def save(*args: Any, **options: Any) -> None:
            self._job.announce_call("save the model")
            self._job.check_call_history()  # variables that were trained on different batches must not be saved

            def write() -> None:
                with internals.saving_through_files():
                    original(*args, **options)

            lend_values(self._job, self._variables(), write)

        return save

    def export(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Rank 0 writes all values, which it must hold at once; an error of rank 0 is raised on all."""

        def export(*args: Any, **options: Any) -> None:
            self.gather()
            self._job.run_on_rank_0(lambda: original(*args, **options) and None)

        return export

    def get_weights(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_weights() -> Any:
            self.gather()
            return original()

        return get_weights

    def load_weights(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Rank 0 reads the file, and sends each value to the ranks that hold the variable; before a step, all do."""

        def load_weights(*args: Any, **options: Any) -> None:
            self._job.announce_call("load weights")
            optimizer = self._model.optimizer
            lend_values(self._job, self._variables(), lambda: original(*args, **options), changes=True)
            # Rank 0's optimizer is built by now if the file has its variables.
            if self._job.broadcast(optimizer.built) and not self._step.built:
                build_optimizer(optimizer, self._model.trainable_weights)
                share_variables(self._job, [variable.value for variable in optimizer.variables], 0)

        return load_weights

    def _variables(self) -> list[tf.Variable]:
        """Return the variables of the model and of its optimizer, in the same order on every rank."""
        optimizer = self._model.optimizer
        found = [*self._model.variables, *(optimizer.variables if optimizer.built else [])]
        return [variable.value for variable in found]

    def run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``fit``, ``evaluate`` or ``predict``: only rank 0 shows progress; callbacks are adapted to the job."""
        method = original.__name__

        def run(*args: Any, **options: Any) -> Any:
            if method == "fit":
                align_randomness(self._job)
            else:
                self._check.expect()
            bound = self._quiet(original, args, options)
            named = self._holder(bound, method, "callbacks")
            given = named.get("callbacks") or []
            found = list(given.callbacks if isinstance(given, keras.callbacks.CallbackList) else _as_list(given))
            if any(isinstance(callback, GatherValues) for callback in found):  # ``fit`` calls ``evaluate``
                return original(*bound.args, **bound.kwargs)
            check_callbacks(found, method, self._job)
            first = GatherValues(self.gather, self._check.expect, reads_values(found, self._model))
            with adapted(found, self._model, self._job) as kept:
                if isinstance(given, keras.callbacks.CallbackList):
                    first.set_model(self._model)
                    given.callbacks = [first, *kept]
                else:
                    named["callbacks"] = [first, *kept]
                return original(*bound.args, **bound.kwargs)

        return run

    def _quiet(self, original: Callable[..., Any], args: Any, options: Any) -> inspect.BoundArguments:
        """Return the arguments of a call of ``original``, without a progress bar on all ranks but rank 0."""
        bound = inspect.signature(original).bind(*args, **options)
        if self._job.rank:
            self._holder(bound, original.__name__, "verbose")["verbose"] = 0
        return bound

    def _holder(self, bound: inspect.BoundArguments, method: str, name: str) -> dict[str, Any]:
        """Return the dictionary in which a call has the argument ``name``: its own, or that of ``**options``.

        Raises UsageError for a method of the user's that takes neither.
        """
        parameters = bound.signature.parameters
        if name in parameters:
            return bound.arguments
        options = [p.name for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        if not options:
            raise UsageError(
                f"{type(self._model).__name__}.{method} takes no {name}, which the ranks of a job need to give: let it "
                f"take **options, and pass them on to super().{method}"
            )
        found: dict[str, Any] = bound.arguments.setdefault(options[0], {})
        return found


def _as_list(callbacks: Any) -> list[Any]:
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
