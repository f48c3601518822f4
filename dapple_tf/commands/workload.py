"""What a MODEL on the command line returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    """A training job: a loss of a batch, a keras optimizer, and an iterable of batches (tuples of arrays)."""

    loss_fn: Callable[..., Any]
    optimizer: Any
    dataset: Iterable[Any]
