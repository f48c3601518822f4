"""Which trace serves a batch: traces are kept by the shapes of their batches, up to a limit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dapple_tf.compiler import StagedModel
from dapple_tf.errors import DappleWarning

MOST_TRACES = 16
"""The traces that are kept for one loss: a further one takes the place of the one that ran longest ago."""

_TELLING = 3  # the trace for further lengths of one batch at which a user is told

Key = tuple[str, tuple[tf.TensorSpec, ...]]
"""The nesting of a batch's arguments, and the specs of its flattened tensors (see ``batch_key``)."""


@dataclass
class TracedShapes:
    """The traces of one loss by the batches that they serve, in the order of their last use."""

    _models: dict[Key, StagedModel] = field(default_factory=dict)
    _told: bool = False

    def __len__(self) -> int:
        """Return the number of traces that are kept."""
        return len(self._models)

    def values(self) -> list[StagedModel]:
        """Return the traces that are kept."""
        return list(self._models.values())

    def find(self, key: Key) -> StagedModel | None:
        """Return the trace that serves batches of this key: of their shapes, or with unknown inner lengths."""
        for kept in [key, *self._models]:
            if kept in self._models and _serves(kept, key):
                model = self._models[kept] = self._models.pop(kept)  # the last one is used last
                return model
        return None

    def add(self, key: Key, model: StagedModel) -> StagedModel | None:
        """Keep a new trace, made for a batch of this key, and return one that is dropped for it, or None.

        Warn once where many lengths have been traced.
        """
        self._models[key[0], model.signature] = model
        dropped = self._models.pop(next(iter(self._models))) if len(self._models) > MOST_TRACES else None
        alike = [kept for kept in self._models if _is_alike(kept, key)]
        if len(alike) >= _TELLING and not self._told:
            self._told = True
            warnings.warn(_advice(alike, key), DappleWarning, stacklevel=7)
        return dropped


def _serves(kept: Key, key: Key) -> bool:
    fits = [a.dtype == b.dtype and a.shape.is_compatible_with(b.shape) for a, b in zip(kept[1], key[1], strict=False)]
    return kept[0] == key[0] and len(kept[1]) == len(key[1]) and all(fits)


def _is_alike(kept: Key, key: Key) -> bool:
    """Return whether the batches differ in inner lengths only."""
    return kept[0] == key[0] and _kinds(kept[1]) == _kinds(key[1])


def _kinds(specs: Sequence[tf.TensorSpec]) -> list[Any]:
    return [(spec.dtype, spec.shape.rank) for spec in specs]


def _advice(alike: Sequence[Key], key: Key) -> str:
    return (
        f"the step has been built for {len(alike)} inner shapes of the batch, the last one "
        f"{', '.join(str(spec.shape) for spec in key[1])}, and is built anew for each further one (the last "
        f"{MOST_TRACES} are kept). Where the loss is a tf.function whose input_signature has None for a length that "
        "varies (tf.TensorSpec([None, None], tf.int32)), one step serves all lengths; or pad batches to a few lengths"
    )
