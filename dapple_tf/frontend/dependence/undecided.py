"""Try the ops that no rule decides: run the part of the graph that computes a tensor on drawn values.

Where a rule cannot tell what an op does with samples, or there is none, the op's result is *undecided*. Then the ops
from the last tensors of known kinds up to it are run by themselves (see ``experiment``). If that does not decide it,
the ops that use it are tried together with it: a TensorList, or the pieces of a string, have no rows of their own,
and what is made of them does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2

from dapple_tf import internals
from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.dependence.control_flow import TENSOR_LISTS
from dapple_tf.frontend.dependence.elementwise import ELEMENTWISE
from dapple_tf.frontend.dependence.experiment import Function, Limits, Operand, Prepare, confirm, decide
from dapple_tf.frontend.dependence.kinds import CONSTANT, Form, Kind, rows
from dapple_tf.frontend.dependence.numbers import Numbers, affine, constant_value, varies
from dapple_tf.frontend.dependence.scope import Scope, op_names
from dapple_tf.frontend.write_graph import import_graph, needed_library, rename_functions
from graph_passes.analysis.layers import CAPTURED_INPUTS
from graph_passes.ir.graph import Effect, Graph, Node, Value

_LOOPING = internals.CALL_OPS | internals.LOOP_OPS
_LISTED = _LOOPING | TENSOR_LISTS  # TensorFlow does not tell the lengths of their results
_MOST_NODES = 250
# Python code has effects of its own. The kernels of the others do not raise an error, but end the process: FFTs with a
# tensor that has no entries, searches and LSTM cells with operands of different numbers of rows.
_NEVER_RUN = op_names(
    "PyFunc PyFuncStateless EagerPyFunc LowerBound UpperBound LSTMBlockCell LSTMBlockCellGrad "
    "FFT FFT2D FFT3D FFTND IFFT IFFT2D IFFT3D IFFTND RFFT RFFT2D RFFT3D RFFTND IRFFT "
    "IRFFT2D IRFFT3D IRFFTND"
)
_SECONDS = 2.0  # for a run of a loop, which takes milliseconds if it ends at all
_MOST_TRIALS = 96
"""Experiments of one trace; each takes some hundredths of a second. Further ops stay undecided."""


@dataclass
class Experiments:
    """The experiments of a trace. ``examples``: rows of the user's batch, by input node."""

    captured: Captured
    examples: Mapping[str, Any]
    _found: dict[Any, list[Kind | None]] = field(default_factory=dict)

    def decide(self, scope: Scope, node: Node) -> list[Kind | None]:
        """Return the kinds of the node's outputs, None for those that stay undecided."""
        nothing: list[Kind | None] = [None] * len(node.outputs)
        if not any(_may_be_rows(scope, node, value) for value in node.values()):
            return nothing
        region = _find_region(scope, node, self.captured)
        if region is None:
            return nothing
        key = region.key
        if key not in self._found:
            if len(self._found) >= _MOST_TRIALS:
                return nothing
            self._found[key] = self._try(scope, node, region)
        return self._found[key]

    def _try(self, scope: Scope, node: Node, region: _Region) -> list[Kind | None]:
        outputs = [value for value, output in zip(node.values(), node.outputs, strict=True) if not output.dtype.handle]
        operands = [self._operand(scope, value) for value in (*region.leaves, *region.once)]
        held = _held_values(scope, region, self.captured)
        samples = max(_threshold(scope, region), _longest_table(scope, region, held))
        limits = Limits(region.loops, _scales(held), samples, _longest(scope, region))
        if any(operand is None for operand in operands) or limits.samples > _MOST_SAMPLES:
            return [None] * len(node.outputs)
        known = [operand for operand in operands if operand is not None]
        if all(operand.axis is None and operand.size is None for operand in known):
            return [None] * len(node.outputs)
        known[len(region.leaves) :] = [dataclasses.replace(each, once=True) for each in known[len(region.leaves) :]]
        resources = {name: _resource(name, self.captured) for name in region.resources}
        runner = _Runner(scope, region, known, tuple(outputs), resources, uuid.uuid4().hex)
        try:
            with internals.registered_functions(runner.library):
                found = decide(runner.results(), runner.prepare(), known, len(outputs), limits)
                if any(found) and not self._has_gradients_of(runner, found):
                    found = [None] * len(outputs)
        except _NOT_RUN:
            found = [None] * len(outputs)
        each = iter(found)
        return [None if output.dtype.handle else next(each) for output in node.outputs]

    def _has_gradients_of(self, runner: _Runner, found: Sequence[Kind | None]) -> bool:
        """Return whether gradients are those of results of these kinds; ``tf.stop_gradient`` may hide a coupling."""
        with contextlib.suppress(LookupError):  # an op without a gradient
            function, wanted = runner.gradients(found)
            return not wanted or confirm(function, runner.prepare(), runner.operands, wanted)
        return True

    def _operand(self, scope: Scope, value: Value) -> Operand | None:
        kind, dims, dtype = scope.kinds[value], scope.dims(value), scope.graph.type_of(value).dtype.name
        numbers = scope.numbers.get(value)
        if kind.form is Form.SIZE and numbers is not None:
            found = affine(numbers, scope.batch)
            return None if found is None else Operand(dtype, np.shape(numbers[0]), size=found)
        if dims is None:
            return None
        if kind.rows:
            example = None if scope.nested else self.examples.get(value.node)
            return Operand(dtype, dims, kind.axis, kind.inner, example=example)
        known = None if numbers is None or varies(numbers) else np.asarray(numbers[0]).astype(_number_type(dtype))
        if known is None and not scope.nested and value.node in self.captured.constants:
            known = self.captured.constants[value.node].numpy()
        return Operand(dtype, dims, value=known)


