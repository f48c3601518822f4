"""Keep the traces of a loss, up to a limit, and find the one that serves a batch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dapple_tf.errors import DappleWarning
from dapple_tf.staged_model import StagedModel

MOST_TRACES = 16
"""The number of traces that are kept for one loss; a further one replaces the one whose last use is longest ago."""

_WARN_AT = 3  # warn at the third trace that differs from others only in inner lengths

Key = tuple[str, tuple[tf.TensorSpec, ...]]
"""The nesting of a batch's arguments, and the specs of its flattened tensors (see ``batch_key``)."""


@dataclass
class TracedShapes:
    """The traces of one loss by the nesting of arguments and signature, the one used longest ago first."""

    _models: dict[Key, StagedModel] = field(default_factory=dict)
    _warned: bool = False

    def __len__(self) -> int:
        """Return the number of traces that are kept."""
        return len(self._models)

    def values(self) -> list[StagedModel]:
        """Return the traces that are kept."""
        return list(self._models.values())

    def find(self, key: Key) -> StagedModel | None:
        """Return a trace whose signature fits this key and which serves its inner lengths, or None."""
        for kept in [key, *self._models]:
            if kept in self._models and _serves(kept, self._models[kept], key):
                model = self._models[kept] = self._models.pop(kept)  # moved to the end: it is used last
                return model
        return None

    def alike(self, key: Key) -> list[tuple[tf.TensorSpec, ...]]:
        """Return the signatures of the traces for batches that differ from those of this key in inner lengths only."""
        return [kept[1] for kept in self._models if _is_alike(kept, key)]

    def add(self, key: Key, model: StagedModel) -> StagedModel | None:
        """Keep a new trace, made for a batch of this key, and return one that is dropped for it, or None.

        Warn once where many lengths have been traced.
        """
        self._models[key[0], model.signature] = model
        dropped = self._models.pop(next(iter(self._models))) if len(self._models) > MOST_TRACES else None
        alike = [kept for kept in self._models if _is_alike(kept, key)]
        if len(alike) >= _WARN_AT and not self._warned:
            self._warned = True
            warnings.warn(_advice(alike, key), DappleWarning, stacklevel=7)
        return dropped


def _serves(kept: Key, model: StagedModel, key: Key) -> bool:
    fits = [a.dtype == b.dtype and a.shape.is_compatible_with(b.shape) for a, b in zip(kept[1], key[1], strict=False)]
    if kept[0] != key[0] or len(kept[1]) != len(key[1]) or not all(fits):
        return False
    return model.serves is None or model.serves(key[1])


def _is_alike(kept: Key, key: Key) -> bool:
    """Return whether the batches differ in inner lengths only."""
    return kept[0] == key[0] and _dtypes_and_ranks(kept[1]) == _dtypes_and_ranks(key[1])


def _dtypes_and_ranks(specs: Sequence[tf.TensorSpec]) -> list[Any]:
    return [(spec.dtype, spec.shape.rank) for spec in specs]


def _advice(alike: Sequence[Key], key: Key) -> str:
    return (
        f"the step has been built for {len(alike)} inner shapes of the batch, the last one "
        f"{', '.join(str(spec.shape) for spec in key[1])}, and is built for each further one that no build serves (the "
        f"{MOST_TRACES} used last are kept). If the loss is a tf.function with reduce_retracing=True, or whose "
        "input_signature has None for a length that varies (tf.TensorSpec([None, None], tf.int32)), one build serves "
        "all lengths at which the analysis of the loss gives the same result; otherwise pad batches to a few lengths"
    )
