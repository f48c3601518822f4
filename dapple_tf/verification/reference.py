"""Training on one device as a Keras user would write it: what a pipelined step is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.composite import is_python_value
from dapple_tf.verification.divided_batch_norm import SizesOf, divide_batch_norm


@dataclass(frozen=True)
class Outcome:
    """The results of one training step.

    ``loss``, ``aux`` (flattened; None where it was not computed) and ``variables`` (after the step, by name) are NumPy
    arrays; ``gradients``, by name of the trained variable, are dense tensors or arrays, or IndexedSlices. For a
    training step that the user wrote, ``loss`` is None, ``gradients`` are empty, and ``aux`` are the values that it
    returns.
    """

    loss: Any
    aux: tuple[Any, ...] | None
    gradients: Mapping[str, Any]
    variables: Mapping[str, Any]


@dataclass(frozen=True)
class OneDevice:
    """A model and its optimizer on one device.

    ``trained``: the variables to train, as the optimizer knows them, by name; ``variables``: the model's and the
    optimizer's, by name, all on ``device``.
    """

    loss_fn: Callable[..., Any]
    optimizer: Any
    trained: Mapping[str, Any]
    variables: Mapping[str, tf.Variable]
    device: str

    def train(self, batch: Sequence[Any]) -> Outcome:
        """Run the plain training step: one tape over the whole batch, one call of the loss, ``apply_gradients``."""
        return self._train(batch, self.loss_fn, nullcontext())

    def train_divided(self, batch: Sequence[Any], sizes_of: SizesOf, *, deferred: bool = False) -> Outcome:
        """Run the plain training step, but let Keras's batch norm take pieces of the batch one after the other.

        ``sizes_of`` and ``deferred``: see ``divide_batch_norm``. A layer that the loss calls in a tf.function of its
        own takes the whole batch.
        """
        loss_fn = internals.python_function_of(self.loss_fn)
        return self._train(batch, loss_fn, divide_batch_norm(sizes_of, deferred=deferred))

    def _train(
        self,
        batch: Sequence[Any],
        loss_fn: Callable[..., Any],
        during_the_loss: AbstractContextManager[None],
    ) -> Outcome:
        variables = list(self.trained.values())
        # AutoGraph would take longer to convert Keras's code than the trace takes.
        apply_gradients = tf.autograph.experimental.do_not_convert(self.optimizer.apply_gradients)

        def train_step(*arguments: Any) -> Any:
            with tf.GradientTape() as tape, during_the_loss:
                loss, aux = _loss_and_aux(loss_fn(*arguments))
                scaled = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, variables)
            apply_gradients(zip(gradients, variables, strict=True))
            return loss, aux, gradients

        with tf.device(self.device):
            loss, aux, gradients = _run(tf.function(train_step), _as_tensors(batch))
        return self._outcome(loss, aux, gradients)

    def train_in_turn(self, batch: Sequence[Any], parts: Sequence[slice]) -> Outcome:
        """Run a training step whose gradients are those of the batch's ``parts``, computed one after the other.

        Each part's loss and gradients are weighted by its share of the samples; what forward writes is written by
        each part, in order. Sparse gradients are joined, in the order of the samples.
        """
        variables = list(self.trained.values())

        def differentiate(*arguments: Any) -> Any:
            with tf.GradientTape() as tape:
                loss, _ = _loss_and_aux(self.loss_fn(*arguments))
                scaled = self.optimizer.scale_loss(loss)
            return loss, tape.gradient(scaled, variables)

        function, tensors = tf.function(differentiate), _as_tensors(batch)
        size = parts[-1].stop
        results, shares = [], []
        with tf.device(self.device):
            for part in parts:
                arguments = tf.nest.map_structure(lambda tensor, part=part: _rows_of(tensor, part), tensors)
                results.append(_run(function, arguments))
                shares.append((part.stop - part.start) / size)
            gradients = [
                _add_weighted(gradients_of_parts, shares)
                for gradients_of_parts in zip(*(gradients for _, gradients in results), strict=True)
            ]
            loss = _add_weighted([loss for loss, _ in results], shares)
            self.apply(gradients)
        return self._outcome(loss, None, gradients)

    def apply(self, gradients: Sequence[Any]) -> None:
        """Apply the gradients of the trained variables, dense or IndexedSlices, in one tf.function."""
        variables = list(self.trained.values())

        def update(*gradients: Any) -> None:
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

        with tf.device(self.device):
            _run(tf.function(update, autograph=False), gradients)

    def _outcome(self, loss: Any, aux: Any, gradients: Sequence[Any]) -> Outcome:
        return Outcome(
            loss.numpy(),
            None if aux is None else tuple(tensor.numpy() for tensor in tf.nest.flatten(aux)),
            dict(zip(self.trained, gradients, strict=True)),
            values_of(self.variables),
        )


@dataclass(frozen=True)
class StepOnOneDevice:
    """A training step as the user wrote it, ``function``, and all its variables, by name, on ``device``."""

    function: Callable[..., Any]
    variables: Mapping[str, tf.Variable]
    device: str

    def train(self, batch: Sequence[Any]) -> Outcome:
        """Call the function, once."""
        whole = internals.clone_function(self.function) if internals.is_tf_function(self.function) else self.function
        return self._train(whole if whole is not self.function else tf.function(whole), batch)

    def train_divided(self, batch: Sequence[Any], sizes_of: SizesOf, *, deferred: bool = False) -> Outcome:
        """Call the function, once, but let Keras's batch norm take pieces of the batch: see ``OneDevice``."""
        function = internals.python_function_of(self.function)

        def divided(*arguments: Any) -> Any:
            with divide_batch_norm(sizes_of, deferred=deferred):
                return function(*arguments)

        return self._train(tf.function(divided), batch)

    def _train(self, function: Any, batch: Sequence[Any]) -> Outcome:
        with tf.device(self.device):
            returned = tf.nest.flatten(_run(function, _as_tensors(batch)))
        return Outcome(None, arrays_of(returned), {}, values_of(self.variables))


