"""Decide which inner lengths a trace serves that leaves them unknown.

The analysis of a loss is made at the lengths of one batch, and the loss is rewritten as it decides. Before the
rewritten loss runs a batch of other lengths, the analysis is made at these too: where it decides the same, the result
is that of one device. The sizes of the whole batch that the loss computes with may differ from length to length; the
rewritten loss computes them from the lengths of the arguments.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.dependence.kinds import Kind
from dapple_tf.frontend.dependence.result import BatchDependence, LengthTerm, WholeSize
from graph_passes.ir.graph import ancestors

Find = Callable[[Captured], BatchDependence]
"""The analysis, at the lengths of ``Captured.example``."""

_Place = tuple[int, int]
"""The number of an argument, and an axis of it."""


@dataclass(frozen=True)
class Analysed:
    """A captured loss as it was analysed, and the decisions, whose sizes depend on unknown lengths."""

    captured: Captured
    dependence: BatchDependence


@dataclass(frozen=True, eq=False)
class ServedLengths:
    """The inner lengths that a trace serves.

    ``analysed``: each form of the loss in turn that ``find`` analysed. What was found out is kept in ``known``, by the
    specs of a batch.
    """

    analysed: tuple[Analysed, ...]
    find: Find
    known: dict[tuple[tf.TensorSpec, ...], bool] = field(default_factory=dict)

    def serves(self, specs: tuple[tf.TensorSpec, ...]) -> bool:
        """Return whether the loss may run batches of these specs, which the trace accepts (axis 0 unknown)."""
        if specs not in self.known:
            self.known[specs] = all(self._decides_the_same(one, specs) for one in self.analysed)
        return self.known[specs]

    def _decides_the_same(self, one: Analysed, specs: tuple[tf.TensorSpec, ...]) -> bool:
        captured = dataclasses.replace(one.captured, example=specs)
        return _same_decisions(at_lengths(one.dependence, captured), self.find(captured))


def with_lengths(
    captured: Captured, found: BatchDependence, find: Find, accepts: Callable[[Captured], bool]
) -> BatchDependence:
    """Return ``found``, the analysis at the lengths of the example, with sizes that depend on the unknown lengths.

    ``accepts``: whether the loss can run at the lengths of the example. Sizes are taken to be affine in the lengths; at
    lengths where they are not, ``ServedLengths.serves`` refuses.
    """
    probes = [_probe(captured, places, find) for places in _find_independent(captured, accepts)]
    graph = captured.graph

    def computing(size: WholeSize) -> str:
        return size.node if size.operand is None else graph.node(size.node).inputs[size.operand].node

    return dataclasses.replace(
        found,
        sizes=tuple(_add_terms(size, ancestors(graph, [computing(size)]), probes) for size in found.sizes),
        shapes=tuple(_add_terms(size, ancestors(graph, [size.node]), probes) for size in found.shapes),
    )


def at_lengths(dependence: BatchDependence, captured: Captured) -> BatchDependence:
    """Return the decisions with the sizes for the lengths of the example of ``captured``."""
    lengths = {name: spec.shape for name, spec in zip(captured.graph.inputs, captured.example, strict=True)}

    def evaluate(size: WholeSize) -> WholeSize:
        scale, offset = size.scale, size.offset
        for term in size.lengths:
            length = lengths[term.argument][term.axis]
            scale, offset = scale + term.scale * length, offset + term.offset * length
        return dataclasses.replace(size, scale=scale, offset=offset, lengths=())

    sizes, shapes = (tuple(map(evaluate, found)) for found in (dependence.sizes, dependence.shapes))
    return dataclasses.replace(dependence, sizes=sizes, shapes=shapes)


def _find_independent(captured: Captured, accepts: Callable[[Captured], bool]) -> list[list[_Place]]:
    """Return the unknown lengths that can vary independently of each other, each by the places that have it.

    Lengths that are equal in the example, and which the loss does not accept to differ, are one.
    """
    found, equal = [], dict[int, list[_Place]]()
    for i, (example, spec) in enumerate(zip(captured.example, captured.signature, strict=True)):
        for axis in range(1, spec.shape.rank):
            if spec.shape[axis] is None and accepts(_longer(captured, [(i, axis)])):
                found.append([(i, axis)])
            elif spec.shape[axis] is None:
                equal.setdefault(example.shape[axis], []).append((i, axis))
    return [*found, *equal.values()]


def _longer(captured: Captured, places: Sequence[_Place]) -> Captured:
    """Return ``captured`` with a longer length in the example at these places, which have the same."""
    values = [value for node in captured.graph.nodes for value in node.outputs]
    taken = {dim for value in values for dim in value.shape.dims or ()}  # it must not be mistaken for a width
    taken |= {dim for spec in captured.example for dim in spec.shape}
    shapes = [spec.shape.as_list() for spec in captured.example]
    (first, own), *_ = places
    longer = next(other for other in itertools.count(shapes[first][own] + 1) if other not in taken)
    for i, axis in places:
        shapes[i][axis] = longer
    example = [tf.TensorSpec(shape, spec.dtype) for shape, spec in zip(shapes, captured.example, strict=True)]
    return dataclasses.replace(captured, example=tuple(example))


@dataclass(frozen=True)
class _Probe:
    """The sizes by node and operand where a ``length`` is ``longer``, which some input nodes have on an axis."""

    places: tuple[tuple[str, int], ...]
    length: int
    longer: int
    sizes: Mapping[tuple[str, int | None], WholeSize]


def _probe(captured: Captured, places: Sequence[_Place], find: Find) -> _Probe:
    """Analyse the loss with a longer length at these places, which have the same."""
    other = _longer(captured, places)
    found = find(other)
    sizes = {(size.node, size.operand): size for size in (*found.sizes, *found.shapes)}
    (first, axis), *_ = places
    length, longer = (each.example[first].shape[axis] for each in (captured, other))
    return _Probe(tuple((captured.graph.inputs[i], axis) for i, axis in places), length, longer, sizes)


def _add_terms(size: WholeSize, sources: Collection[str], probes: Sequence[_Probe]) -> WholeSize:
    """Return ``size``, which is for the lengths of the example, with a term for each length on which it depends.

    The length is taken from one of the ``sources``, from which the trace computes the size, where one has it: the
    stage needs these anyway.
    """
    terms = []
    for probe in probes:
        other = probe.sizes.get((size.node, size.operand), size)
        scale = _slope(size.scale, other.scale, probe.longer - probe.length)
        offset = _slope(size.offset, other.offset, probe.longer - probe.length)
        if scale is None or offset is None:
            return size
        if scale.any() or offset.any():
            place = next((place for place in probe.places if place[0] in sources), probe.places[0])
            terms.append((probe.length, LengthTerm(*place, scale, offset)))
    return dataclasses.replace(
        size,
        scale=size.scale - sum(term.scale * length for length, term in terms),
        offset=size.offset - sum(term.offset * length for length, term in terms),
        lengths=tuple(term for _, term in terms),
    )


def _slope(one: Any, other: Any, distance: int) -> Any | None:
    """Return the growth of a size with a length, a NumPy array; None where it is no whole number."""
    if np.shape(one) != np.shape(other) or ((other - one) % distance).any():
        return None
    return (other - one) // distance


def _same_decisions(one: BatchDependence, other: BatchDependence) -> bool:
    """Return whether both decide the same for the same reasons: values are of the same kinds, but for their lengths."""
    kinds = {value: _without_lengths(kind) for value, kind in one.kinds.items()}
    names = [item.name for item in dataclasses.fields(BatchDependence) if item.name != "kinds"]
    return kinds == {value: _without_lengths(kind) for value, kind in other.kinds.items()} and all(
        _same(getattr(one, name), getattr(other, name)) for name in names
    )


def _without_lengths(kind: Kind) -> Kind:
    element = None if kind.element is None else _without_lengths(kind.element)
    return dataclasses.replace(kind, outer=0, inner=0, slope=(), element=element)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        names = [item.name for item in dataclasses.fields(one)]
        return all(_same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)
