"""Emit pipelined graphs as a TensorFlow function: that of a step, or those of its phases, one after the other.

Every op gets its node's device, name scope and control edges. TensorFlow's automatic control dependencies are off, so
only the graph's own edges order the ops.

Most nodes of a step differ from another one only in their micro-batch. Python takes milliseconds for each op that it
makes, so the handler of such nodes runs once, in a graph of its own: their *template*. Its ops are copied for each of
the nodes, and TensorFlow imports many copies at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, graph_pb2, node_def_pb2

from dapple_tf import internals
from dapple_tf.backend.emit_loop import Loop
from dapple_tf.backend.handler import TEMPLATE, as_template, assign_variable, micro_batch_in_minibatch
from dapple_tf.backend.operations import Operations
from dapple_tf.backend.stage_function import spec_of
from dapple_tf.graph_passes.analysis.steady_state import SteadyState, find_steady_state
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value
from dapple_tf.graph_passes.ir.names import MICRO_BATCH, of_any_micro_batch, of_phase
from dapple_tf.graph_passes.ir.ops import OpName

_FEWEST_ITERATIONS = 12  # of a loop: fewer copies of its nodes are built as fast
_FEW = 3  # making a template takes as long as making the ops of three to four nodes


@dataclass(frozen=True, eq=False)
class Part:
    """A pipelined graph that a program runs, the ``operations`` of its nodes, and its ``variables`` by their names."""

    graph: Graph
    operations: Operations
    variables: Mapping[str, tf.Variable]


def emit(parts: Sequence[Part], signature: Sequence[tf.TensorSpec], *, loops: bool = False) -> Any:
    """Return the ConcreteFunction that runs the graphs of ``parts``: it takes the batch, and returns all their outputs.

    Several parts are the phases of a step. They run at the same time, as far as their ``follow`` nodes let them, and
    the names of the ops of each start with ``phase1/``, ``phase2/`` and so on. ``signature``: the specs of the inputs
    of each graph, which are the batch's flattened tensors. ``loops``: the steady state of many micro-batches may be a
    loop, in which an op has the name of the first of the nodes that it runs for.
    """

    def step(*batch: Any) -> list[Any]:
        with internals.one_grappler_iteration():
            emitters: list[_Emitter] = []
            ends: dict[str, tuple[str, ...]] = {}
            for number, part in enumerate(parts):
                scope = of_phase(number, "") if len(parts) > 1 else ""
                emitters.append(_Emitter(part, scope, ends, loops=loops))
                emitters[-1].emit(batch)
                ends |= {of_phase(number, node.name): emitters[-1].ends_of(node.name) for node in part.graph.nodes}
            last = [op for emitter in emitters for op in emitter.final_ops]
            last += [_end_of_writing(part, last) for part in parts[:-1]]
            with tf.control_dependencies(last):
                return [tensor for emitter in emitters for tensor in emitter.outputs()]

    return internals.trace_function(step, signature, internals.NO_AUTOMATIC_CONTROL)


def _end_of_writing(part: Part, after: Sequence[Any]) -> Any:
    """Return the op that notes, ``after`` others, that a phase which others follow writes no variable any more."""
    updating = part.operations.bindings.updating
    internals.capture_of(tf.compat.v1.get_default_graph(), updating.handle)
    with tf.control_dependencies(after):
        return assign_variable(updating, tf.constant(False))


class _Emitter:
    """Emits the nodes of a graph into the TensorFlow graph under construction, in order."""

    def __init__(self, part: Part, scope: str, earlier: Mapping[str, tuple[str, ...]], *, loops: bool) -> None:
        self._graph = graph = part.graph
        self._operations = part.operations
        self._scope = scope  # of the names of all ops
        self._earlier = earlier  # by node of an earlier phase, as self._ends
        self.final_ops: list[Any] = []  # the part has run when these have
        self._target = tf.compat.v1.get_default_graph()
        self._tensors: dict[Value, str] = {}  # the name of each value's tensor
        self._shapes: dict[Value, tf.TensorShape] = {}  # of the tensors of copied ops
        self._ends: dict[str, tuple[str, ...]] = {}  # by node, the names of the ops that have run once the node has
        self._loop_ends: tuple[str, ...] = ()  # of those that have run once the loop has
        numbers: dict[Hashable, int] = {}  # of keys, since these take long to hash
        self._keys = {node.name: numbers.setdefault(_template_key(graph, node), len(numbers)) for node in graph.nodes}
        self._loop = find_steady_state(graph, self._kind, _FEWEST_ITERATIONS) if loops else None
        self._uses: Counter[Hashable] = Counter()  # of templates
        self._templates: dict[Hashable, _Template] = {}
        self._functions: set[str] = set()  # the names of those that copied ops call
        self._copies = _new_graph_def()  # ops that are yet to be imported

    def emit(self, batch: Sequence[Any]) -> None:
        """Emit all nodes; ``batch``: the tensors of the graph's inputs."""
        for name, tensor in zip(self._graph.inputs, batch, strict=True):
            self._tensors[Value(name)] = tensor.name
            self._ends[name] = (tensor.op.name,)
        if self._loop is None:
            self._emit_all(self._graph.nodes)
            last = self._final_ops()
        else:
            self._emit_all(self._loop.before)
            last = self._emit_loop(self._loop)
            self._emit_all(self._loop.after)
            last += self._final_ops()
        self.final_ops = last

    def outputs(self) -> list[Any]:
        """Return the outputs of the graph, whose nodes are emitted."""
        return [self._output(self._tensor(value)) for value in self._graph.outputs]

    def ends_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the ops that have run once a node has; of a node of the loop, those after the loop."""
        return self._ends.get(name, self._loop_ends)

    def _kind(self, node: Node) -> Hashable:
        return self._keys[node.name], of_any_micro_batch(node)

    def _emit_all(self, nodes: Sequence[Node]) -> None:
        self._uses.update(self._keys[node.name] for node in nodes)
        for node in nodes:
            if node.name in self._ends:
                continue
            if self._uses[self._keys[node.name]] > _FEW:
                self._copy(node)
            else:
                self._emit(node)
        self._import_copies()

    def _emit_loop(self, state: SteadyState) -> list[Any]:
        """Emit a loop, and return ops that have run once it has."""

        def ends_of(name: str) -> list[Any]:
            return [self._target.get_operation_by_name(end) for end in self._ends[name]]

        outputs = Loop(self._graph, state, self._operations, self._tensor, ends_of).emit()
        self._tensors.update((value, tensor.name) for value, tensor in outputs.tensors.items())
        self._ends.update((name, (op.name,)) for name, op in outputs.ends.items())
        self._loop_ends = tuple(op.name for op in outputs.last)
        return list(outputs.last)

    def _emit(self, node: Node) -> None:
        """Emit the ops of a node by its handler."""
        self._import_copies()
        inputs = [self._tensor(value) for value in node.inputs]
        # Outside of the control block: an op gets no edge if an input was created inside it.
        for variable in self._operations.resources(node):
            internals.capture_of(self._target, variable.handle)
        after = [self._target.get_operation_by_name(name) for name in self._ends_before(node)]
        scope = f"{self._scope}{node.name}/"
        with tf.name_scope(scope), tf.device(node.device), tf.control_dependencies(after):
            outputs, ops = self._operations.run(node, inputs)
        self._tensors.update(zip(node.values(), (tensor.name for tensor in outputs), strict=True))
        self._ends[node.name] = tuple(op.name for op in ops or [tensor.op for tensor in outputs])

    def _copy(self, node: Node) -> None:
        """Emit the ops of a node as copies of its template's."""
        key = self._keys[node.name]
        if key not in self._templates:
            with tf.init_scope():
                self._templates[key] = _make_template(self._graph, node, self._operations)
            for function in self._templates[key].library:
                if function.signature.name not in self._functions:
                    self._functions.add(function.signature.name)
                    self._copies.library.function.append(function)
        template = self._templates[key]
        captured = (internals.capture_of(self._target, tensor).name for tensor in template.captured)
        inputs = [*(self._tensors[value] for value in node.inputs), *captured]
        number = micro_batch_in_minibatch(node) if node.has(MICRO_BATCH) and node.has("micro_batches") else 0
        place = _Place(f"{self._scope}{node.name}", number, inputs, self._ends_before(node))
        self._copies.node.extend(op.copy(place) for op in template.ops)
        self._tensors.update(zip(node.values(), (place.name_of(name) for name in template.outputs), strict=True))
        self._shapes.update(zip(node.values(), template.shapes, strict=True))
        self._ends[node.name] = tuple(_op_of(place.name_of(name)) for name in template.ends)

    def _ends_before(self, node: Node) -> list[str]:
        names = [name for control in node.controls for name in self._ends[control.source]]
        after = node.strings("after") if node.op == OpName.FOLLOW else ()
        return [*names, *(name for source in after for name in self._earlier[source])]

    def _import_copies(self) -> None:
        """Import the ops that were copied since the last import."""
        if not self._copies.node:
            return
        copied = {definition.name for definition in self._copies.node}
        taken = dict.fromkeys(name for definition in self._copies.node for name in definition.input)
        others = {name: self._find(name) for name in taken if _op_of(name) not in copied}
        tf.graph_util.import_graph_def(self._copies, input_map=others, name="")
        self._copies = _new_graph_def()

    def _find(self, name: str) -> Any:
        """Return the tensor that a definition takes as ``name``; for an op to wait for, a tensor that waits for it.

        An import can let ops wait for an op outside of it only through a tensor.
        """
        if not name.startswith("^"):
            return self._target.get_tensor_by_name(name)
        op = self._target.get_operation_by_name(_op_of(name))
        if op.outputs:
            return op.outputs[0]
        with tf.name_scope(f"{op.name}/"), tf.device(op.device), tf.control_dependencies([op]):
            return tf.constant(True, name="done")

    def _tensor(self, value: Value) -> Any:
        tensor = self._find(self._tensors[value])
        if value in self._shapes:
            tensor.set_shape(self._shapes[value])
        return tensor

    def _final_ops(self) -> list[Any]:
        """Return the ops for which no node waits: the step ends when these have run."""
        waited_for = {source for node in self._graph.nodes for source in node.predecessors()}
        last = (node.name for node in self._graph.nodes if node.name not in waited_for)
        return [self._target.get_operation_by_name(name) for node in last for name in self._ends.get(node, ())]

    def _output(self, tensor: Any) -> Any:
        """Return an output on the device that computed it.

        A transfer to another device would fail with the step, and with it a rank's token, which the hang detector
        waits for.
        """
        with tf.device(tensor.device):
            return tf.identity(tensor)


