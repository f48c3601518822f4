"""The reference of ``benchmarks.exactness``: a training loop as a Keras user writes it, without dapple_tf."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.exactness_cases.case import Case, Training


@dataclass(frozen=True)
class Built:
    """A case's training, and every variable that was made for it, by a name of its own (but for the optimizer's)."""

    training: Training
    variables: Mapping[str, tf.Variable]


@dataclass
class Results:
    """The results of some steps.

    ``losses`` and ``aux``: of each step (``aux`` holds None where it was not returned). ``gradients``: of the first
    step, dense, by the variable's name, or None where they were not returned. ``variables``: after the last step, by
    name; ``slots``: those of the optimizer.
    """

    losses: list[Any] = field(default_factory=list)
    aux: list[Any] = field(default_factory=list)
    gradients: dict[str, Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    slots: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Let Keras make float64 layers, losses and constants inside this context."""
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def build(case: Case, seed: int) -> Built:
    """Make a case anew: the same seed gives the same values, in other variables of the same names."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    made: list[tf.Variable] = []

    def record(create: Any, **options: Any) -> tf.Variable:
        made.append(create(**options))
        return made[-1]

    with tf.variable_creator_scope(record):
        training = case.make(seed)
    paths = {id(as_tf(variable)): variable.path for variable in training.trained if hasattr(variable, "path")}
    of_optimizer = {id(as_tf(variable)) for variable in training.optimizer.variables}
    made = [variable for variable in made if id(variable) not in of_optimizer]
    named = (paths.get(id(variable), variable.name.removesuffix(":0")) for variable in made)
    return Built(training, dict(zip(distinct(named), made, strict=True)))


def distinct(names: Iterator[str]) -> list[str]:
    """Return the names, with a number after every further one of the same name."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, -1) + 1
        found.append(f"{name} ({seen[name]})" if seen[name] else name)
    return found


def as_tf(variable: Any) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def take(batches: Sequence[tuple[Any, ...]], sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return a batch of each size: the first rows of each batch."""
    return [
        tf.nest.map_structure(lambda tensor, size=size: tensor[:size], batch)
        for batch, size in zip(batches, sizes, strict=True)
    ]


def train_plainly(built: Built, sizes: Sequence[int]) -> Results:
    """Train on one device: a GradientTape over the whole batch and ``apply_gradients``, in one tf.function.

    Raises ValueError where a loss is not finite, since such a case would show nothing.
    """
    training, results = built.training, Results()
    training.optimizer.build(list(training.trained))

    def step(*batch: Any) -> Any:
        with tf.GradientTape() as tape:
            result = training.loss_fn(*batch)
            loss, aux = result if isinstance(result, tuple) else (result, None)
        gradients = tape.gradient(loss, list(training.trained))
        pairs = [(g, v) for g, v in zip(gradients, training.trained, strict=True) if g is not None]
        training.optimizer.apply_gradients(pairs)
        return loss, aux, [None if g is None else tf.convert_to_tensor(g) for g in gradients]

    compiled = tf.function(step, autograph=False)  # autograph would convert Keras's optimizer, which takes long
    for i, batch in enumerate(take(training.batches, sizes)):
        with tf.device("CPU:0"):
            loss, aux, gradients = compiled(*batch)
        results.losses.append(loss.numpy())
        results.aux.append(numpy_of(aux))
        if i == 0:
            names = {id(variable): name for name, variable in built.variables.items()}
            pairs = zip(training.trained, gradients, strict=True)
            results.gradients = {names[id(as_tf(v))]: g.numpy() for v, g in pairs if g is not None}
    if not np.all(np.isfinite(results.losses)):
        raise ValueError(f"the losses of plain Keras are {results.losses}: the case is of no use")
    read_variables(built, results)
    return results


def numpy_of(aux: Any) -> Any:
    return None if aux is None else tf.nest.map_structure(lambda tensor: tensor.numpy(), aux)


def read_variables(built: Built, results: Results) -> None:
    """Add the present values of all variables to the results."""
    results.variables = {name: variable.numpy() for name, variable in built.variables.items()}
    slots = built.training.optimizer.variables
    # The path of a variable without a name has a number, and the optimizer's name only if ``apply`` has built it.
    names = distinct(re.sub(r"^(\w+/)?variable(_\d+)?$", "variable", slot.path) for slot in slots)
    results.slots = {name: as_tf(slot).numpy() for name, slot in zip(names, slots, strict=True)}
