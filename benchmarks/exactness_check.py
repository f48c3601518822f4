"""Train a case through a pipeline, compare it with plain Keras, and say how it came out."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from benchmarks.exactness_cases.case import Case, Described, Expected
from benchmarks.exactness_differences import ROUNDING, differences
from benchmarks.exactness_plain import (
    Built,
    Results,
    build,
    double_precision,
    numpy_of,
    read_variables,
    take,
    train_plainly,
)
from dapple_tf import errors

_NO_REFUSALS = (errors.StepError, errors.JobError, errors.UsageError, errors.DappleWarning)
REFUSALS = tuple(
    kind for kind in (getattr(errors, name) for name in errors.__all__) if not issubclass(kind, _NO_REFUSALS)
)
"""Errors that refuse a model; those of a step or a job that failed, or of a wrong call, are not among them."""

SEED = 7


class Outcome(Enum):
    """The outcome of comparing a pipeline's results with plain Keras.

    ``DOCUMENTED``: they differ, and ``step.exactness`` says why. ``WRONG``: they differ otherwise; a warning does not
    make that better.
    """

    EQUAL = "EQUAL"
    REFUSED = "REFUSED"
    DOCUMENTED = "DOCUMENTED"
    WRONG = "WRONG"
    CRASHED = "CRASHED"


@dataclass(frozen=True)
class Configuration:
    """Options of a pipeline, and the number of samples of each batch."""

    stages: int
    micro_batches: int
    schedule: str
    sizes: tuple[int, ...] = (16, 16, 16)
    replicas: tuple[int, ...] | None = None

    @property
    def whole(self) -> bool:
        """Whether no batch is divided."""
        return self.micro_batches == 1 and set(self.replicas or (1,)) == {1}

    @property
    def unequal(self) -> bool:
        """Whether stages have different replicas."""
        return len(set(self.replicas or (1,))) > 1

    def __str__(self) -> str:
        replicas = "" if self.replicas is None else f" r={','.join(map(str, self.replicas))}"
        sizes = ",".join(map(str, dict.fromkeys(self.sizes)))
        return f"S={self.stages}{replicas} M={self.micro_batches} {self.schedule} N={sizes}"


UNEVEN = (13, 13, 7)

QUICK = (
    Configuration(2, 4, "dapple-a", UNEVEN),
    Configuration(3, 2, "gpipe", UNEVEN, (1, 2, 1)),
)
CONFIGURATIONS = (
    *QUICK,
    Configuration(1, 1, "gpipe", UNEVEN),
    Configuration(1, 8, "dapple-a", UNEVEN),
    Configuration(1, 3, "dapple-a", UNEVEN, (2,)),
    Configuration(2, 8, "zb-h1"),
    Configuration(2, 3, "dapple-a", replicas=(2, 2)),
    Configuration(3, 5, "zb-h1", UNEVEN),
    Configuration(4, 8, "gpipe", UNEVEN),
    Configuration(4, 3, "dapple-a", UNEVEN),
)


def four_configurations(number: int) -> tuple[Configuration, ...]:
    """Return the two quick configurations and two others for the case of this number; four cases in a row cover all."""
    others = CONFIGURATIONS[len(QUICK) :]
    first = number * 2 % len(others)
    return (*QUICK, *others[first : first + 2])


RANKS = (
    Configuration(2, 4, "dapple-a", UNEVEN),
    Configuration(1, 3, "gpipe", UNEVEN, (2,)),
)
"""Configurations of a job of two processes."""


@dataclass(frozen=True)
class Found:
    """The outcome of a case under one configuration.

    ``detail``: the error's message, or the first tensor that differs. ``warnings``: what the pipeline warned of.
    """

    configuration: Configuration
    outcome: Outcome
    detail: str = ""
    warnings: tuple[str, ...] = ()


def is_expected(case: Described, found: Found) -> bool:
    """Return whether a case came out as it must; a batch that is not divided may be exact where others are not.

    Any model may have too few places at which stages of unequal replicas can meet: that is refused for the plan.
    """
    if found.outcome is Outcome.REFUSED and found.detail.startswith("PlanError: ") and found.configuration.unequal:
        return True
    wanted = {
        Expected.EQUAL: {Outcome.EQUAL},
        Expected.REFUSED: {Outcome.REFUSED},
        Expected.DOCUMENTED: {Outcome.DOCUMENTED},
    }[case.expected]
    return found.outcome in (wanted | {Outcome.EQUAL} if found.configuration.whole else wanted)


def describe_crash(error: Exception) -> str:
    """Return an error's class, the function that raised it, and its message."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {where.name}: {error}"


class Checker:
    """Checks one case under several configurations; plain Keras trains once for all that have the same batches."""

    def __init__(self, case: Case, rounding: float = ROUNDING) -> None:
        """Take the case, and what is zero apart from rounding, by the largest tensor of its kind."""
        self._case, self._rounding = case, rounding
        self._plain: dict[tuple[int, ...], Results] = {}

    def check(self, configuration: Configuration, job: Any = None) -> Found:
        """Train both ways from the same values, and compare. ``job``: the job that this process is a rank of."""
        with double_precision(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome, detail = self._compare(configuration, job)
        said = dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, errors.DappleWarning))
        return Found(configuration, outcome, detail, tuple(said))

    def _compare(self, configuration: Configuration, job: Any) -> tuple[Outcome, str]:
        try:
            if configuration.sizes not in self._plain:
                self._plain[configuration.sizes] = train_plainly(build(self._case, SEED), configuration.sizes)
            built = build(self._case, SEED)
            found, step = train_pipelined(built, configuration, self._case.options, job)
        except REFUSALS as error:
            return Outcome.REFUSED, f"{type(error).__name__}: {error}"
        except Exception as error:  # any error of a case is its outcome; the table goes on
            return Outcome.CRASHED, describe_crash(error)
        for name, error in differences(found, self._plain[configuration.sizes], self._case.tolerance, self._rounding):
            if not step.exactness.exact:
                return Outcome.DOCUMENTED, f"{step.exactness} ({name} differs by {error:.1e})"
            return Outcome.WRONG, f"{name} differs by {error:.1e}"
        return Outcome.EQUAL, ""


def train_pipelined(
    built: Built, configuration: Configuration, options: Mapping[str, Any], job: Any = None
) -> tuple[Results, Any]:
    """Train through a pipeline; return the results and the step. The first step gives its gradients, but in a job."""
    training, results = built.training, Results()
    batches = take(training.batches, configuration.sizes)
    chosen = {
        "stages": configuration.stages,
        "micro_batches": configuration.micro_batches,
        "schedule": configuration.schedule,
        "replicas": None if configuration.replicas is None else list(configuration.replicas),
        **options,
    }
    step = dapple.pipeline(training.loss_fn, optimizer=training.optimizer, **chosen)
    if job is None:
        loss, gradients = step.run_exposed(*batches[0])
        names = {id(variable): name for name, variable in built.variables.items()}
        variables = step.model(batches[0]).model_variables
        results.gradients = {names[id(variables[name])]: dense(gradient) for name, gradient in gradients.items()}
        results.losses.append(loss)
        results.aux.append(None)
    for batch in batches[len(results.losses) :]:
        result = step(*batch)
        loss, aux = result if isinstance(result, tuple) else (result, None)
        results.losses.append(loss.numpy())
        results.aux.append(numpy_of(aux))
    if job is not None:
        step.gather()
    read_variables(built, results)
    return results, step


def dense(gradient: Any) -> Any:
    return np.asarray(tf.convert_to_tensor(gradient))