# --- Templates: the ops of one node, which are copied for others


_SCOPE = f"{TEMPLATE}/"


@dataclass(frozen=True)
class _Place:
    """Where ops are copied to: the ``node`` in whose scope, the tensors that they take, and the ops they wait for.

    In a template the node is called ``TEMPLATE``, and its inputs ``#0``, ``#1`` and so on. ``number``: that
    of its micro-batch in the minibatch.
    """

    node: str
    number: int
    inputs: Sequence[str]
    after: Sequence[str]

    def name_of(self, name: str) -> str:
        """Return the name here of what is called ``name`` in a template."""
        return self.node + name[len(TEMPLATE) :] if _is_own(name) else self.inputs[int(name[1:])]


@dataclass(frozen=True)
class _Op:
    """An op of a template: its ``definition`` without inputs, the tensors that it takes, and the ops it waits for.

    ``named``: its attributes that hold the name of the node. ``numbered``: it is a constant with the number of the
    node's micro-batch.
    """

    definition: node_def_pb2.NodeDef
    inputs: tuple[str, ...]
    controls: tuple[str, ...]
    named: tuple[str, ...]
    numbered: bool

    def copy(self, place: _Place) -> node_def_pb2.NodeDef:
        """Return the definition of this op's copy."""
        result = node_def_pb2.NodeDef()
        result.CopyFrom(self.definition)
        result.name = place.name_of(result.name)
        result.input.extend(map(place.name_of, self.inputs))
        waits = dict.fromkeys(_op_of(place.name_of(name)) for name in self.controls)
        if not any(map(_is_own, self.inputs)):  # else it has them through the op from which it takes a tensor
            waits |= dict.fromkeys(place.after)
        result.input.extend(f"^{name}" for name in waits)
        for key in self.named:
            _rename(result.attr[key], place.node)
        if self.numbered:
            tensor = result.attr["value"].tensor
            tensor.CopyFrom(tf.make_tensor_proto(place.number, tensor.dtype, shape=[]))
        return result