def _may_be_rows(scope: Scope, node: Node, value: Value) -> bool:
    """Return whether an experiment with this output may help: vectors of a length that data decide have no rows."""
    return not scope.graph.type_of(value).dtype.handle and (node.op in _LISTED or scope.dims(value) != (None,))


def _number_type(dtype: str) -> Any:
    return tf.as_dtype(dtype).as_numpy_dtype


@dataclass(frozen=True)
class _Region:
    """The nodes that compute a tensor from ``leaves`` and from ``once``, values that are computed once a step.

    ``before``: the nodes that compute the latter from ``leaves``. ``resources``: lookup tables and variables that are
    read. ``key``: equal for regions that compute the same from operands of equal kinds.
    """

    nodes: tuple[Node, ...]
    leaves: tuple[Value, ...]
    before: tuple[Node, ...]
    once: tuple[Value, ...]
    resources: tuple[str, ...]
    key: Any

    @property
    def loops(self) -> bool:
        """Whether a node may hold a loop."""
        return any(node.op in _LOOPING for node in (*self.nodes, *self.before))


def _find_region(scope: Scope, node: Node, captured: Captured) -> _Region | None:
    """Return the nodes from tensors of known kinds up to ``node``; None where an experiment cannot run them."""
    search = _Search(scope, captured)
    names = search.ancestors([node], ends_at_once=True)
    once = tuple(search.once)
    before = search.ancestors([scope.graph.node(value.node) for value in once], ends_at_once=False)
    if names is None or before is None:
        return None
    called = needed_library(Graph("region", tuple(map(scope.graph.node, names | before))), dict(scope.graph.library))
    called_ops = {inside.op for _, body in called for inside in function_pb2.FunctionDef.FromString(body).node_def}
    ragged = any(op.startswith("Ragged") for op in called_ops) and len(search.leaves) > 1
    if ragged or not _NEVER_RUN.isdisjoint(called_ops) or not _fit_together(scope, names | before, search.leaves):
        return None
    ordered = [tuple(each for each in scope.graph.nodes if each.name in found) for found in (names, before)]
    return _Region(
        ordered[0],
        tuple(search.leaves),
        ordered[1],
        once,
        tuple(search.resources),
        _key(scope, [*ordered[0], *ordered[1]], [*search.leaves, *once], search.resources),
    )


