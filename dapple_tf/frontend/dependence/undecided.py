"""Try the ops that no rule decides: run the part of the graph that computes a tensor on drawn values.

Where a rule cannot tell what an op does with samples, or there is none, the op's result is *undecided*. Then the ops
from the last tensors of known kinds up to it are run by themselves (see ``experiment``). If that does not decide it,
the ops that use it are tried together with it: a TensorList, or the pieces of a string, have no rows of their own,
and what is made of them does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.frontend.captured import Captured
from dapple_tf.frontend.dependence.control_flow import TENSOR_LISTS
from dapple_tf.frontend.dependence.experiment import Function, Operand, Prepare, confirm, decide
from dapple_tf.frontend.dependence.kinds import Form, Kind, rows
from dapple_tf.frontend.dependence.numbers import varies
from dapple_tf.frontend.dependence.region import LOOPING, Region, find_limits, find_region
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.frontend.write_graph import import_graph, needed_library, rename_functions
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value

_LISTED = LOOPING | TENSOR_LISTS  # TensorFlow does not tell the lengths of their results
_SECONDS = 2.0  # of processor time for a run of a loop, which takes milliseconds if it ends at all
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
        may_be_rows = any(_may_be_rows(scope, node, value) for value in node.values())
        region = find_region(scope, node, self.captured) if may_be_rows else None
        if region is None:
            return nothing
        if region.key not in self._found and len(self._found) < _MOST_TRIALS:
            self._found[region.key] = self._try(scope, node, region)
        return self._found.get(region.key, nothing)

    def _try(self, scope: Scope, node: Node, region: Region) -> list[Kind | None]:
        outputs = [value for value, output in zip(node.values(), node.outputs, strict=True) if not output.dtype.handle]
        operands = [self._operand(scope, value) for value in (*region.leaves, *region.once)]
        limits = find_limits(scope, region, self.captured)
        if any(operand is None for operand in operands) or limits is None:
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
            found = scope.affine(value)
            return None if found is None else Operand(dtype, np.shape(numbers[0]), size=found)
        if dims is None:
            return None
        if kind.rows:
            example = None if scope.nested else self.examples.get(value.node)
            return Operand(dtype, dims, kind.axis, kind.inner, example=example)
        known = None
        if numbers is not None and not varies(numbers):
            known = np.asarray(numbers[0]).astype(tf.as_dtype(dtype).as_numpy_dtype)
        if known is None and not scope.nested and value.node in self.captured.constants:
            known = self.captured.constants[value.node].numpy()
        return Operand(dtype, dims, value=known)


def _may_be_rows(scope: Scope, node: Node, value: Value) -> bool:
    """Return whether an experiment with this output may help: vectors of a length that data decide have no rows."""
    return not scope.graph.type_of(value).dtype.handle and (node.op in _LISTED or scope.dims(value) != (None,))


# TensorFlow rejects the ops outside of their graph, or a loop does not end within ``_SECONDS``.
_NOT_RUN = (ValueError, TimeoutError)


@dataclass(frozen=True)
class _Runner:
    """Makes functions that run a region on its ``operands`` (values of its leaves), on the CPU.

    ``resources``: the tables and variables that the region reads, by name. ``suffix``: of the names of the functions
    that the region calls; these must be registered.
    """

    scope: Scope
    region: Region
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
        taken = {value: Value(f"leaf/{i}") for i, value in enumerate((*region.leaves, *region.once))}
        leaves = [Node(leaf.node, "arg", (), (graph.type_of(value),)) for value, leaf in taken.items()]
        resources = [Node(name, "capture", (), graph.node(name).outputs) for name in region.resources]
        nodes = [dataclasses.replace(node.replace_inputs(taken), controls=()) for node in region.nodes]
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
