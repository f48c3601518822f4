"""The arguments of a loss: tensors with the samples of a batch on axis 0."""

from __future__ import annotations

import inspect
import itertools
import pprint
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import BatchError


@dataclass(frozen=True)
class Nesting:
    """The nesting of a batch's arguments: ``text`` has their Python values, and a dot in place of each tensor.

    The text names objects by their addresses. So ``structure`` holds them: no other object gets the address of one.
    """

    text: str
    structure: Any = field(compare=False, repr=False)

    @staticmethod
    def of(arguments: Any) -> Nesting:
        """Return the nesting of one or several arguments."""
        structure = tf.nest.map_structure(lambda _: ..., arguments)
        return Nesting(repr(structure).replace("Ellipsis", "."), structure)


Key = tuple[Nesting, tuple[tf.TensorSpec, ...]]
"""The nesting of a batch's arguments, and the specs of its flattened tensors."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of ``size`` samples, with what is derived from it once a step.

    ``arguments``: of the loss. ``tensors``: the flattened arguments. ``key``: equal for batches that can share a trace,
    with axis 0 unknown.
    """

    arguments: tuple[Any, ...]
    tensors: tuple[Any, ...]
    size: int
    key: Key

    @staticmethod
    def of(arguments: Sequence[Any]) -> Batch:
        """Return the batch of these arguments, without ragged or sparse tensors (see ``composite.as_rows``).

        Raises BatchError for arguments that are not tensors, have no axis 0, are not batched alike, or are empty.
        """
        arguments = tuple(arguments)
        signature = batch_signature(arguments)
        key = Nesting.of(arguments), signature
        return Batch(arguments, tuple(tf.nest.flatten(arguments)), batch_size(arguments), key)

    @property
    def sized_key(self) -> Key:
        """The key with the batch size in the specs."""
        nesting, specs = self.key
        return nesting, tuple(tf.TensorSpec((self.size, *spec.shape[1:]), spec.dtype) for spec in specs)