def _fit_together(scope: Scope, names: Set[str], leaves: Sequence[Value]) -> bool:
    """Return whether the parts of each ragged tensor fit together where the leaves are drawn one by one.

    Kernels of ragged tensors trust their row lengths, and read past the end of the values where these are fewer: both
    must come from the same leaves.
    """
    for name in names:
        if scope.graph.node(name).op.startswith("Ragged"):
            found = [_sources(scope, value, names, leaves) for value in scope.graph.node(name).inputs]
            sizes = sorted((sources for sources in found if sources), key=len)
            if not all(one <= other for one, other in itertools.pairwise(sizes)):
                return False
    return True


def _sources(scope: Scope, value: Value, names: Set[str], leaves: Sequence[Value]) -> set[Value]:
    """Return the leaves from which the nodes ``names`` compute a value."""
    found, seen, pending = set(), set(), [value]
    while pending:
        each = pending.pop()
        if each in leaves:
            found.add(each)
        elif each.node in names and each.node not in seen:
            seen.add(each.node)
            pending += scope.graph.node(each.node).inputs
    return found


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
        numbers = scope.numbers.get(value)
        return numbers is not None and affine(numbers, scope.batch) is not None
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


def _threshold(scope: Scope, region: _Region) -> int:
    """Return the largest number to which the region compares positions or numbers of samples; 0 where there is none.

    ``x[:100]`` treats all samples alike only in batches of at most 100. More than any experiment has where it is not
    known.
    """
    found = [0]
    for node in region.nodes:
        kinds = [scope.kinds.get(value, CONSTANT) for value in node.inputs]
        of_positions = any(kind.form is Form.SIZE or kind.slope for kind in kinds)
        if any(kind.form is Form.SIZE for kind in kinds) and node.op in ELEMENTWISE:
            unknown = any(k.shared and scope.numbers.get(v) is None for v, k in zip(node.inputs, kinds, strict=True))
            if unknown or node.outputs[0].dtype.differentiable:
                return _NO_LIMIT  # it compares or computes with a number of samples
        if of_positions or (node.op in _PICKING and not kinds[0].shared):
            found += [_largest(scope.numbers.get(value)) for value in node.inputs]
    for _, body in needed_library(Graph("region", region.nodes), dict(scope.graph.library)):
        nodes = function_pb2.FunctionDef.FromString(body).node_def
        constants = [node.attr["value"].tensor for node in nodes if node.op == "Const"]
        found += [_largest((tf.make_ndarray(c),)) for c in constants if tf.as_dtype(c.dtype).is_integer]
    return max(found)


def _longest_table(scope: Scope, region: _Region, held: Sequence[Any]) -> int:
    """Return the largest length of what all samples share, if positions of samples may be looked up in it, else 0."""
    if not any(scope.kinds[value].form is Form.SIZE for value in region.leaves):
        return 0
    shapes = [scope.dims(value) or () for value in region.leaves if scope.kinds[value].shared]
    return max((dim or 0 for dims in (*shapes, *map(np.shape, held)) for dim in dims), default=0)


def _held_values(scope: Scope, region: _Region, captured: Captured) -> list[Any]:
    """Return the values of the constants of a region and of the functions that it calls, and of what it reads."""
    found = [constant_value(node) for node in region.nodes if node.op == "Const"]
    for _, body in needed_library(Graph("region", region.nodes), dict(scope.graph.library)):
        nodes = function_pb2.FunctionDef.FromString(body).node_def
        found += [tf.make_ndarray(node.attr["value"].tensor) for node in nodes if node.op == "Const"]
    for name in (*region.resources, *(value.node for value in region.leaves)):
        tensor = captured.variables.get(name, captured.constants.get(name))
        if tensor is not None and tensor.dtype.is_floating and math.prod(tensor.shape) <= _MOST_HELD:
            with contextlib.suppress(tf.errors.FailedPreconditionError):  # another rank of the job holds it
                found.append(tensor.numpy())
    return [value for value in found if value is not None]


