"""The facts that the rules of ops may use: kinds found so far, lengths of axes, small integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dapple_tf.frontend.dependence.kinds import CONSTANT, Kind, coupled
from dapple_tf.frontend.dependence.numbers import Numbers, affine, varies
from dapple_tf.frontend.inference import Shapes
from dapple_tf.graph_passes.analysis.layers import SHAPE_OPS
from dapple_tf.graph_passes.ir.graph import OTHER, Graph, Node, Value, ancestors

MULTIPLES = (1, 2, 3)
"""Small integers are evaluated for these multiples of the batch size at which shapes were inferred."""

Layout = tuple[tuple[int, int] | None, ...]
"""For a vector of sizes, the ``outer`` and ``inner`` of each entry, where it is known."""


@dataclass
class Scope:
    """A graph, or the body of a function, in which kinds are found.

    ``shapes``: of every node's outputs for a batch of ``batch`` samples. ``kinds`` and ``numbers``: of the values found
    so far. ``layouts``: of vectors of sizes. ``sizes``: the operands (node, position) that take a size of the whole
    batch in place of the micro-batch's; ``once_sizes``: sizes that are computed once, on the whole batch;
    ``mean_sizes``: sizes by which a sum is divided, so that it is a mean; ``positional``: what is computed of positions
    of samples; ``sliced``: values that are computed once, on the whole batch, and of which each micro-batch takes its
    rows; ``squeezed``: the axes that a Squeeze without axes removes from the whole batch; ``whole``: sizes that must be
    the whole batch's wherever they are used. ``nested``: this is the body of a function, whose ops cannot be given
    other operands. ``tried``: the values whose kinds were found by experiment; ``reducing``: loops whose bodies
    reduce the batch. ``open_draws``: draws of several numbers a sample whose order is free, and how many these are;
    ``blocks``: those of them that are drawn in blocks of the batch. ``shapes_at``: returns the shapes for another
    number of samples.
    """

    graph: Graph
    shapes: Shapes
    batch: int
    kinds: dict[Value, Kind] = field(default_factory=dict)
    numbers: dict[Value, Numbers] = field(default_factory=dict)
    layouts: dict[Value, Layout] = field(default_factory=dict)
    sizes: dict[tuple[str, int], Value] = field(default_factory=dict)
    mean_sizes: set[Value] = field(default_factory=set)
    once_sizes: set[Value] = field(default_factory=set)
    positional: set[Value] = field(default_factory=set)
    sliced: set[Value] = field(default_factory=set)
    squeezed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    captured_lists: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    whole: frozenset[Value] = frozenset()
    nested: bool = False
    tried: set[Value] = field(default_factory=set)
    reducing: set[str] = field(default_factory=set)
    open_draws: dict[str, int] = field(default_factory=dict)
    blocks: frozenset[str] = frozenset()
    shapes_at: Callable[[int], Shapes] = lambda samples: Shapes()

    def dims(self, value: Value) -> tuple[int | None, ...] | None:
        """Return the lengths of the axes of ``value``, None where one is unknown; None for an unknown rank."""
        inferred = self.shapes.get(value.node, ())
        found = inferred[value.index].dims if value.index < len(inferred) else None
        traced = self.graph.type_of(value).shape.dims
        dims: list[int | None] = list(found if found is not None else traced or ())
        if found is None and traced is None:
            return None
        for axis, dim in enumerate(traced if traced is not None and len(traced) == len(dims) else ()):
            if dims[axis] is None or dims[axis] == OTHER:
                dims[axis] = dim if dim is not None and dim >= 0 else None
        kind = self.kinds.get(value)
        if kind is not None and kind.rows and kind.outer and kind.inner > 0 and not kind.origin:
            dims[kind.axis] = dims[kind.axis] or kind.outer * self.batch * kind.inner
        return tuple(dims)

    def rank(self, value: Value) -> int | None:
        """Return the number of axes of ``value``, or None."""
        dims = self.dims(value)
        return None if dims is None else len(dims)

    def factor(self, value: Value, axis: int) -> int:
        """Return how many entries the axis has for each sample; 0 where its length does not depend on the batch."""
        dims = self.dims(value)
        if dims is None or not -len(dims) <= axis < len(dims):
            return 0
        length, known = dims[axis], self.graph.type_of(value).shape.dims
        if length is None:
            return 0
        if known is not None and (known[axis] or 0) > 0:
            return 0
        return length // self.batch if length % self.batch == 0 else 0

    def batch_axes(self, value: Value) -> list[tuple[int, int]]:
        """Return the axes whose length is a multiple of the batch size, each with the multiple."""
        found = ((axis, self.factor(value, axis)) for axis in range(self.rank(value) or 0))
        return [(axis, factor) for axis, factor in found if factor]

    def repeats(self, value: Value, axis: int) -> bool:
        """Return whether all samples share the entries of ``value``, which is not rows: an axis has one, or is missing.

        ``axis`` is counted from the right: -1 is the last.
        """
        dims = self.dims(value)
        return dims is not None and (len(dims) < -axis or dims[axis] == 1)

    def shape_numbers(self, value: Value) -> Numbers | None:
        """Return the shape of ``value`` as numbers; None where an axis is unknown or not affine in the batch size."""
        dims = self.dims(value)
        found = [] if dims is None else [self._length_numbers(value, axis, dim) for axis, dim in enumerate(dims)]
        known = [numbers for numbers in found if numbers is not None]
        if dims is None or len(known) < len(dims):
            return None
        return tuple(np.array([numbers[i] for numbers in known], np.int64) for i in range(len(MULTIPLES)))

    def _length_numbers(self, value: Value, axis: int, length: int | None) -> tuple[int, ...] | None:
        """Return the length of an axis at the multiples of the batch size."""
        kind, traced = self.kinds.get(value, CONSTANT), self.graph.type_of(value).shape.dims
        if length is None:
            return None
        if kind.rows or (traced is not None and (traced[axis] or 0) > 0):
            return tuple(length * multiple if self.factor(value, axis) else length for multiple in MULTIPLES)
        twice = self._length_at(2 * self.batch, value, axis)
        if twice is None or (twice - length) % self.batch:
            return None
        scale = (twice - length) // self.batch
        offset = length - scale * self.batch
        # A length that ends at a limit, such as that of shared rows without the last n, is affine on one side of it.
        if scale + offset < 0 or (self.shapes_at(1) and self._length_at(1, value, axis) != scale + offset):
            return None
        return tuple(scale * multiple * self.batch + offset for multiple in MULTIPLES)

    def _length_at(self, samples: int, value: Value, axis: int) -> int | None:
        """Return the length of an axis for another number of samples, None where it is not known."""
        shapes = self.shapes_at(samples).get(value.node, ())
        dims = (shapes[value.index].dims if value.index < len(shapes) else None) or ()
        return dims[axis] if axis < len(dims) else None

    def has_a_row_a_sample(self, value: Value) -> bool:
        """Return whether axis 0 of ``value``, whatever its kind is, has as many entries as there are samples."""
        dims = self.dims(value)
        numbers = self._length_numbers(value, 0, dims[0]) if dims and dims[0] == self.batch else None
        return numbers == tuple(self.batch * multiple for multiple in MULTIPLES)

    def knows_shapes(self, value: Value) -> bool:
        """Return whether ``value`` depends on shapes of activations only where these are affine in the batch size."""
        shape_nodes = (n for n in map(self.graph.node, ancestors(self.graph, [value.node])) if n.op in SHAPE_OPS)
        of_activations = (n for n in shape_nodes if any(self.kinds[operand].trained for operand in n.inputs))
        return all(self.affine(shape) is not None for node in of_activations for shape in node.values())

    def fixed(self, value: Value) -> bool:
        """Return whether the shape of ``value`` is known and does not depend on the batch."""
        numbers = self.shape_numbers(value)
        return numbers is not None and not varies(numbers)

    def number(self, value: Value) -> Any | None:
        """Return the NumPy value of small integers, or None where they are unknown or depend on the batch size."""
        found = self.numbers.get(value)
        return None if found is None or varies(found) else found[0]

    def affine(self, value: Value) -> tuple[Any, Any] | None:
        """Return (c, d) of small integers that are c x batch size + d, else None; see ``numbers.affine``."""
        found = self.numbers.get(value)
        return None if found is None else affine(found, self.batch)

    def lengths(self, value: Value) -> tuple[Any, Any] | None:
        """Return the NumPy value of small integers at the first batch size, and which of them depend on it.

        None where one is unknown, or depends on the batch size but is no multiple of it.
        """
        coefficients = self.affine(value)
        if coefficients is None or np.any((coefficients[0] != 0) & (coefficients[1] != 0)):
            return None
        return self.numbers[value][0], coefficients[0] != 0

    def axes(self, value: Value, rank: int | None) -> list[int] | None:
        """Return the axes that an operand names, as non-negative ints, or None where they or the rank are unknown."""
        found = None if rank is None else self.number(value)
        return None if found is None else [int(axis) % rank if rank else 0 for axis in found.reshape(-1)]

    def couple(self, node: Node, why: str) -> Kind:
        """Return the kind of a tensor whose samples ``node`` combines."""
        return coupled(node.name, why)
