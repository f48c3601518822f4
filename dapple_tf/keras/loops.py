"""Make the train, test and predict functions that Keras calls for one or ``steps_per_execution`` batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import warn_user
from dapple_tf.keras.batches import BatchNames, DataNames

_UNKNOWN_SIZE = (
    "an epoch ended with data of unknown size. At each such end Keras without a pipeline also runs what a step "
    "computes without data: the optimizer counts an iteration, weights decay, dropout takes other seeds. The pipeline "
    "does not. Both are equal where the size is known: use "
    "data.apply(tf.data.experimental.assert_cardinality(batches)), or steps_per_epoch"
)


class Loops:
    """The three functions of one compiled model.

    ``train``, ``test``, ``predict``: the pipelined functions of a named batch (see ``install``). ``check`` is called
    with every batch. ``passed_over``: how many batches of earlier epochs the next call of ``train_function`` takes from
    the iterator and drops, before the first step. ``skipped``: how many of the following batches are dropped in place
    of a step; these count as batches of the epoch.

    ``own_names``: the names of the tensors that ``train`` takes, if it is the model's own ``train_step``, which returns
    the metrics; else None. ``on_one_device``: functions that run on one device in place of ``test`` and ``predict``, by
    kind.
    """

    def __init__(
        self,
        model: keras.Model,
        names: BatchNames,
        train: Callable[..., Any],
        test: Callable[..., Any],
        predict: Callable[..., Any],
        check: Callable[[dict[str, Any]], None] | None = None,
        own_names: DataNames | None = None,
        on_one_device: Mapping[str, OnOneDevice] = MappingProxyType({}),
    ) -> None:
        self._model = model
        self._names = names
        self._train = train
        self._test = test
        self._predict = predict
        self._check = check
        self._own_names = own_names
        self._on_one_device = on_one_device
        self._update = _MetricsUpdate(model)
        self._warned = False
        self.passed_over = self.skipped = 0

    def train_function(self, batches: Iterable[Any]) -> Any:
        """Train on the next batches, and return the metrics; StopIteration where there is none."""
        for function in self._on_one_device.values():
            function.trained()
        for _ in range(self.passed_over):
            next(iter(batches))
        self.passed_over = 0
        try:
            return self._run(batches, self._train) if self._own_names is None else self._run_own(batches)
        except StopIteration:
            if not self._warned:
                self._warned = True
                warn_user(_UNKNOWN_SIZE)
            raise

    def test_function(self, batches: Iterable[Any]) -> Any:
        """Evaluate the next batches, and return the metrics; StopIteration where there is none."""
        if "test" in self._on_one_device:
            return self._on_one_device["test"](batches)
        return self._run(batches, self._test)

    def predict_function(self, batches: Iterable[Any]) -> Any:
        """Return the model's outputs for ``batches``, concatenated on axis 0."""
        if "predict" in self._on_one_device:
            return self._on_one_device["predict"](batches)
        found = [self._predict(self._name(data, inputs_only=True))[1]["outputs"] for data in batches]
        if len(found) == 1:
            return found[0]
        return keras.tree.map_structure(lambda *tensors: tf.concat(tensors, 0), *found)

    def _run(self, batches: Iterable[Any], step: Callable[[dict[str, Any]], Any]) -> Any:
        samples, logs = _fixed_samples(batches), None
        for data in _next_batches(iter(batches), self._model.steps_per_execution):
            if step is self._train and self._skips():
                continue
            named = self._name(data)
            loss, aux = step(named)
            logs = self._update(self._names, named, loss, aux, samples)
        return {} if logs is None else logs

    def _skips(self) -> bool:
        skips = self.skipped > 0
        self.skipped -= skips
        return skips

    def _run_own(self, batches: Iterable[Any]) -> Any:
        assert self._own_names is not None, "a step of the model's own has names"
        logs = None
        for data in _next_batches(iter(batches), self._model.steps_per_execution):
            if self._skips():
                continue
            named = self._own_names.name(data)
            if self._check is not None:
                self._check(named)
            logs = self._train(named)
        return {} if logs is None else logs

    def _name(self, data: Any, *, inputs_only: bool = False) -> dict[str, Any]:
        named = self._names.name(data, inputs_only=inputs_only)
        if self._check is not None:
            self._check(named)
        return named