def _scales(held: Sequence[Any]) -> tuple[float, ...]:
    """Return the largest magnitudes of these floats: the usual draws do not reach them."""
    floats = [np.ravel(value).astype(np.float64) for value in held if value.dtype.kind == "f"]
    sizes = np.abs(np.concatenate([np.zeros(0), *floats]))
    powers = np.unique(np.round(np.log10(sizes[(sizes > _USUAL) & np.isfinite(sizes)])))
    return tuple(10.0 ** powers[-_MOST_SCALES:])


def _longest(scope: Scope, region: _Region) -> int:
    """Return the largest length of an axis in the region that does not depend on the batch."""
    shapes = (output.shape.dims or () for node in region.nodes for output in node.outputs)
    return max((dim for dims in shapes for dim in dims if dim is not None and dim > 0), default=0)


def _largest(numbers: Numbers | None) -> int:
    """Return the largest number where the numbers do not depend on the number of samples, else 0."""
    if numbers is None or varies(numbers) or np.asarray(numbers[0]).dtype.kind not in "iu" or not np.size(numbers[0]):
        return 0
    usual = np.abs(np.asarray(numbers[0], np.int64))
    return int(np.max(usual, where=usual < _NO_LIMIT, initial=0))


_PICKING = frozenset({"StridedSlice", "Slice", "Gather", "GatherV2", "GatherNd", "Split", "SplitV"})
_NO_LIMIT = 2**31 - 1  # the end of a slice that has none
_MOST_SAMPLES = 20000
_USUAL = 2.0  # draws of the usual styles reach this magnitude
_MOST_HELD, _MOST_SCALES = 4096, 8


# TensorFlow rejects the ops outside of their graph, or a loop does not end within ``_SECONDS``.
_NOT_RUN = (ValueError, TimeoutError)


@dataclass(frozen=True)
class _Runner:
    """Makes functions that run a region on its ``operands`` (values of its leaves), on the CPU.

    ``resources``: the tables and variables that the region reads, by name. ``suffix``: of the names of the functions
    that the region calls; these must be registered.
    """

    scope: Scope
    region: _Region
    operands: Sequence[Operand]
    outputs: tuple[Value, ...]
    resources: Mapping[str, Any]
    suffix: str

    def results(self) -> Function:
        """Return the function of the region's outputs."""
        return self._function(self._run)

    def prepare(self) -> Prepare:
        """Return the function that computes the values of ``once`` from the leaves."""
        region = self.region
        if not region.once:
            return lambda values: []
        before = dataclasses.replace(region, nodes=region.before, once=(), before=())
        operands = self.operands[: len(region.leaves)]
        return dataclasses.replace(self, region=before, operands=operands, outputs=region.once).results()

    @property
    def library(self) -> Sequence[bytes]:
        """The definitions of the functions that the region calls."""
        region = self.region
        graph = Graph("region", (*region.nodes, *region.before))
        graph = graph.replace(library=needed_library(graph, dict(self.scope.graph.library)))
        return [definition for _, definition in rename_functions(graph, self.suffix).library]

    def gradients(self, found: Sequence[Kind | None]) -> tuple[Function, list[Kind]]:
        """Return a function that computes the gradients of the float operands, and the kinds that these must have.

        ``found``: the kinds of the outputs. Raises LookupError for an op that has no gradient.
        """
        trained = [i for i, operand in enumerate(self.operands) if tf.as_dtype(operand.dtype).is_floating]
        counted = next(operand for operand in self.operands if operand.axis is not None or operand.size is not None)
        known = [kind for kind in found if kind]
        floating = [self.scope.graph.type_of(value).dtype.differentiable for value in self.outputs]
        if not any(map(bool, known)) or not trained or not any(floating):
            return self.results(), []

        def run(*tensors: Any) -> list[Any]:
            total = tf.zeros([], tf.float64)
            for result, kind, floats in zip(self._run(*tensors), found, floating, strict=True):
                if kind is not None and floats:
                    total += _gradient_target(result, kind, _count(counted, tensors[self.operands.index(counted)]))
            gradients = tf.gradients(total, [tensors[i] for i in trained], unconnected_gradients="zero")
            return [tf.convert_to_tensor(gradient) for gradient in gradients]

        places = [self.operands[i] for i in trained]
        wanted = [Kind(Form.SUM) if each.axis is None else rows(each.axis, 1, each.inner) for each in places]
        return self._function(run), wanted

    def _run(self, *tensors: Any) -> list[Any]:
        own, graph = tf.compat.v1.get_default_graph(), self._graph
        inputs = {f"leaf/{i}": tensor for i, tensor in enumerate(tensors)}
        for name in self.region.resources:
            inputs[name] = internals.capture_of(own, getattr(self.resources[name], "handle", self.resources[name]))
        return import_graph(graph, inputs, "region")

    @property
    def _graph(self) -> Graph:
        graph, region = self.scope.graph, self.region
        names = {value: f"leaf/{i}" for i, value in enumerate((*region.leaves, *region.once))}
        leaves = [Node(name, "arg", (), (graph.type_of(value),)) for value, name in names.items()]
        resources = [Node(name, "capture", (), graph.node(name).outputs) for name in region.resources]
        nodes = [
            dataclasses.replace(
                node, inputs=tuple(Value(names[v]) if v in names else v for v in node.inputs), controls=()
            )
            for node in region.nodes
        ]
        result = Graph("region", (*leaves, *resources, *nodes), outputs=self.outputs)
        result = result.replace(library=needed_library(result, dict(graph.library)))
        return rename_functions(result, self.suffix)

    def _function(self, run: Any) -> Function:
        specs = [
            tf.TensorSpec([None if axis == each.axis else dim for axis, dim in enumerate(each.dims)], each.dtype)
            for each in self.operands
        ]
        with tf.init_scope(), tf.device("/CPU:0"):
            concrete = tf.function(run, autograph=False, input_signature=specs).get_concrete_function()

        def function(values: Sequence[Any]) -> list[Any] | None:
            try:
                with tf.device("/CPU:0"):
                    tensors = [tf.constant(v, s.dtype) for v, s in zip(values, specs, strict=True)]
                    found = (
                        internals.run_within(concrete, tensors, _SECONDS) if self.region.loops else concrete(*tensors)
                    )
                    return [result.numpy() for result in found]
            except (tf.errors.OpError, ValueError):  # the ops do not accept these values
                return None

        return function