def arrays_of(returned: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a step returns, flattened, as NumPy arrays, without None."""
    return tuple(np.asarray(tensor) for tensor in returned if tensor is not None)


def values_of(variables: Mapping[str, tf.Variable]) -> dict[str, Any]:
    """Return the values (NumPy) of variables, by name."""
    return {name: variable.numpy() for name, variable in variables.items()}


def cut_samples(size: int, parts: int, sizes: Sequence[int] = ()) -> list[slice]:
    """Return the samples of each part: of N samples, part m of M holds [N m / M, N (m+1) / M).

    With ``sizes``, the parts are in that proportion instead: exactly these where they add up to N.
    """
    if not sizes:
        return [slice(size * m // parts, size * (m + 1) // parts) for m in range(parts)]
    ends = [size * sum(sizes[: m + 1]) // sum(sizes) for m in range(parts)]
    return [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def _run(function: Any, arguments: Sequence[Any]) -> Any:
    """Call a tf.function by its trace: TensorFlow warns if new tf.functions are called in a loop, as here."""
    return function.get_concrete_function(*arguments)(*arguments)


def _loss_and_aux(result: Any) -> tuple[Any, Any]:
    return result if isinstance(result, tuple) else (result, ())


def _as_tensors(batch: Sequence[Any]) -> Any:
    kept = tf.RaggedTensor | tf.SparseTensor
    return tf.nest.map_structure(
        lambda leaf: leaf if isinstance(leaf, kept) or is_python_value(leaf) else tf.convert_to_tensor(leaf),
        tuple(batch),
    )


def _rows_of(tensor: Any, part: slice) -> Any:
    if is_python_value(tensor) or tensor.shape.rank == 0:
        return tensor
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.slice(tensor, [part.start, 0], [part.stop - part.start, tensor.dense_shape[1]])
    return tensor[part]


def _add_weighted(parts: Sequence[Any], shares: Sequence[float]) -> Any:
    """Return the sum of the parts, each times its share: IndexedSlices if all parts are, None if all are None."""
    if all(isinstance(part, tf.IndexedSlices) for part in parts):
        values = [part.values * tf.constant(share, part.dtype) for part, share in zip(parts, shares, strict=True)]
        indices = [part.indices for part in parts]
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), parts[0].dense_shape)
    known = [(part, share) for part, share in zip(parts, shares, strict=True) if part is not None]
    if not known:
        return None
    return tf.add_n([tf.convert_to_tensor(part) * tf.constant(share, part.dtype) for part, share in known])
