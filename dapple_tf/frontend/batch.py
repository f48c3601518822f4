"""The arguments of a loss: tensors with the samples of a batch on axis 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dapple_tf.errors import BatchError


def as_arguments(batch: Any) -> tuple[Any, ...]:
    """Return the arguments of a loss as a tuple: ``batch`` itself, or a tuple of it where it is a single argument."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def batch_size(batch: Sequence[Any]) -> int:
    """Return the number of samples of a batch: the length of axis 0 of its first tensor.

    Raises BatchError for a batch without tensors, without samples, or of unknown size.
    """
    leaves = tf.nest.flatten(tuple(batch))
    if not leaves:
        raise BatchError("the batch has no tensors: give the tuple of the loss's arguments")
    first = leaves[0]
    shape = first.shape if hasattr(first, "shape") else tf.convert_to_tensor(first).shape
    if len(shape) == 0 or shape[0] is None:
        raise BatchError(f"the batch's first tensor has shape {shape}: axis 0 must be the number of samples")
    if shape[0] == 0:
        raise BatchError("the batch is empty")
    return int(shape[0])


def batch_key(batch: Sequence[Any]) -> tuple[str, tuple[tf.TensorSpec, ...]]:
    """Return a key that is equal for batches which can share a trace: the arguments' nesting and tensor specs.

    Raises BatchError as ``batch_signature`` does.
    """
    return repr(tf.nest.map_structure(lambda leaf: None, tuple(batch))), batch_signature(batch)


def batch_signature(batch: Sequence[Any]) -> tuple[tf.TensorSpec, ...]:
    """Return the specs of a batch's flattened tensors, with axis 0 unknown.

    Raises BatchError for arguments that are not tensors, have no axis 0, or are not batched alike.
    """
    if not batch:
        raise BatchError("the step takes at least one argument, batched on axis 0")
    specs: list[tf.TensorSpec] = []
    sizes: dict[str, int] = {}
    for path, leaf in _leaves(batch):
        value = _tensor(path, leaf)
        shape = tuple(value.shape)
        if not shape:
            raise BatchError(
                f"argument {path} is a scalar; every argument must be batched on axis 0 (close over what is not)"
            )
        sizes[path] = shape[0]
        specs.append(tf.TensorSpec((None, *shape[1:]), tf.as_dtype(value.dtype)))
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"argument {path}: {size}" for path, size in sizes.items())
        raise BatchError(f"the arguments are not batched alike on axis 0: {listed}")
    return tuple(specs)


def _tensor(path: str, leaf: Any) -> Any:
    """Return the leaf, converted to a tensor where it has no shape or dtype."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        return leaf
    try:
        return tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        raise BatchError(
            f"argument {path} is a {type(leaf).__name__}; every argument must be an array or a dense tensor, batched "
            "on axis 0 (close over what is not)"
        ) from error


def _leaves(batch: Sequence[Any]) -> list[tuple[str, Any]]:
    return [
        (f"{i}" if leaf is argument else f"{i}[{j}]", leaf)
        for i, argument in enumerate(batch)
        for j, leaf in enumerate(tf.nest.flatten(argument))
    ]