@dataclass(frozen=True)
class _Template:
    """The ops of nodes with the same ``_template_key``.

    ``captured``: the resources that the ops take, as inputs after those of the node. ``outputs``: the tensors that are
    the node's outputs, with their ``shapes``. ``ends``: the ops that have run once the node has. ``library``: the
    functions that the ops call.
    """

    ops: tuple[_Op, ...]
    captured: tuple[Any, ...]
    outputs: tuple[str, ...]
    shapes: tuple[tf.TensorShape, ...]
    ends: tuple[str, ...]
    library: tuple[function_pb2.FunctionDef, ...]


def _template_key(graph: Graph, node: Node) -> Hashable:
    """Return what nodes have in common whose ops differ only in names, inputs and micro-batch."""
    attrs = node.without(MICRO_BATCH).attrs
    return node.op, attrs, node.has(MICRO_BATCH), node.device, node.outputs, tuple(map(graph.type_of, node.inputs))


def _make_template(graph: Graph, node: Node, operations: Operations) -> _Template:
    """Run the handler of ``node`` in a graph of its own, and return the ops that it makes."""
    made: list[Any] = []

    def handle(*inputs: Any) -> list[Any]:
        with tf.name_scope(_SCOPE), tf.device(node.device):
            outputs, ops = operations.run(as_template(node), list(inputs))
        made.append((outputs, ops or [tensor.op for tensor in outputs]))
        return outputs

    signature = [spec_of(graph.type_of(value)) for value in node.inputs]
    concrete = internals.trace_function(handle, signature, internals.NO_AUTOMATIC_CONTROL)
    outputs, ends = made[-1]  # TensorFlow traces twice where the handler makes a variable
    places = {tensor.op.name: f"#{place}" for place, tensor in enumerate(concrete.inputs)}

    def name_of(name: str) -> str:
        return places.get(_op_of(name), name)

    definition = concrete.graph.as_graph_def()
    return _Template(
        tuple(
            _read_op(proto, name_of)
            for proto in definition.node
            if proto.name.startswith(_SCOPE) and proto.name not in places
        ),
        tuple(concrete.captured_inputs),
        tuple(name_of(tensor.name) for tensor in outputs),
        tuple(tensor.shape for tensor in outputs),
        tuple(name_of(op.name) for op in ends),
        tuple(definition.library.function),
    )


