"""Find the part of a graph that an experiment can run by itself, and the values and sizes that it must try."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2

from dapple_tf import internals
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.dependence.elementwise import ELEMENTWISE
from dapple_tf.frontend.dependence.experiment import Limits
from dapple_tf.frontend.dependence.kinds import CONSTANT, Form
from dapple_tf.frontend.dependence.numbers import Numbers, constant_value, varies
from dapple_tf.frontend.dependence.positions import Flow, PositionUses, constant_flow, rounds
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.frontend.names import name_set
from dapple_tf.frontend.write_graph import needed_library, write_graph
from dapple_tf.graph_passes.analysis.layers import CAPTURED_INPUTS
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value, search_back

LOOPING = internals.CALL_OPS | internals.LOOP_OPS
_MOST_NODES = 250
# Python code has effects of its own. The kernels of the others do not raise an error, but end the process: FFTs with a
# tensor that has no entries, searches and LSTM cells with operands of different numbers of rows.
_NEVER_RUN = name_set(
    "PyFunc PyFuncStateless EagerPyFunc LowerBound UpperBound LSTMBlockCell LSTMBlockCellGrad "
    "FFT FFT2D FFT3D FFTND IFFT IFFT2D IFFT3D IFFTND RFFT RFFT2D RFFT3D RFFTND IRFFT "
    "IRFFT2D IRFFT3D IRFFTND"
)
_PICKING = frozenset({"StridedSlice", "Slice", "Gather", "GatherV2", "GatherNd", "Split", "SplitV"})
_NO_LIMIT = 2**31 - 1  # the end of a slice that has none
_MOST_SAMPLES = 20000
_USUAL = 2.0  # draws of the usual styles reach this magnitude
_MOST_HELD, _MOST_SCALES = 4096, 8


@dataclass(frozen=True)
class Region:
    """The nodes that compute a tensor from ``leaves`` and from ``once``, values that are computed once a step.

    ``before``: the nodes that compute the latter from ``leaves``. ``resources``: lookup tables and variables that are
    read. ``constants``: NumPy values of the constants in the functions that the nodes call. ``key``: equal for regions
    that compute the same from operands of equal kinds.
    """

    nodes: tuple[Node, ...]
    leaves: tuple[Value, ...]
    before: tuple[Node, ...]
    once: tuple[Value, ...]
    resources: tuple[str, ...]
    constants: tuple[Any, ...]
    key: Any

    @property
    def loops(self) -> bool:
        """Whether a node may hold a loop."""
        return any(node.op in LOOPING for node in (*self.nodes, *self.before))


def find_region(scope: Scope, node: Node, captured: Captured) -> Region | None:
    """Return the nodes from tensors of known kinds up to ``node``; None where an experiment cannot run them."""
    search = _Search(scope, captured)
    names = search.ancestors([node], ends_at_once=True)
    once = tuple(search.once)
    before = search.ancestors([scope.graph.node(value.node) for value in once], ends_at_once=False)
    if names is None or before is None:
        return None
    called = needed_library(Graph("region", tuple(map(scope.graph.node, names | before))), dict(scope.graph.library))
    inside = [each for _, body in called for each in function_pb2.FunctionDef.FromString(body).node_def]
    ragged = any(each.op.startswith("Ragged") for each in inside) and len(search.leaves) > 1
    if (
        ragged
        or any(each.op in _NEVER_RUN for each in inside)
        or not _fit_together(scope, names | before, search.leaves)
    ):
        return None
    ordered = [tuple(each for each in scope.graph.nodes if each.name in found) for found in (names, before)]
    return Region(
        ordered[0],
        tuple(search.leaves),
        ordered[1],
        once,
        tuple(search.resources),
        tuple(tf.make_ndarray(each.attr["value"].tensor) for each in inside if each.op == "Const"),
        _key(scope, [*ordered[0], *ordered[1]], [*search.leaves, *once], search.resources),
    )


def _fit_together(scope: Scope, names: Set[str], leaves: Sequence[Value]) -> bool:
    """Return whether the parts of each ragged tensor fit together where the leaves are drawn one by one.

    Kernels of ragged tensors trust their row lengths, and read past the end of the values where these are fewer: both
    must come from the same leaves.
    """

    def sources(value: Value) -> set[Value]:
        _, ended = search_back(scope.graph, [value], lambda value: value in leaves or value.node not in names)
        return ended.intersection(leaves)

    for name in names:
        if scope.graph.node(name).op.startswith("Ragged"):
            sizes = sorted(filter(None, map(sources, scope.graph.node(name).inputs)), key=len)
            if not all(one <= other for one, other in itertools.pairwise(sizes)):
                return False
    return True


@dataclass
class _Search:
    """Searches a graph backwards from nodes up to tensors of known kinds, and notes where it ended."""

    scope: Scope
    captured: Captured
    leaves: list[Value] = field(default_factory=list)
    once: list[Value] = field(default_factory=list)
    resources: list[str] = field(default_factory=list)

    def ancestors(self, nodes: Sequence[Node], *, ends_at_once: bool) -> set[str] | None:
        """Return the names of ``nodes`` and those before them; None where one has an effect, or is an input.

        ``ends_at_once``: the search ends at values that are computed once a step, too.
        """
        names, pending = {node.name for node in nodes}, list(nodes)
        while pending:
            inside = pending.pop()
            if inside.effect not in (Effect.PURE, Effect.READ) or inside.op in _NEVER_RUN or len(names) > _MOST_NODES:
                return None
            for value in inside.inputs:
                source = self.scope.graph.by_name.get(value.node)
                if source is None or value.node in names or self._ends(source, value, ends_at_once):
                    continue
                if source.op in CAPTURED_INPUTS:
                    return None
                names.add(source.name)
                pending.append(source)
        return names

    def _ends(self, source: Node, value: Value, ends_at_once: bool) -> bool:
        """Note and return whether the search ends at this value."""
        if self.scope.graph.type_of(value).dtype.name == "resource":
            known = not self.scope.nested and value.node in {**self.captured.constants, **self.captured.variables}
            if known and value.node not in self.resources:
                self.resources.append(value.node)
            return known
        if not _is_leaf(self.scope, source, value):
            return False
        kind = self.scope.kinds[value]
        once = kind.shared and kind.once and not self.scope.nested
        if once and not ends_at_once:
            return False
        ends = self.once if once else self.leaves
        if value not in ends:
            ends.append(value)
        return True


def _is_leaf(scope: Scope, source: Node, value: Value) -> bool:
    """Return whether values of this tensor can be drawn."""
    kind = scope.kinds.get(value)
    if value in scope.tried:  # it may belong together with other tensors of its region, such as values and row lengths
        return False
    if source.op == "Const" or kind is None or scope.graph.type_of(value).dtype.handle:
        return False
    if kind.form is Form.SIZE:
        return scope.affine(value) is not None
    if kind.rows:
        return kind.outer == 1 and kind.inner > 0 and not kind.origin and not kind.slope
    return kind.shared


def _key(scope: Scope, nodes: Sequence[Node], leaves: Sequence[Value], resources: Sequence[str]) -> Any:
    """Return what decides the result of an experiment; names of nodes do not."""
    order = {node.name: i for i, node in enumerate(nodes)}
    order |= {name: -1 - i for i, name in enumerate(resources)}
    places = {value: ("leaf", i) for i, value in enumerate(leaves)}

    def place(value: Value) -> Any:
        return places.get(value) or (order[value.node], value.index)

    own = ("layer", "within", "batch_norm")
    ops = tuple(
        (
            node.op,
            tuple(item for item in node.attrs if item[0] not in own),
            tuple(place(value) for value in node.inputs),
            tuple(output.dtype for output in node.outputs),
        )
        for node in nodes
    )
    return ops, tuple(map(str, resources)), tuple(_leaf_key(scope, value) for value in leaves)


def _leaf_key(scope: Scope, value: Value) -> Any:
    kind, numbers = scope.kinds[value], scope.numbers.get(value)
    known = None if numbers is None else tuple((np.shape(n), np.asarray(n).tobytes()) for n in numbers)
    named = value if kind.rows and not scope.nested and scope.graph.node(value.node).op == "arg" else None
    dims = scope.dims(value)
    return kind.form, kind.axis, kind.inner, kind.outer, dims, scope.graph.type_of(value).dtype, known, named


def find_limits(scope: Scope, region: Region, captured: Captured) -> Limits | None:
    """Return what experiments with a region must reach; None where that is too many samples."""
    held = _held_values(scope, region, captured)
    samples = max(_threshold(scope, region, held), _longest_table(scope, region, held))
    return None if samples > _MOST_SAMPLES else Limits(region.loops, _scales(held), samples, _longest(region))


def _threshold(scope: Scope, region: Region, held: Sequence[Any]) -> int:
    """Return the largest number to which the region compares positions or numbers of samples; 0 where there is none.

    ``x[:100]`` treats all samples alike only in batches of at most 100. More than any experiment has where it is not
    known, as where positions become texts: that of 10 is longer than that of 9.
    """
    uses = _follow_positions(scope, region, held)
    if uses.unknown:
        return _NO_LIMIT
    found = [uses.reach]
    for node in region.nodes:
        kinds = [scope.kinds.get(value, CONSTANT) for value in node.inputs]
        of_positions = any(kind.form is Form.SIZE or kind.slope for kind in kinds)
        if any(kind.form is Form.SIZE for kind in kinds) and node.op in ELEMENTWISE:
            unknown = any(k.shared and scope.numbers.get(v) is None for v, k in zip(node.inputs, kinds, strict=True))
            if unknown or node.outputs[0].dtype.differentiable:
                return _NO_LIMIT  # it compares or computes with a number of samples
        if uses.present or of_positions or (node.op in _PICKING and not kinds[0].shared):
            found += [_largest(scope.numbers.get(value)) for value in node.inputs]
    return uses.factor * max(found + [_largest((value,)) for value in region.constants])


def _follow_positions(scope: Scope, region: Region, held: Sequence[Any]) -> PositionUses:
    """Return how a region uses positions and numbers of samples, followed op by op where it has loops.

    Without loops they are mostly indices and lengths of ragged tensors, which more ops take than can be followed: they
    must not be rounded, and the experiment reaches the floats that are ``held``.
    """
    nodes = tuple({node.name: node for node in (*region.before, *region.nodes)}.values())
    graph = Graph("region", nodes)
    called = needed_library(graph, dict(scope.graph.library))
    uses = PositionUses({name: function_pb2.FunctionDef.FromString(body) for name, body in called})
    written = write_graph(graph).node
    inside = [*written, *(each for body in uses.functions.values() for each in body.node_def)]
    if internals.LOOP_OPS.isdisjoint(each.op for each in inside):
        if any(value in scope.positional for node in region.nodes for value in (*node.inputs, *node.values())):
            uses.unknown, uses.reach = any(map(rounds, inside)), _largest_float(held)
        return uses
    flows = {name: [Flow(given=True)] for name in region.resources}
    for value in (*region.leaves, *region.once):
        places = flows.setdefault(value.node, [Flow()] * len(scope.graph.node(value.node).outputs))
        places[value.index] = _leaf_flow(scope, value)
    uses.follow_all(written, flows)
    return uses


def _leaf_flow(scope: Scope, value: Value) -> Flow:
    kind = scope.kinds[value]
    if kind.form is Form.SIZE:
        return Flow(position=True)
    known = scope.number(value) if kind.shared else None
    return Flow(long=kind.rows, given=True) if known is None else constant_flow(np.asarray(known))


def _largest_float(held: Sequence[Any]) -> int:
    """Return the largest of the ``held`` floats that may be compared with positions of samples, else 0.

    Larger ones than the most samples of an experiment are no positions, but fill masks.
    """
    sizes = _magnitudes(held)
    return int(np.ceil(np.max(sizes, where=sizes <= _MOST_SAMPLES, initial=0.0)))


def _longest_table(scope: Scope, region: Region, held: Sequence[Any]) -> int:
    """Return the largest length of what all samples share, if positions of samples may be looked up in it, else 0."""
    if not any(scope.kinds[value].form is Form.SIZE for value in region.leaves):
        return 0
    shapes = [scope.dims(value) or () for value in region.leaves if scope.kinds[value].shared]
    return max((dim or 0 for dims in (*shapes, *map(np.shape, held)) for dim in dims), default=0)


def _held_values(scope: Scope, region: Region, captured: Captured) -> list[Any]:
    """Return the values of the constants of a region and of the functions that it calls, and of what it reads."""
    found = [constant_value(node) for node in region.nodes if node.op == "Const"]
    leaves = () if scope.nested else [value.node for value in region.leaves]
    for name in (*region.resources, *leaves):
        tensor = captured.variables.get(name, captured.constants.get(name))
        if tensor is not None and tensor.dtype.is_floating and math.prod(tensor.shape) <= _MOST_HELD:
            with contextlib.suppress(tf.errors.FailedPreconditionError):  # another rank of the job holds it
                found.append(tensor.numpy())
    return [*region.constants, *(value for value in found if value is not None)]


def _scales(held: Sequence[Any]) -> tuple[float, ...]:
    """Return the largest magnitudes of these floats: the usual draws do not reach them."""
    sizes = _magnitudes(held)
    powers = np.unique(np.round(np.log10(sizes[sizes > _USUAL])))
    return tuple(10.0 ** powers[-_MOST_SCALES:])


def _magnitudes(held: Sequence[Any]) -> Any:
    """Return the magnitudes of the finite floats."""
    floats = [np.ravel(value).astype(np.float64) for value in held if value.dtype.kind == "f"]
    sizes = np.abs(np.concatenate([np.zeros(0), *floats]))
    return sizes[np.isfinite(sizes)]


def _longest(region: Region) -> int:
    """Return the largest length of an axis in the region that does not depend on the batch."""
    shapes = (output.shape.dims or () for node in region.nodes for output in node.outputs)
    return max((dim for dims in shapes for dim in dims if dim is not None and dim > 0), default=0)


def _largest(numbers: Numbers | None) -> int:
    """Return the largest number where the numbers do not depend on the number of samples, else 0."""
    if numbers is None or varies(numbers) or np.asarray(numbers[0]).dtype.kind not in "iu" or not np.size(numbers[0]):
        return 0
    usual = np.abs(np.asarray(numbers[0], np.int64))
    return int(np.max(usual, where=usual < _NO_LIMIT, initial=0))