@dataclass(frozen=True)
class BatchForm:
    """The arguments of a loss, with a tf.TensorSpec (axis 0 unknown) in place of each tensor."""

    arguments: tuple[Any, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the flattened arguments: "0", or "0[1]" in a nested one."""
        return argument_paths(self.arguments)

    @property
    def signature(self) -> tuple[tf.TensorSpec, ...]:
        """The specs of the flattened arguments."""
        return tuple(tf.nest.flatten(self.arguments))

    def flatten(self, batch: Sequence[Any], needed: Sequence[bool]) -> list[Any]:
        """Return the flattened tensors of a batch that are ``needed`` (one flag for each); None for the others.

        None, also in place of a whole argument, is returned as it is. Raises BatchError where the batch has another
        number of arguments, an argument without tensors is another Python value, or a needed tensor is nested otherwise
        or has another dtype or inner shape.
        """
        if len(batch) != len(self.arguments):
            raise BatchError(f"{len(batch)} arguments were given, and the loss takes {len(self.arguments)}")
        flags, leaves = iter(needed), []
        for i, (given, specs) in enumerate(zip(batch, self.arguments, strict=True)):
            wanted = list(itertools.islice(flags, len(tf.nest.flatten(specs))))
            if not wanted and _in_key_order(given) != _in_key_order(specs):
                raise BatchError(f"argument {i} is {given!r}, but the step was built last for {specs!r}")
            there = _flatten_argument(i, given, specs) if given is not None and any(wanted) else [None] * len(wanted)
            leaves += [leaf if flag else None for leaf, flag in zip(there, wanted, strict=True)]
        named = zip(self.paths, leaves, self.signature, strict=True)
        return [None if leaf is None else _fitting_tensor(path, leaf, spec) for path, leaf, spec in named]


def _flatten_argument(number: int, given: Any, specs: Any) -> list[Any]:
    found, wanted = Nesting.of(given), Nesting.of(specs)
    try:
        tf.nest.assert_same_structure(given, specs)
        fits = _in_key_order(found.structure) == _in_key_order(wanted.structure)  # Python values fit, too
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise BatchError(f"argument {number} is nested as {found.text}, but the step was built last for {wanted.text}")
    return list(tf.nest.flatten(given))


def _in_key_order(structure: Any) -> str:
    """Return the text of a nested structure, with the items of dictionaries in the order of their keys."""
    return pprint.pformat(structure, width=sys.maxsize)


def _fitting_tensor(path: str, leaf: Any, spec: tf.TensorSpec) -> Any:
    value = _tensor(path, leaf)
    if tf.as_dtype(value.dtype) != spec.dtype or not spec.shape.is_compatible_with(value.shape):
        raise BatchError(
            f"argument {path} has dtype {tf.as_dtype(value.dtype).name} and shape {tuple(value.shape)}, but the step "
            f"was built last for {spec.dtype.name} and {tuple(spec.shape)}: build it from a whole batch of these types"
        )
    return tf.convert_to_tensor(value)


def batch_form(batch: Sequence[Any], signature: Sequence[tf.TensorSpec]) -> BatchForm:
    """Return the form of batches like ``batch``, whose flattened tensors have these specs."""
    return BatchForm(tf.nest.pack_sequence_as(tuple(batch), list(signature)))


def as_arguments(batch: Any) -> tuple[Any, ...]:
    """Return the arguments of a loss as a tuple: ``batch`` itself, or a tuple of it where it is a single argument."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def in_order(function: Callable[..., Any], batch: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call in the order of the function's parameters; ``named``: those given by name.

    Raises BatchError for arguments that the function does not take, or takes by name only.
    """
    if not named:
        return tuple(batch)
    try:
        bound = inspect.signature(internals.python_function_of(function)).bind(*batch, **named)
    except TypeError as error:
        raise BatchError(f"the step cannot be called with these arguments: {error}") from None
    bound.apply_defaults()
    if given := bound.kwargs.keys() & named:
        names = ", ".join(sorted(given))
        raise BatchError(f"the function takes {names} by name only: let it take these by their position, too")
    return bound.args


def argument_paths(arguments: Sequence[Any]) -> tuple[str, ...]:
    """Return the paths of the flattened arguments: "0", or "0[1]" in a nested one."""
    return tuple(path for path, _ in _leaves(arguments))


def batch_size(batch: Sequence[Any]) -> int:
    """Return the number of samples of a batch: the length of axis 0 of its first tensor.

    Raises BatchError for a batch without tensors, without samples, or of unknown size.
    """
    leaves = tf.nest.flatten(tuple(batch))
    if not leaves:
        raise BatchError("the batch has no tensors: at least one argument must be an array or tensor of the samples")
    first = leaves[0]
    shape = first.shape if hasattr(first, "shape") else tf.convert_to_tensor(first).shape
    if len(shape) == 0 or shape[0] is None:
        raise BatchError(f"the batch's first tensor has shape {shape}: axis 0 must be the number of samples")
    if shape[0] == 0:
        raise BatchError("the batch is empty")
    return int(shape[0])


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
                f"argument {path} is a scalar; every argument must be batched on axis 0 (let the function take other "
                "values from outside)"
            )
        sizes[path] = shape[0]
        specs.append(tf.TensorSpec((None, *shape[1:]), tf.as_dtype(value.dtype)))
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"argument {path}: {size}" for path, size in sizes.items())
        raise BatchError(f"the arguments are not batched alike on axis 0: {listed}")
    return tuple(specs)


def _tensor(path: str, leaf: Any) -> Any:
    """Return the leaf, converted to a tensor where it has no shape or dtype."""
    if isinstance(leaf, tf.IndexedSlices):
        raise BatchError(
            f"argument {path} is a tf.IndexedSlices, which is not cut by rows: give tf.convert_to_tensor of it"
        )
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return leaf
    try:
        return tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        raise BatchError(
            f"argument {path} is a {type(leaf).__name__}; every argument must be an array or a dense tensor, batched "
            "on axis 0 (let the function take other values from outside)"
        ) from error


def _leaves(batch: Sequence[Any]) -> list[tuple[str, Any]]:
    return [
        (f"{i}" if leaf is argument else f"{i}[{j}]", leaf)
        for i, argument in enumerate(batch)
        for j, leaf in enumerate(tf.nest.flatten(argument))
    ]
