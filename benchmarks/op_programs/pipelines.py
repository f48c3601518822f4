"""Compare whole pipelines of random programs with plain TensorFlow: stages, replicas, short batches and XLA."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from benchmarks.op_programs.check import (
    INVALID_ERRORS,
    SAMPLES,
    SIZES,
    Found,
    Outcome,
    check,
    first_line,
    is_close,
    run_plain,
)
from benchmarks.op_programs.program import Program, make_batch
from dapple_tf import errors

_RATE = 0.25
_REFUSALS = (errors.LossError, errors.CaptureError, errors.PartitionError, errors.PlanError)


@dataclass(frozen=True)
class Setting:
    """The options of a pipeline of two stages."""

    micro_batches: int
    replicas: tuple[int, int] | None = None
    jit_compile: bool = False


SETTINGS = (
    Setting(1),
    Setting(2),
    Setting(3),
    Setting(SAMPLES),
    Setting(2, (2, 2)),
    Setting(2, jit_compile=True),
)


def check_parts(program: Program) -> Found:
    """Return the outcome of a program without stages, or, where its graph does not run by itself, as pipelines.

    The graph is imported into a session without the shapes that a pipeline gives its tensors, and some ops need these.
    """
    found = check(program)
    if found.outcome is not Outcome.ERROR:
        return found
    outcomes = [check_pipeline(program, setting) for setting in SETTINGS if setting.replicas is None]
    bad = [each for each in outcomes if each.outcome in (Outcome.WRONG, Outcome.ERROR)]
    refused = [each for each in outcomes if each.outcome is Outcome.REFUSED]
    return (bad + refused + outcomes)[0]


def check_pipeline(program: Program, setting: Setting) -> Found:
    """Return whether steps on two batches, the second one short, train as plain gradient descent does."""
    loss_fn, variables = program.loss()
    start = [variable.numpy() for variable in variables]
    try:
        wanted = run_plain(loss_fn, variables)
    except INVALID_ERRORS as error:
        return Found(Outcome.INVALID, first_line(error))
    if not all(np.isfinite(part).all() for parts in wanted for part in parts):
        return Found(Outcome.INVALID, "not finite")
    options: dict[str, Any] = {"replicas": setting.replicas, "jit_compile": setting.jit_compile}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", errors.DappleWarning)
            step = dapple.pipeline(
                tf.function(loss_fn, autograph=False),
                optimizer=keras.optimizers.SGD(_RATE),
                stages=2,
                micro_batches=setting.micro_batches,
                **options,
            )
            for size, plain in zip(SIZES, wanted, strict=True):
                for variable, value in zip(variables, start, strict=True):
                    variable.assign(value)
                found = [
                    step(*make_batch(size)).numpy(),
                    *(_gradient(v, s) for v, s in zip(variables, start, strict=True)),
                ]
                if step.exactness.reasons:
                    return Found(Outcome.REFUSED, "documented")
                if not all(is_close(ours, theirs) for ours, theirs in zip(found, plain, strict=True)):
                    return Found(Outcome.WRONG, f"{setting}: {size} samples: {_texts(found)} for {_texts(plain)}")
    except _REFUSALS as error:
        return Found(Outcome.REFUSED, " ".join(str(error).split()))
    except Exception as error:  # whatever it is, it is a fault to report
        return Found(Outcome.ERROR, f"{setting}: {type(error).__name__}: {first_line(error)}")
    return Found(Outcome.EQUAL)


def _gradient(variable: tf.Variable, start: Any) -> Any:
    return (start - variable.numpy()) / _RATE


def _texts(values: Sequence[Any]) -> list[str]:
    return [str(np.ravel(value)[:2]) for value in values]
