"""Emit the steady state of a pipelined step as a loop, so that the step's graph does not grow with its micro-batches.

What a node takes from an earlier iteration is *carried*: the loop has a variable for each of the iterations since. A
node of a later iteration that waits for the end of one carries a token of it. What the drain takes from all iterations
is collected in a list. TensorFlow runs iterations of a loop side by side as far as their inputs are there, each stage
on its own device, so the order of the step is that of the graph without a loop. A rank's exchanges take the number of
their micro-batch as an input, since their ops run for one micro-batch after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.operations import Operations
from dapple_tf.backend.stage_function import spec_of
from dapple_tf.graph_passes.analysis.steady_state import SteadyState
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value
from dapple_tf.graph_passes.ir.names import MICRO_BATCH

_Carried = Mapping[Value | str, int]
"""For values, and for the nodes whose ends are waited for: for how many iterations the loop keeps them."""


@dataclass(frozen=True)
class LoopOutputs:
    """The outputs of a loop for the nodes after it.

    ``tensors``: by value. ``ends``: by the name of a node of the loop, an op that runs after it. ``last``: ops that run
    after the whole loop.
    """

    tensors: Mapping[Value, Any]
    ends: Mapping[str, Any]
    last: tuple[Any, ...]


@dataclass(eq=False)
class Loop:
    """Emits a loop into the TensorFlow graph under construction, which has the nodes before it.

    ``tensor_of`` returns the tensor of a value of these nodes, ``ends_of`` the ops that have run once a node has.
    """

    graph: Graph
    state: SteadyState
    operations: Operations
    tensor_of: Callable[[Value], Any]
    ends_of: Callable[[str], Sequence[Any]]

    def __post_init__(self) -> None:
        self._names = {member: name for name, member in self.state.members.items()}
        self._carried, self._collected = _find_carried(self.graph, self.state)
        # What the nodes of the loop wait for outside of it.
        self._outside = {
            control.source: self._token(control.source)
            for node in self.state.body
            for control in node.controls
            if control.source not in self.state.members
        }

    def emit(self) -> LoopOutputs:
        """Emit all nodes of the loop."""
        carried = [self._first(key, -age) for key, depth in self._carried.items() for age in range(1, depth + 1)]
        lists = [self._new_list(value) for value in self._collected]
        variables = [tf.zeros([], tf.int64), *carried, *lists]
        outputs = tf.while_loop(
            lambda iteration, *_: iteration < self.state.iterations,
            self._run,
            variables,
            shape_invariants=[tf.TensorShape(v.shape if v.dtype == tf.variant else None) for v in variables],
            parallel_iterations=self.state.parallel_iterations,
        )
        return self._outputs(self._by_key(outputs[1 : 1 + len(carried)]), outputs[1 + len(carried) :])

    def _run(self, iteration: Any, *variables: Any) -> list[Any]:
        """Emit an iteration: return the loop's variables for the next one."""
        count = len(variables) - len(self._collected)
        before, lists = self._by_key(variables[:count]), variables[count:]
        tensors: dict[Value, Any] = {}
        ends: dict[str, Sequence[Any]] = {}
        for node in self.state.body:
            inputs = [self._taken(value, tensors, before) for value in node.inputs]
            waits = [op for control in node.controls for op in self._waits(control.source, node, ends, before)]
            graph = tf.compat.v1.get_default_graph()
            for variable in self.operations.resources(node):
                internals.capture_of(graph, variable.handle)
            with tf.name_scope(node.name + "/"), tf.device(node.device):
                number = iteration * self.state.stride + node.integer(MICRO_BATCH)
                with tf.control_dependencies(waits):
                    outputs, ops = self.operations.run(node, inputs, number)
            tensors.update(zip(node.values(), outputs, strict=True))
            ends[node.name] = ops or [tensor.op for tensor in outputs]
        after: list[Any] = []
        for key, depth in self._carried.items():
            new = self._token_after(key, ends[key], before[key][0]) if isinstance(key, str) else tensors[key]
            after += [new, *before[key][: depth - 1]]
        for value, items in zip(self._collected, lists, strict=True):
            with tf.device(self._device(value)):
                after.append(
                    tf.raw_ops.TensorListSetItem(
                        input_handle=items, index=tf.cast(iteration, tf.int32), item=tensors[value]
                    )
                )
        return [iteration + 1, *after]

    def _taken(self, value: Value, tensors: Mapping[Value, Any], before: Mapping[Value | str, Sequence[Any]]) -> Any:
        if value.node not in self.state.members:
            return self.tensor_of(value)
        kind, iteration = self.state.members[value.node]
        key = Value(kind, value.index)
        return tensors[key] if iteration == 0 else self._shaped(before[key][-iteration - 1], key)

    def _waits(
        self, source: str, node: Node, ends: Mapping[str, Sequence[Any]], before: Mapping[Value | str, Sequence[Any]]
    ) -> Sequence[Any]:
        """Return ops that have run once the node ``source`` has, for which ``node`` waits."""
        if source in ends:
            return ends[source]
        if source in self._outside:
            token = self._outside[source]
        else:
            kind, iteration = self.state.members[source]
            token = before[kind][-iteration - 1]
        with tf.device(node.device):
            return [tf.identity(token).op]

    def _outputs(self, carried: Mapping[Value | str, Sequence[Any]], lists: Sequence[Any]) -> LoopOutputs:
        collected = {key: self._items(key, items) for key, items in zip(self._collected, lists, strict=True)}
        tensors = {}
        for value in _taken_after(self.graph, self.state):
            kind, iteration = self.state.members[value.node]
            key, age = Value(kind, value.index), self.state.iterations - iteration
            kept = carried.get(key, ())
            tensors[value] = self._shaped(kept[age - 1], key) if age <= len(kept) else collected[key][iteration]
        ends = {}
        for name in _awaited_after(self.state):
            kind, iteration = self.state.members[name]
            age = self.state.iterations - iteration
            with tf.device(self._device(kind)):
                # A token comes after those of all earlier iterations.
                ends[name] = tf.identity(carried[kind][age - 1 if age <= len(carried[kind]) else 0]).op
        last: list[Any] = []
        for kind in filter(self._carried.__contains__, (node.name for node in self.state.body)):
            with tf.device(self._device(kind)):
                last.append(tf.identity(carried[kind][0]).op)
        return LoopOutputs(tensors, ends, tuple(last))

    def _by_key(self, tensors: Sequence[Any]) -> Mapping[Value | str, Sequence[Any]]:
        """Return the carried tensors by what they are of, the youngest first."""
        left = iter(tensors)
        return {key: [next(left) for _ in range(depth)] for key, depth in self._carried.items()}

    def _first(self, key: Value | str, iteration: int) -> Any:
        """Return what the first iteration takes from an earlier one, which runs before the loop."""
        if isinstance(key, Value):
            return self.tensor_of(Value(self._names[key.node, iteration], key.index))
        name = self._names.get((key, iteration))
        return self._token(name) if name is not None else tf.constant(True)

    def _token(self, name: str) -> Any:
        with tf.device(self.graph.node(name).device), tf.control_dependencies(self.ends_of(name)):
            return tf.constant(True)

    def _token_after(self, kind: str, ops: Sequence[Any], before: Any) -> Any:
        with tf.device(self._device(kind)), tf.control_dependencies(ops):
            return tf.identity(before)

    def _new_list(self, value: Value) -> Any:
        spec = spec_of(self.graph.type_of(value))
        shape = -1 if spec.shape.rank is None else [-1 if dim is None else dim for dim in spec.shape]
        with tf.device(self._device(value)):
            return tf.raw_ops.TensorListReserve(
                element_shape=tf.constant(shape, tf.int64),
                num_elements=self.state.iterations,
                element_dtype=spec.dtype,
            )

    def _items(self, value: Value, items: Any) -> Sequence[Any]:
        """Return the items of a list, by iteration."""
        spec = spec_of(self.graph.type_of(value))
        count = self.state.iterations
        with tf.device(self._device(value)):
            if spec.shape.is_fully_defined():
                shape = tf.constant(spec.shape.as_list(), tf.int32)
                stacked = tf.raw_ops.TensorListStack(
                    input_handle=items, element_shape=shape, element_dtype=spec.dtype, num_elements=count
                )
                return list(tf.unstack(stacked, count))
            get = tf.raw_ops.TensorListGetItem
            return [get(input_handle=items, index=i, element_shape=-1, element_dtype=spec.dtype) for i in range(count)]

    def _shaped(self, tensor: Any, value: Value) -> Any:
        tensor.set_shape(spec_of(self.graph.type_of(value)).shape)
        return tensor

    def _device(self, key: Value | str) -> str:
        return self.graph.node(key if isinstance(key, str) else key.node).device