def _resource(name: str, captured: Captured) -> Any:
    """Return a table's handle, or a variable: one with drawn values for a variable that another rank holds."""
    if name in captured.constants:
        return captured.constants[name]
    variable = captured.variables[name]
    if bool(variable.is_initialized()):
        return variable
    return tf.Variable(tf.cast(tf.random.stateless_normal(variable.shape, [0, 0]), variable.dtype))


def _gradient_target(result: Any, kind: Kind, samples: Any) -> Any:
    """Return a number whose gradient with respect to a row depends on this row alone, and differs from row to row."""
    values = tf.cast(tf.math.real(result), tf.float64)
    if kind.rows:
        return tf.reduce_sum(tf.nn.softsign(values))
    weights = tf.cos(tf.cast(tf.range(tf.size(values)), tf.float64))
    total = tf.reduce_sum(tf.reshape(values, [-1]) * weights)
    return total * tf.cast(samples, tf.float64) if kind.form is Form.MEAN else total


def _count(operand: Operand, tensor: Any) -> Any:
    """Return the number of samples of an operand."""
    if operand.axis is None:
        assert operand.size is not None, "one operand depends on the number of samples"
        scale, offset = operand.size
        return (tf.reshape(tensor, [-1])[0] - offset.reshape(-1)[0]) // scale.reshape(-1)[0]
    return tf.shape(tensor)[operand.axis] // operand.inner


def example_rows(captured: Captured, batch: Sequence[Any]) -> dict[str, Any]:
    """Return some rows of each tensor of the user's batch, by input node; those of at least four samples."""
    found = {}
    for name, leaf in zip(captured.graph.inputs, tf.nest.flatten(tuple(batch)), strict=True):
        rows = leaf[:_EXAMPLES] if hasattr(leaf, "__getitem__") and hasattr(leaf, "shape") else None
        if rows is not None and len(rows) >= _LEAST_EXAMPLES:
            found[name] = np.asarray(rows)
    return found


_EXAMPLES = 64
_LEAST_EXAMPLES = 4
