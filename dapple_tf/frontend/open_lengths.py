"""Find the inner lengths that a trace leaves unknown, as TensorFlow leaves them for a tf.function, and serve them.

TensorFlow does so where an ``input_signature`` says None and, with ``reduce_retracing=True``, from the second length
on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.dependence.kinds import Kind
from dapple_tf.frontend.dependence.result import BatchDependence, LengthTerm, WholeSize
from dapple_tf.graph_passes.ir.graph import ancestors


def open_signature(
    function: Any, specs: Sequence[tf.TensorSpec], earlier: Sequence[Sequence[tf.TensorSpec]] = ()
) -> tuple[tf.TensorSpec, ...]:
    """Return the specs of a batch's tensors, with None for each inner length that the trace leaves unknown.

    ``earlier``: the specs for which the function was traced before, of the same types and ranks: with
    ``reduce_retracing=True`` a length that differs from an earlier one is unknown. An ``input_signature`` that gives no
    rank, or does not fit, is ignored; tracing reports a misfit.
    """
    declared = tf.nest.flatten(internals.input_signature(function)) if internals.is_tf_function(function) else []
    opened = list(map(_open, specs, declared)) if len(declared) == len(specs) else list(specs)
    if not internals.reduces_retracing(function) or internals.is_compiled_by_xla(function):
        return tuple(opened)  # XLA compiles the function for each length anyway
    for other in earlier:
        for i, (spec, before) in enumerate(zip(opened, other, strict=True)):
            lengths = zip(spec.shape, before.shape, strict=True)
            opened[i] = tf.TensorSpec([now if now == then else None for now, then in lengths], spec.dtype)
    return tuple(opened)


def with_unknown(specs: Sequence[tf.TensorSpec], unknown: Collection[tuple[int, int]]) -> tuple[tf.TensorSpec, ...]:
    """Return the specs with None for the ``unknown`` lengths: number of the tensor, and axis."""
    found = []
    for i, spec in enumerate(specs):
        dims = [None if (i, axis) in unknown else dim for axis, dim in enumerate(spec.shape)]
        found.append(tf.TensorSpec(dims, spec.dtype))
    return tuple(found)


def has_open_lengths(signature: Sequence[tf.TensorSpec]) -> bool:
    """Return whether some inner length is unknown."""
    return any(None in spec.shape[1:].as_list() for spec in signature)


def _open(spec: tf.TensorSpec, declared: Any) -> tf.TensorSpec:
    fits = isinstance(declared, tf.TensorSpec) and declared.shape.is_compatible_with(spec.shape)
    return tf.TensorSpec(declared.shape, spec.dtype) if fits and declared.shape.rank is not None else spec


# --- Express the sizes that a loss computes with as functions of the inner lengths that its trace leaves unknown
# The analysis finds sizes of the whole batch at the lengths of one batch. It is made again with each unknown length a
# little longer, and each size is taken to be affine in the lengths. That is checked at each length (``ServedLengths``).


Analyse = Callable[[Captured], BatchDependence]
"""The analysis of a loss, at the lengths of ``Captured.example``."""

_ArgumentAxis = tuple[int, int]
"""The number of an argument, and an axis of it."""


def fit_sizes(
    captured: Captured, found: BatchDependence, analyse: Analyse, accepts: Callable[[Captured], bool]
) -> BatchDependence:
    """Return ``found``, the analysis at the lengths of the example, with sizes that are functions of unknown lengths.

    ``accepts``: whether the loss can run at the lengths of the example.
    """
    graph = captured.graph
    probes = [_probe(captured, axes, analyse) for axes in _find_independent(captured, accepts)]

    def source(size: WholeSize) -> str:
        return size.node if size.operand is None else graph.node(size.node).inputs[size.operand].node

    return dataclasses.replace(
        found,
        sizes=tuple(_fit(each, ancestors(graph, [source(each)]), probes, "sizes") for each in found.sizes),
        shapes=tuple(_fit(each, ancestors(graph, [each.node]), probes, "shapes") for each in found.shapes),
    )


def _evaluate_sizes(captured: Captured) -> BatchDependence:
    """Return the decisions about ``captured`` with the sizes for the lengths of its example."""
    lengths = {name: spec.shape for name, spec in zip(captured.graph.inputs, captured.example, strict=True)}

    def evaluate(size: WholeSize) -> WholeSize:
        scale, offset = size.scale, size.offset
        for term in size.lengths:
            length = lengths[term.argument][term.axis]
            scale, offset = scale + term.scale * length, offset + term.offset * length
        return dataclasses.replace(size, scale=scale, offset=offset, lengths=())

    sizes, shapes = (tuple(map(evaluate, found)) for found in (captured.decisions.sizes, captured.decisions.shapes))
    return dataclasses.replace(captured.decisions, sizes=sizes, shapes=shapes)


def _find_independent(captured: Captured, accepts: Callable[[Captured], bool]) -> list[list[_ArgumentAxis]]:
    """Return the axes of unknown length in groups that can be made longer independently of each other.

    Axes that the loss does not accept to be longer alone are grouped by their length in the example.
    """
    found, equal = [], dict[int, list[_ArgumentAxis]]()
    for i, (example, spec) in enumerate(zip(captured.example, captured.signature, strict=True)):
        for axis in range(1, spec.shape.rank):
            if spec.shape[axis] is None and accepts(_make_longer(captured, [(i, axis)])):
                found.append([(i, axis)])
            elif spec.shape[axis] is None:
                equal.setdefault(example.shape[axis], []).append((i, axis))
    return [*found, *equal.values()]


def _make_longer(captured: Captured, axes: Sequence[_ArgumentAxis]) -> Captured:
    """Return ``captured`` with a longer example on these axes, which have equal lengths."""
    values = [value for node in captured.graph.nodes for value in node.outputs]
    taken = {dim for value in values for dim in value.shape.dims or ()}  # it must not be mistaken for a width
    taken |= {dim for spec in captured.example for dim in spec.shape}
    shapes = [spec.shape.as_list() for spec in captured.example]
    (first, own), *_ = axes
    longer = next(other for other in itertools.count(shapes[first][own] + 1) if other not in taken)
    for i, axis in axes:
        shapes[i][axis] = longer
    example = [tf.TensorSpec(shape, spec.dtype) for shape, spec in zip(shapes, captured.example, strict=True)]
    return dataclasses.replace(captured, example=tuple(example))


@dataclass(frozen=True)
class _Probe:
    """The analysis ``found`` where ``length``, on axes of input nodes (``places``), was replaced by ``longer``."""

    places: tuple[tuple[str, int], ...]
    length: int
    longer: int
    found: BatchDependence


def _probe(captured: Captured, axes: Sequence[_ArgumentAxis], analyse: Analyse) -> _Probe:
    other = _make_longer(captured, axes)
    (first, axis), *_ = axes
    length, longer = (each.example[first].shape[axis] for each in (captured, other))
    return _Probe(tuple((captured.graph.inputs[i], axis) for i, axis in axes), length, longer, analyse(other))


def _fit(size: WholeSize, sources: Collection[str], probes: Iterable[_Probe], kind: str) -> WholeSize:
    """Return ``size``, which is for the lengths of the example, with a term for each length on which it depends.

    ``kind``: the field of ``BatchDependence`` that has it. A length is taken from one of the ``sources``, from which
    the trace computes the size, where one has it: the stage needs these anyway. Returned unchanged where it does not
    grow by a whole number for each unit of a length.
    """
    terms = []
    for probe in probes:
        others = (o for o in getattr(probe.found, kind) if (o.node, o.operand) == (size.node, size.operand))
        other = next(others, size)
        scale = _growth(size.scale, other.scale, probe.longer - probe.length)
        offset = _growth(size.offset, other.offset, probe.longer - probe.length)
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


def _growth(one: Any, other: Any, units: int) -> Any | None:
    """Return the growth for each unit, a NumPy array; None where it is no whole number, or the shapes differ."""
    if np.shape(one) != np.shape(other) or ((other - one) % units).any():
        return None
    return (other - one) // units


# --- Decide for which inner lengths a trace with unknown inner lengths may be used again
# The analysis of a loss is made at the lengths of one batch, and the loss is rewritten as it decides. Before the
# rewritten loss runs a batch of other lengths, the analysis is made at these too: where it decides the same, the result
# is that of one device. The sizes of the whole batch that the loss computes with may differ from length to length (see
# ``fit_sizes``).


@dataclass(frozen=True, eq=False)
class ServedLengths:
    """The inner lengths for which a trace may be used.

    ``analysed``: the captured loss, and the weighted loss where its terms had to be weighted (see ``weigh_terms``). In
    their decisions sizes are functions of the unknown lengths.
    ``known``: answers that were given, by the specs of a batch.
    """

    analysed: tuple[Captured, ...]
    analyse: Analyse
    known: dict[tuple[tf.TensorSpec, ...], bool] = field(default_factory=dict)

    def serves(self, specs: tuple[tf.TensorSpec, ...]) -> bool:
        """Return whether the loss may run batches of these specs, which the trace accepts (axis 0 unknown)."""
        if specs not in self.known:
            there = [dataclasses.replace(one, example=specs) for one in self.analysed]
            self.known[specs] = all(_same_decisions(_evaluate_sizes(one), self.analyse(one)) for one in there)
        return self.known[specs]


def _same_decisions(expected: BatchDependence, found: BatchDependence) -> bool:
    """Return whether all decisions are equal, and all kinds but for their lengths (``outer``, ``inner``, ``slope``)."""
    kinds = {value: _without_lengths(kind) for value, kind in expected.kinds.items()}
    names = [item.name for item in dataclasses.fields(BatchDependence) if item.name != "kinds"]
    return kinds == {value: _without_lengths(kind) for value, kind in found.kinds.items()} and all(
        _same(getattr(expected, name), getattr(found, name)) for name in names
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
