"""Run a program through a pipeline, compare everything that its user sees with plain Keras, and say how it came out."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from benchmarks.exactness_cases.case import Case, Training
from benchmarks.exactness_check import REFUSALS, SEED, Checker, Configuration, Found, Outcome, describe_crash
from benchmarks.exactness_differences import differing, flatten, kind_of
from benchmarks.exactness_plain import as_tf, distinct, double_precision
from benchmarks.program_cases.program import BATCH, Fit, Program
from dapple_tf.errors import DappleWarning

SIZES = (BATCH, BATCH, BATCH - 3)

WHOLE, FEW, SINGLE = (Configuration(2, micro_batches, "auto", SIZES) for micro_batches in (1, 4, BATCH))
CONFIGURATIONS = (WHOLE, FEW, SINGLE)
"""One micro-batch, four, and micro-batches of one sample."""

ROUNDING = 1e-12
"""A variable (a slot) that is smaller than the largest one of its kind by this factor is rounding alone: optimizers
such as Adam raise rounding errors of gradients."""

Values = dict[str, dict[str, Any]]
"""The results of a program by name, for each call of its user."""


class ProgramChecker:
    """Checks one program under several configurations; plain Keras runs it once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._plain: Values | None = None
        self._loop: Checker | None = None

    def check(self, configuration: Configuration, job: Any = None, folder: Path | None = None) -> Found:
        """Run the program both ways. ``job``: the job of this rank, whose ranks save to the same ``folder``."""
        if self._plain is None and self._loop is None:
            with precision(self._program), warnings.catch_warnings(), tempfile.TemporaryDirectory() as own:
                warnings.simplefilter("ignore")
                try:
                    made = make(self._program)
                    if isinstance(made, Training):
                        self._loop = Checker(_as_case(self._program), ROUNDING)
                    else:
                        self._plain = run(self._program, made, Path(own))
                except Exception as error:  # the table goes on with the next program
                    return Found(configuration, Outcome.CRASHED, f"plain Keras: {describe_crash(error)}")
        if self._loop is not None:
            return self._loop.check(configuration, job)
        with precision(self._program), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with tempfile.TemporaryDirectory() as own:
                outcome, detail = self._compare(configuration, job, folder or Path(own))
        said = dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, DappleWarning))
        return Found(configuration, outcome, detail, tuple(said))

    def _compare(self, configuration: Configuration, job: Any, folder: Path) -> tuple[Outcome, str]:
        assert self._plain is not None
        chosen = {"stages": configuration.stages, "micro_batches": configuration.micro_batches}
        try:
            made = make(self._program)
            assert isinstance(made, Fit)
            step = dapple.keras.pipeline(made.model, **{**chosen, **self._program.options})
            found = run(self._program, made, folder, step, job)
        except REFUSALS as error:
            return Outcome.REFUSED, f"{type(error).__name__}: {error}"
        except Exception as error:  # any error of a program is its outcome; the table goes on
            return Outcome.CRASHED, describe_crash(error)
        for name, error in compare(found, self._plain, self._program.tolerance):
            if not step.exactness.exact:
                return Outcome.DOCUMENTED, f"{step.exactness} ({name} differs by {error:.1e})"
            return Outcome.WRONG, f"{name} differs by {error:.1e}"
        return Outcome.EQUAL, ""


def precision(program: Program) -> contextlib.AbstractContextManager[None]:
    """Return the context in which a program is made and run: Keras's types are float64 in it, if it can use them."""
    return double_precision() if program.dtype == "float64" else contextlib.nullcontext()


def _as_case(program: Program) -> Case:
    def make_training(seed: int) -> Training:
        made = program.make()
        assert isinstance(made, Training)
        return made

    return Case(
        program.name, program.family, make_training, program.expected, program.options, tolerance=program.tolerance
    )


def make(program: Program) -> Fit | Training:
    """Make a program anew, with the same initial values each time."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(SEED)
    return program.make()


def run(program: Program, made: Fit, folder: Path, step: Any = None, job: Any = None) -> Values:
    """Call ``fit``, ``evaluate``, ``predict``, save the model and load it; return all that these give.

    ``step``, ``job``: those of the pipeline and of this rank. What cannot be saved or loaded without its source is made
    anew and given the saved weights.
    """
    model = made.model
    keras.utils.set_random_seed(SEED)
    data = (made.x,) if made.y is None else (made.x, made.y)
    values = {"history": flatten(model.fit(*data, verbose=0, **made.options).history)}
    values["evaluate"] = flatten(model.evaluate(*data, verbose=0, return_dict=True))
    inputs = made.x.map(_first) if isinstance(made.x, tf.data.Dataset) else made.x
    values["predict"] = flatten(model.predict(inputs, verbose=0))
    if job is not None:
        step.gather()
    values["variable"], values["slot"] = _read(model.variables), _read(model.optimizer.variables)
    model.save_weights(folder / "model.weights.h5")
    if job is not None:
        job.gather(None)  # rank 0 has written the file
    try:
        model.save(folder / "model.keras")
        if job is not None:
            job.gather(None)
        loaded = keras.saving.load_model(folder / "model.keras")
    except Exception as error:  # plain Keras must fail with the same error
        values["save or load"] = {"": type(error).__name__}
        again = make(program)
        assert isinstance(again, Fit)
        loaded = again.model
        if not loaded.built:
            loaded.predict(inputs, verbose=0)
        loaded.load_weights(folder / "model.weights.h5")
    values["loaded"] = flatten(loaded.predict(inputs, verbose=0))
    if loaded.optimizer is not None:
        values["loaded slot"] = _read(loaded.optimizer.variables)
    return values


def _first(*batch: Any) -> Any:
    return (batch[0],)


def _read(variables: Sequence[Any]) -> dict[str, Any]:
    names = distinct(variable.path for variable in variables)
    return {name: np.asarray(as_tf(variable)) for name, variable in zip(names, variables, strict=True)}


def compare(found: Values, wanted: Values, tolerance: float) -> Iterator[tuple[str, float]]:
    """Yield the names and errors of values that differ, in the order in which the program computed them."""
    for group, values in wanted.items():
        kinds = {"variable": [""], "slot": sorted(map(kind_of, values))}.get(group.split()[-1], [])
        yield from differing(found.get(group, {}), values, tolerance, f"{group} {{}}", kinds, ROUNDING)
