"""A batch of Keras, (x, y, sample_weight) of any nesting, as the one argument of a pipelined function.

The argument is a dictionary of the tensors by name (``x``, ``x/1``, ``y/scores``, ``sample_weight``). What is None (no
targets, no weights, an optional input) has no entry.
"""

from __future__ import annotations

from collections.abc import Callable
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
        tensors, nesting = _name_leaves(parts, lambda path: [_PARTS[path[0]], *map(str, path[1:])])
        if not any(name == "x" or name.startswith("x/") for name in tensors):
            raise BatchError("the batch has no inputs: give (x,), (x, y) or (x, y, sample_weight)")
        self._nesting[tuple(sorted(tensors))] = nesting
        return tensors

    def nest(self, tensors: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return x, y and sample_weight, nested as in the batch that ``name`` returned ``tensors`` of."""
        x, y, sample_weight = _nest_leaves(tensors, self._nesting[tuple(sorted(tensors))])
        return x, y, sample_weight


@dataclass
class DataNames:
    """Names the tensors of what a ``train_step`` gets, of any nesting, and nests named tensors again."""

    _nesting: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def name(self, data: Any) -> dict[str, Any]:
        """Return the tensors of ``data``, as ``fit`` gets it, by name. Raises BatchError where there are none."""
        tensors, nesting = _name_leaves(data, lambda path: ["data", *map(str, path)])
        if not tensors:
            raise BatchError("the batch has no tensors")
        self._nesting[tuple(sorted(tensors))] = nesting
        return tensors

    def nest(self, tensors: dict[str, Any]) -> Any:
        """Return the data of which ``name`` returned ``tensors``."""
        return _nest_leaves(tensors, self._nesting[tuple(sorted(tensors))])


def _name_leaves(data: Any, name_of: Callable[[tuple[Any, ...]], list[str]]) -> tuple[dict[str, Any], Any]:
    """Return the tensors of ``data`` by name, and its nesting with names in their places; "" where there is None."""
    tensors: dict[str, Any] = {}
    names: list[str] = []
    for path, leaf in keras.tree.flatten_with_path(data):
        name = "/".join(name_of(path))
        names.append("" if leaf is None or isinstance(leaf, tf.experimental.Optional) else name)
        if names[-1]:
            tensors[name] = leaf
    return tensors, keras.tree.pack_sequence_as(data, names)


def _nest_leaves(tensors: dict[str, Any], nesting: Any) -> Any:
    return keras.tree.map_structure(lambda name: tensors[name] if name else None, nesting)
