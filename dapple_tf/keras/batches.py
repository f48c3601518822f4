"""A batch of Keras, (x, y, sample_weight) of any nesting, as the one argument of a pipelined function.

The argument is a dictionary of the tensors by name (``x``, ``x/1``, ``y/scores``, ``sample_weight``). What is None (no
targets, no weights, an optional input) has no entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.errors import BatchError

_PARTS = ("x", "y", "sample_weight")


@dataclass
class BatchNames:
    """Names the tensors of batches, and nests named tensors again as the batch with these names was nested."""

    _nesting: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def name(self, data: Any, *, inputs_only: bool = False) -> dict[str, Any]:
        """Return the tensors of ``data``, a batch as ``fit`` gets it, by name.

        ``inputs_only``: leave targets and weights out. Raises BatchError for a batch without inputs.
        """
        parts = keras.utils.unpack_x_y_sample_weight(data)
        if inputs_only:
            parts = (parts[0], None, None)
        tensors: dict[str, Any] = {}
        names: list[str] = []
        for path, leaf in keras.tree.flatten_with_path(parts):
            name = "/".join([_PARTS[path[0]], *map(str, path[1:])])
            names.append("" if leaf is None or isinstance(leaf, tf.experimental.Optional) else name)
            if names[-1]:
                tensors[name] = leaf
        if not any(name == "x" or name.startswith("x/") for name in tensors):
            raise BatchError("the batch has no inputs: give (x,), (x, y) or (x, y, sample_weight)")
        self._nesting[tuple(sorted(tensors))] = keras.tree.pack_sequence_as(parts, names)
        return tensors

    def nest(self, tensors: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return x, y and sample_weight, nested as in the batch that ``name`` returned ``tensors`` of."""
        nesting = self._nesting[tuple(sorted(tensors))]
        x, y, sample_weight = keras.tree.map_structure(lambda name: tensors[name] if name else None, nesting)
        return x, y, sample_weight
