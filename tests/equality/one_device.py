"""The reference: a plain training step on one device, which shares no code with dapple_tf, and the comparison with it.

The optimizer takes gradients of embeddings as the tape gives them: IndexedSlices, in which a row may occur several
times. Only a comparison with micro-batches in turn adds them up as dense tensors.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.compiler import StepVariant
from dapple_tf.errors import DappleWarning
from dapple_tf.staged_model import StagedModel
from tests.draws import are_few

needs_keras_3_13 = pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 13),
    reason=f"Keras {keras.__version__} itself lacks it: BatchNormalization(renorm=True), regularizers in float64",
)

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@dataclass(frozen=True)
class Problem:
    """A loss, its variables by name (tf or Keras ones; state too), and a way to make fresh optimizers."""

    loss_fn: Callable[..., Any]
    variables: Mapping[str, Any]
    make_optimizer: Callable[[], Any]

    @staticmethod
    def of_model(model: keras.Model, loss_fn: Callable[..., Any], make_optimizer: Callable[[], Any]) -> Problem:
        return Problem(loss_fn, {variable.path: variable for variable in model.variables}, make_optimizer)


@dataclass
class Outcome:
    """Results of some training steps: ``gradients`` of the first one, ``values`` of all variables after the last."""

    losses: list[Any] = field(default_factory=list)
    aux: list[Any] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Relative errors by the name of the compared tensor, and the step that was tested."""

    errors: Mapping[str, float]
    step: Any

    @property
    def model(self) -> StagedModel:
        """The staged model of the step that was tested."""
        return self.step._compiled_last().planned.model  # step.model would compile another program

    @property
    def worst(self) -> tuple[float, str]:
        return max((error, name) for name, error in self.errors.items())

    def check(self, tolerance: float) -> None:
        error, name = self.worst
        assert error <= tolerance, f"{name} differs by {error:.1e} (allowed {tolerance:.0e})"


def compare(
    problem: Problem, batches: Sequence[Any], *, in_turn: int | Sequence[int] = 1, **options: Any
) -> Comparison:
    """Train on ``batches`` on one device, then from the same values through a pipeline of these ``options``.

    ``in_turn``: the one device runs that many micro-batches one after the other (for losses that draw random numbers or
    keep state), or those of these sizes. All variables are restored before the pipeline starts.

    The pipeline returns gradients in the first step. Later steps are plain ones, except under the profile ``ci``
    (``make test``): there all steps are of the program that returns gradients, since building another takes time.
    """
    tensors = {name: as_tf(variable) for name, variable in problem.variables.items()}
    before = {name: variable.numpy() for name, variable in tensors.items()}
    wanted = train_on_one_device(problem, batches, in_turn)
    for name, variable in tensors.items():
        variable.assign(before[name])
    found, step = _train_on_pipeline(problem, batches, set(wanted.gradients), options)
    errors: dict[str, float] = {}
    for i, pair in enumerate(zip(found.losses, wanted.losses, strict=True)):
        errors[f"loss of step {i}"] = relative_error(*pair)
    for i, (got, want) in enumerate(zip(found.aux, wanted.aux, strict=True)):
        tf.nest.assert_same_structure(got, want)
        for j, pair in enumerate(zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True)):
            errors[f"aux {j} of step {i}"] = relative_error(*pair)
    assert found.gradients.keys() == wanted.gradients.keys()
    assert found.values.keys() == wanted.values.keys()
    errors |= {f"gradient of {n}": relative_error(found.gradients[n], g) for n, g in wanted.gradients.items()}
    errors |= {f"value of {n}": relative_error(found.values[n], v) for n, v in wanted.values.items()}
    return Comparison(errors, step)


