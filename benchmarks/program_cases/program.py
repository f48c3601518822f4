"""The description of a program: what its user writes, knowing nothing of pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from benchmarks.exactness_cases.case import SINGLE_PRECISION, Expected, Training

BATCH = 8
"""Samples of every batch but the last of an epoch."""

TOLERANCES: Mapping[str, float] = {"float64": 1e-9, "float32": SINGLE_PRECISION, "float16": 1e-3}
"""Allowed relative errors after some epochs of any optimizer, by the least precise type of a program."""


@dataclass(frozen=True)
class Fit:
    """A compiled Keras model and the data that its user gives to ``fit``, ``evaluate`` and ``predict``.

    ``y``: None where ``x`` is a data set, or the loss needs no labels. ``options``: further ones of ``fit``.
    """

    model: Any
    x: Any
    y: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """A program: ``make`` builds its model and data anew, with a loop of its own (``Training``) or for ``fit``.

    ``options``: those of the pipeline that its user would be told to pass. ``reason``: why it is refused or differs, by
    nature. ``ranks``: it also runs as a job of two ranks. ``needs``: a package without which it is left out.
    ``dtype``: the least precise type that it computes with; some operations and layers have single precision only.
    """

    make: Callable[[], Fit | Training]
    expected: Expected = Expected.EQUAL
    reason: str = ""
    ranks: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None
    dtype: str = "float64"

    @property
    def tolerance(self) -> float:
        """The allowed relative error."""
        return TOLERANCES[self.dtype]

    @property
    def name(self) -> str:
        """The name of the function that makes it."""
        return self.make.__name__

    @property
    def family(self) -> str:
        """The theme: the name of the file that it is in."""
        return self.make.__module__.rpartition(".")[2]


ONCE: Mapping[str, Any] = {"batch_loss": "auto"}
"""Options for a loss that compares the samples of a batch with each other."""

ROWS = 3 * BATCH - 3
"""Samples of a data set: its last batch is short."""


def batches(*columns: Any) -> list[tuple[Any, ...]]:
    """Return three batches of arrays of ``3 * BATCH`` samples."""
    return [
        tuple(tf.constant(column[first : first + BATCH]) for column in columns) for first in range(0, 3 * BATCH, BATCH)
    ]