class OnOneDevice:
    """A function of a ``kind``, test or predict, that Keras makes of the model's own step and runs on one device.

    ``gather`` copies all variables to that device; it is called before the first call, and again after training.
    """

    def __init__(self, model: keras.Model, kind: str, gather: Callable[[], None]) -> None:
        self._model = model
        self._kind = kind
        self._gather = gather
        self._gathered = False
        self._function: Any = None

    def trained(self) -> None:
        """Note that the variables have changed, and may have moved."""
        self._gathered = False

    def __call__(self, batches: Iterable[Any]) -> Any:
        """Run the function that Keras has made."""
        if not self._gathered:
            self._gather()
            self._gathered = True
        if self._function is None:
            self._function = internals.make_keras_function(self._model, self._kind)
        return self._function(batches)


def _next_batches(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Return an iterator over the next ``count`` batches, or fewer; StopIteration where there is none."""
    return itertools.chain([next(batches)], itertools.islice(batches, count - 1))


def _fixed_samples(batches: Iterable[Any]) -> int | None:
    """Return the number of samples of each batch where the data set's specs fix it, else None."""
    specs = keras.tree.flatten(getattr(batches, "element_spec", None))
    shape = getattr(specs[0], "shape", None)
    return None if shape is None or not shape.rank else shape[0]


# --- Update a compiled model's metrics once a step, from the whole batch, so that they equal those of one device


class _MetricsUpdate:
    """Updates the metrics of ``model`` by one batch and returns the results by name, as a step of Keras does.

    A tf.function takes 1 to 2 ms a call to find its trace for nested arguments. Here the trace is looked up in a
    dictionary, by the nesting, dtypes and shapes of the batch.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._functions: dict[Any, Any] = {}  # tf.functions of flat tensors, by the nesting of the arguments
        self._traces: dict[Any, Any] = {}  # their ConcreteFunctions, by dtypes and shapes too

    def __call__(
        self, names: BatchNames, named: dict[str, Any], loss: Any, aux: dict[str, Any], samples: int | None
    ) -> Any:
        """Update the metrics by the batch of these ``named`` tensors, its ``loss``, and the aux outputs of its step.

        ``samples``: the number of samples of a batch, if the data set fixes it, else None. Keras weighs the losses of
        several outputs by it, or by 1 if it is not fixed.
        """
        arguments = named, loss, aux
        tensors = tf.nest.flatten(arguments, expand_composites=True)
        nesting = samples, *named, *aux.get("masks", ())
        key = nesting, *((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
        if (trace := self._traces.get(key)) is None:
            if nesting not in self._functions:
                self._functions[nesting] = self._make(
                    names, tf.nest.map_structure(tf.type_spec_from_value, arguments), samples
                )
            trace = self._traces[key] = self._functions[nesting].get_concrete_function(*tensors)
        return trace(*tensors)

    def _make(self, names: BatchNames, specs: Any, samples: int | None) -> Any:
        def update(*tensors: Any) -> Any:
            named, loss, aux = tf.nest.pack_sequence_as(specs, tensors, expand_composites=True)
            return self._update_metrics(*names.nest(named), loss, aux, samples)

        return tf.function(update, reduce_retracing=True, autograph=False)

    def _update_metrics(
        self, x: Any, y: Any, sample_weight: Any, loss: Any, aux: dict[str, Any], samples: int | None
    ) -> Any:
        first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
        internals.loss_tracker(self._model).update_state(loss, sample_weight=tf.shape(first)[0])
        for metric, value in zip(internals.loss_metrics(self._model), aux["losses"], strict=True):
            metric.update_state(value, sample_weight=samples)
        outputs = aux.get("outputs")
        for i, mask in aux.get("masks", {}).items():
            internals.set_keras_mask(keras.tree.flatten(outputs)[int(i)], mask)
        return self._model.compute_metrics(x, y, outputs, sample_weight=sample_weight)