def relative_error(found: Any, wanted: Any) -> float:
    """max|found - wanted| / max|wanted|; infinite for other shapes, types or NaNs; integers must be equal."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if wanted.dtype.name == "bfloat16":  # which NumPy takes for no number
        found, wanted = found.astype(np.float32), wanted.astype(np.float32)
    if wanted.dtype.kind not in "fc":
        return 0.0 if np.array_equal(found, wanted) else float("inf")
    if wanted.size == 0:
        return 0.0
    error = float(np.max(np.abs(found - wanted)))
    if np.isnan(error):
        return float("inf")
    return error / (float(np.max(np.abs(wanted))) or 1.0)


def as_tf(variable: Any) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


# --- one device


def train_on_one_device(problem: Problem, batches: Sequence[Any], in_turn: int | Sequence[int] = 1) -> Outcome:
    """A GradientTape and ``optimizer.apply`` in one tf.function on the first CPU, as any tutorial has it."""
    optimizer = problem.make_optimizer()
    trainable = {name: v for name, v in problem.variables.items() if v.trainable}
    outcome = Outcome()

    def step(*batch: Any) -> Any:
        results = [_differentiate(problem.loss_fn, part, trainable, optimizer) for part in _parts(batch, in_turn)]
        shares = [_size(part) / _size(batch) for part in _parts(batch, in_turn)]
        loss = _mean([loss for loss, _, _ in results], shares)
        gradients = {name: _mean([found[name] for _, _, found in results], shares) for name in results[0][2]}
        trained = [trainable[name] for name in gradients]
        if not optimizer.built:
            # Keras builds inside of the trace, where slots that start at a weight's value miss it.
            with tf.init_scope(), keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(trained)
        optimizer.apply(list(gradients.values()), trained)
        aux = results[0][1] if in_turn == 1 else None
        return loss, aux, gradients

    compiled = tf.function(step, autograph=False)  # converting Keras's optimizers takes longer than tracing them
    for i, batch in enumerate(batches):
        with tf.device("CPU:0"):
            loss, aux, gradients = compiled(*batch)
        outcome.losses.append(loss.numpy())
        outcome.aux.append(None if i == 0 or aux is None else tf.nest.map_structure(lambda t: t.numpy(), aux))
        if i == 0:
            outcome.gradients = {name: tf.convert_to_tensor(g).numpy() for name, g in gradients.items()}
    outcome.values = _values(problem, optimizer)
    return outcome


def _differentiate(
    loss_fn: Callable[..., Any], batch: Sequence[Any], trainable: Mapping[str, Any], optimizer: Any
) -> Any:
    """(loss, aux, gradients of the variables that have one, those that the optimizer takes)."""
    with tf.GradientTape() as tape:
        result = loss_fn(*batch)
        loss, aux = result if isinstance(result, tuple) else (result, None)
        scaled = optimizer.scale_loss(loss)
    found = tape.gradient(scaled, [as_tf(v) for v in trainable.values()])
    return loss, aux, {name: g for name, g in zip(trainable, found, strict=True) if g is not None}


def _mean(tensors: Sequence[Any], shares: Sequence[float]) -> Any:
    """The weighted mean (tf.cast would round a Python float to float32)."""
    if len(tensors) == 1:
        return tensors[0]
    dense = map(tf.convert_to_tensor, tensors)
    return tf.add_n([tensor * tf.constant(share, tensor.dtype) for tensor, share in zip(dense, shares, strict=True)])


def _parts(batch: Sequence[Any], cut: int | Sequence[int]) -> list[Any]:
    """The batch cut into ``cut`` micro-batches: m holds samples [N m / M, N (m + 1) / M); or into these sizes."""
    if cut == 1:
        return [batch]
    size = _size(batch)
    bounds = [size * m // cut for m in range(cut + 1)] if isinstance(cut, int) else [0, *itertools.accumulate(cut)]
    assert bounds[-1] == size, "sizes are those of all batches"
    return [
        tf.nest.map_structure(lambda t, low=low, high=high: t[low:high], batch)
        for low, high in itertools.pairwise(bounds)
    ]


def _size(batch: Sequence[Any]) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])


# --- the pipeline


def _train_on_pipeline(
    problem: Problem, batches: Sequence[Any], graded: set[str], options: Mapping[str, Any]
) -> tuple[Outcome, Any]:
    optimizer = problem.make_optimizer()
    step = dapple.pipeline(problem.loss_fn, optimizer=optimizer, **options)
    outcome = Outcome()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss, gradients = step.run_exposed(*batches[0])
    _check_warnings(problem, graded, caught)
    outcome.losses.append(loss)
    outcome.aux.append(None)
    outcome.gradients = {_name_of(problem, step, n): g for n, g in gradients.items()}
    for batch in batches[1:]:
        loss, aux = _train(step, batch)
        outcome.losses.append(loss)
        outcome.aux.append(aux)
    outcome.values = _values(problem, optimizer)
    return outcome, step


def _train(step: Any, batch: Any) -> tuple[Any, Any]:
    """Run a further step, and return its loss and aux as NumPy values."""
    if are_few():
        (compiled,), (outputs,) = step._run(batch, StepVariant.WITH_GRADIENTS)
        model = compiled.planned.model
        result = model.pack(outputs[: 1 + len(model.interface.merges)])
    else:
        result = step(*batch)
    loss, aux = result if isinstance(result, tuple) else (result, None)
    return loss.numpy(), None if aux is None else tf.nest.map_structure(lambda t: t.numpy(), aux)


def _check_warnings(problem: Problem, graded: set[str], caught: Sequence[warnings.WarningMessage]) -> None:
    """A variable that no gradient reaches is named, and nothing else is said, but for documented differences."""
    ungraded = [n for n, v in problem.variables.items() if v.trainable and n not in graded]
    # Python 3.13 deprecates what TensorFlow's autograph does.
    caught = [w for w in caught if "'___pyct_anno'" not in str(w.message)]
    said = [str(w.message) for w in caught if issubclass(w.category, DappleWarning)]
    assert len(said) == len(caught), [str(w.message) for w in caught]
    # stages="auto" says why it takes one device, as it does for small models.
    known = ("does not train as on one device", "the plan is one device")
    said = [text for text in said if not any(words in text for words in known)]
    used = [text for text in said for name in ungraded if name in text]
    assert bool(used) or not said, said
    for name in graded:
        assert not any(f" {name}," in text or f" {name}:" in text for text in said), said


def _name_of(problem: Problem, step: Any, name: str) -> str:
    """Return the problem's name of the variable that the pipeline calls ``name``."""
    variable = step._compiled_last().planned.model.model_variables[name]  # step.model would compile a plain step
    return next(n for n, v in problem.variables.items() if as_tf(v) is variable)


def named_variables(problem: Problem, optimizer: Any) -> dict[str, tf.Variable]:
    """The problem's variables and the optimizer's, under names that do not depend on what was made before."""
    slots: dict[str, tf.Variable] = {}
    for variable in optimizer.variables:  # those without a name are numbered, or share one
        name = "slot " + re.sub(r"_\d+$", "", variable.path.rsplit("/", 1)[-1])
        slots[name if name not in slots else f"{name} {len(slots)}"] = as_tf(variable)
    return {name: as_tf(variable) for name, variable in problem.variables.items()} | slots


def _values(problem: Problem, optimizer: Any) -> dict[str, Any]:
    return {name: variable.numpy() for name, variable in named_variables(problem, optimizer).items()}