def _read_op(proto: node_def_pb2.NodeDef, name_of: Callable[[str], str]) -> _Op:
    """Return an op of a template. ``name_of`` gives the name for ``_Place.name_of`` of an op or tensor of its trace."""
    definition = node_def_pb2.NodeDef()
    definition.CopyFrom(proto)
    del definition.input[:]
    return _Op(
        definition,
        tuple(name_of(name) for name in proto.input if not name.startswith("^")),
        tuple(name_of(name[1:]) for name in proto.input if name.startswith("^")),
        tuple(
            key for key, value in definition.attr.items() if TEMPLATE.encode() in b" ".join([value.s, *value.list.s])
        ),
        proto.op == "Const" and proto.name.rpartition("/")[2] == MICRO_BATCH,
    )


def _is_own(name: str) -> bool:
    """Return whether a template calls an op or tensor in the scope of its node by this name."""
    return name.startswith(_SCOPE)


def _op_of(name: str) -> str:
    """Return the name of the op to which a tensor belongs, or a control edge leads."""
    return name.removeprefix("^").partition(":")[0]


def _rename(value: attr_value_pb2.AttrValue, name: str) -> None:
    """Replace the name of a template by ``name`` in the strings of an attribute."""
    before, after = TEMPLATE.encode(), name.encode()
    if value.WhichOneof("value") == "s":
        value.s = value.s.replace(before, after)
    else:
        value.list.s[:] = [text.replace(before, after) for text in value.list.s]


def _new_graph_def() -> graph_pb2.GraphDef:
    result = graph_pb2.GraphDef()
    result.versions.producer = tf.version.GRAPH_DEF_VERSION
    return result
