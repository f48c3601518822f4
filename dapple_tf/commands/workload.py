"""``dapple.Workload``: what the callable of a MODEL on the command line returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    """A model to train.

    ``loss_fn``: a tf.function or callable of a batch's arrays, as for ``dapple.pipeline``. ``optimizer``: a Keras
    optimizer. ``dataset``: an iterable of batches (tuples of arrays), started again where it ends.
    """

    loss_fn: Callable[..., Any]
    optimizer: Any
    dataset: Iterable[Any]