def _find_carried(graph: Graph, state: SteadyState) -> tuple[_Carried, tuple[Value, ...]]:
    """Return what the loop carries, and the values that it collects for the nodes after it."""
    carried: dict[Value | str, int] = {}

    def carry(key: Value | str, depth: int) -> None:
        carried[key] = max(depth, carried.get(key, 0))

    for node in state.body:
        for value in node.inputs:
            kind, iteration = state.members.get(value.node, ("", 0))
            if iteration < 0:
                carry(Value(kind, value.index), -iteration)
        for control in node.controls:
            kind, iteration = state.members.get(control.source, ("", 0))
            if iteration < 0:
                carry(kind, -iteration)
    collected = {}
    for value in _taken_after(graph, state):
        kind, iteration = state.members[value.node]
        key = Value(kind, value.index)
        if state.iterations - iteration > carried.get(key, 0):
            collected[key] = True
    awaited = {name for node in state.body for name in node.predecessors()}
    for name in chain(_awaited_after(state), (node.name for node in state.body if node.name not in awaited)):
        carry(state.members[name][0], 1)
    return carried, tuple(collected)


def _taken_after(graph: Graph, state: SteadyState) -> Sequence[Value]:
    """Return the values of nodes of the loop that the nodes after it take, or that are outputs of the step."""
    taken = chain(graph.outputs, *(node.inputs for node in state.after))
    return [value for value in dict.fromkeys(taken) if state.find(value.node) is not None]


def _awaited_after(state: SteadyState) -> Sequence[str]:
    """Return the nodes of the loop for whose end nodes after it wait."""
    waited = dict.fromkeys(control.source for node in state.after for control in node.controls)
    return [name for name in waited if state.find(name) is not None]
