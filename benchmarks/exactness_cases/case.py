"""The description of a case: what a user would write to train a model with a given loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

TOLERANCE = 1e-12
"""Allowed relative error of float64 tensors."""

SINGLE_PRECISION = 1e-5
"""Allowed relative error where a part of the model computes in float32."""


class Expected(Enum):
    """The outcome that is wanted of a case.

    ``EQUAL``: compute what one device computes. ``REFUSED``: raise an error that says why it cannot. ``DOCUMENTED``:
    differ from one device, and name the layer in ``step.exactness`` (batch norm in training mode).
    """

    EQUAL = "equal"
    REFUSED = "refused"
    DOCUMENTED = "documented"


class Described(Protocol):
    """The columns of a case or a program in tables."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> str: ...

    @property
    def expected(self) -> Expected: ...


@dataclass(frozen=True)
class Training:
    """A training loop's objects.

    ``loss_fn``: of the tensors of a batch, returns the loss or (loss, aux). ``trained``: the variables that the user
    gives to ``tape.gradient`` and the optimizer. ``batches``: a tuple of tensors for each step, all with the same
    number of rows, of which a configuration takes the first few.
    """

    loss_fn: Callable[..., Any]
    optimizer: Any
    trained: Sequence[Any]
    batches: Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A model with its loss.

    ``make``: makes new variables and batches from a seed, all in Keras's current float type. ``options``: further ones
    of ``dapple.pipeline``, which replace those of the configuration. ``tolerance``: of relative errors.
    """

    name: str
    family: str
    make: Callable[[int], Training]
    expected: Expected = Expected.EQUAL
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE


BATCH_LOSS: Mapping[str, Any] = {"batch_loss": True, "schedule": "gpipe"}
"""Options for a loss that does not add up over micro-batches: its end runs once, on the rows of the whole batch."""


def refused_and_exact(name: str, family: str, make: Callable[[int], Training]) -> tuple[Case, Case]:
    """Return the two cases of a loss that does not add up: refused by default, equal with ``batch_loss=True``."""
    return (
        Case(name, family, make, Expected.REFUSED),
        Case(f"{name}_batch_loss", family, make, options=BATCH_LOSS),
    )
