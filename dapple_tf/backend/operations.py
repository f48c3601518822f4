"""What each call-level op does in TensorFlow: one handler an op.

The same handlers build the step's graph (``emit``) and run it node by node to find a failure (``replay``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend.stage_function import build_function
from graph_passes.ir.graph import Graph, Node
from graph_passes.ir.ops import OpName

Outcome = tuple[list[Any], list[Any]]
"""A node's output tensors, and the ops that mark it done (none: those that make the outputs)."""


class Bindings(Protocol):
    """Which tf.Variable a name means at a place."""

    def variable(self, node: Node, name: str) -> tf.Variable:
        """The variable (or this replica's copy of it) that ``node`` reads and writes as ``name``."""

    def owner(self, name: str) -> tf.Variable:
        """The user's own variable."""

    def copies(self, name: str) -> Sequence[tf.Variable]:
        """The replicas' copies of a variable that forward writes."""

    def accumulators(self, node: Node) -> Sequence[tf.Variable]:
        """The buffers in which the replica of ``node`` sums the gradients of the node's variables."""

    @property
    def updating(self) -> tf.Variable:
        """True on the device while weights are being written."""


class Ranks(Protocol):
    """Exchanges and sums with the other processes of a job; see ``dapple_tf.distributed.collectives``."""

    zero: tf.Variable

    def exchange(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Send inputs, receive outputs and a token."""

    def sum(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Each input summed over the node's ranks."""

    def average(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Each input averaged over the node's ranks."""

    def meet(self, node: Node) -> Any:
        """A token that is there when all of the node's ranks have come so far."""

    def sent(self, total: Any) -> Any:
        """The sum of all tokens, which says that everything has been exchanged, for the step to return."""


class Operations:
    """The handlers for one pipelined graph, with its stage functions built.

    ``inline``: TensorFlow may inline stage functions that are called once (see ``build_function``), and it may always
    inline those whose calls say so. ``ranks``: the way to other processes, where the graph is one rank's.
    """

    def __init__(
        self,
        graph: Graph,
        bindings: Bindings,
        constants: Mapping[str, tf.Tensor],
        library: Mapping[str, bytes],
        inline: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self.graph = graph
        self.bindings = bindings
        self._ranks = ranks
        calls = Counter(node.string("function") for node in graph.nodes if node.has("function"))
        parted = {node.string("function") for node in graph.nodes if node.has("inline")}
        self.functions = {
            f.name: build_function(
                f, constants, library, whole=f.name not in parted and (not inline or calls[f.name] > 1)
            )
            for f in graph.functions
        }

    def run(self, node: Node, inputs: list[Any]) -> Outcome:
        """Make the ops of ``node``, or run them where TensorFlow is eager."""
        return HANDLERS[OpName(node.op)](self, node, inputs)

    def resources(self, node: Node) -> list[tf.Variable]:
        """The variables whose resources ``node`` takes."""
        if node.op == OpName.ACCUMULATE or (node.op == OpName.GRADIENTS and not node.inputs):
            return list(self.bindings.accumulators(node))
        if self._ranks is not None and node.has("ranks"):
            return [self._ranks.zero]
        if node.op in (OpName.READ_VARIABLE, OpName.READ_STATE):
            return [self.bindings.variable(node, name) for name in node.strings("variables")]
        if node.op == OpName.SET_UPDATING:
            return [self.bindings.updating]
        if node.op == OpName.REFRESH:
            names = node.strings("variables")
            owners = [self.bindings.owner(name) for name in names[len(node.inputs) :]]
            return [*owners, *(self.bindings.variable(node, name) for name in names)]
        if node.op == OpName.COMMIT:
            return [v for n in node.strings("variables") for v in (self.bindings.owner(n), *self.bindings.copies(n))]
        if node.has("function"):
            ports = self.graph.function(node.string("function")).input_ports("variable")
            return [self.bindings.variable(node, port.name) for _, port in ports]
        return []

    def _call(self, node: Node, inputs: list[Any]) -> Outcome:
        function = self.graph.function(node.string("function"))
        values = iter(inputs)
        arguments = [
            self.bindings.variable(node, port.name).handle if port.role == "variable" else next(values)
            for port in function.inputs
        ]
        return call(self.functions[function.name], arguments)

    def _batch_size(self, node: Node, inputs: list[Any]) -> Outcome:
        return [tf.shape(inputs[0], out_type=tf.int64)[0]], []

    def _slice(self, node: Node, inputs: list[Any]) -> Outcome:
        size, *tensors = inputs
        if node.integer("micro_batches") == 1 and node.integer("replicas") == 1:
            return [tf.ones([], tf.float64), *tensors], []
        low, high = slice_bounds(size, node)
        weight = tf.cast(high - low, tf.float64) / tf.cast(size, tf.float64)
        return [weight, *(tensor[low:high] for tensor in tensors)], []

    def _cast(self, node: Node, inputs: list[Any]) -> Outcome:
        return [tf.cast(inputs[0], node.outputs[0].dtype.name)], []

    def _split(self, node: Node, inputs: list[Any]) -> Outcome:
        size, *tensors = inputs
        low, high = slice_bounds(size, node)
        begin, end = micro_batch_bounds(size, node)
        of, outputs = node.integer("of"), []
        for tensor, axis in zip(tensors, node.integers("axes"), strict=True):
            for j in node.integers("receivers"):
                first = tf.maximum(low, begin + (end - begin) * j // of) - low
                last = tf.minimum(high, begin + (end - begin) * (j + 1) // of) - low
                outputs.append(slice_axis(tensor, axis, first, last))
        return outputs, []

    def _concat(self, node: Node, inputs: list[Any]) -> Outcome:
        pieces = node.integer("pieces")
        groups = [inputs[i : i + pieces] for i in range(0, len(inputs), pieces)]
        return [tf.concat(group, axis) for group, axis in zip(groups, node.integers("axes"), strict=True)], []

    def _add(self, node: Node, inputs: list[Any]) -> Outcome:
        pieces = node.integer("pieces")
        if not pieces:
            return [tf.zeros(kind.shape.dims, kind.dtype.name) for kind in node.outputs], []
        return [tf.add_n(inputs[i : i + pieces]) for i in range(0, len(inputs), pieces)], []

    def _accumulate(self, node: Node, inputs: list[Any]) -> Outcome:
        first = bool(node.attr("first"))
        bucket = node.integer("bucket") if node.has("bucket") else "all"
        key = f"accumulate/{node.integer('stage')}/{bucket}/{first}"
        if key not in self.functions:
            with tf.init_scope():
                self.functions[key] = _accumulator([value.dtype for value in inputs], first)
        handles = [variable.handle for variable in self.bindings.accumulators(node)]
        return call(self.functions[key], [*handles, *inputs])

    def _gradients(self, node: Node, inputs: list[Any]) -> Outcome:
        if inputs:
            return [tf.identity(tensor) for tensor in inputs], []  # done when these are there, not the whole backward
        variables = self.bindings.accumulators(node)
        return [tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype) for v in variables], []

    def _exchange(self, node: Node, inputs: list[Any]) -> Outcome:
        return self._others.exchange(node, inputs), []

    def _average_state(self, node: Node, inputs: list[Any]) -> Outcome:
        return self._others.average(node, inputs), []

    def _collect_tokens(self, node: Node, inputs: list[Any]) -> Outcome:
        total = tf.add_n(inputs)
        return [self._others.sent(total)], [total.op]

    def _read_variables(self, node: Node, inputs: list[Any]) -> Outcome:
        return [_read_variable(self.bindings.variable(node, name)) for name in node.strings("variables")], []

    @property
    def _others(self) -> Ranks:
        assert self._ranks is not None, "only a rank's graph has exchanges"
        return self._ranks

    def _allreduce(self, node: Node, inputs: list[Any]) -> Outcome:
        if node.has("ranks"):
            return self._others.sum(node, inputs), []
        count = len(node.outputs)
        return [tf.add_n(inputs[i::count]) for i in range(count)], []

    def _tied_sum(self, node: Node, inputs: list[Any]) -> Outcome:
        return [tf.add_n(inputs)], []

    def _reduced_gradients(self, node: Node, inputs: list[Any]) -> Outcome:
        if not node.has("check"):
            return [tf.identity(tensor) for tensor in inputs], []
        where = f"on stage {node.integer('stage')} the gradient of variable"
        names = node.strings("variables")
        return [_check(tensor, f"{where} {name!r}") for tensor, name in zip(inputs, names, strict=True)], []

    def _square_norm(self, node: Node, inputs: list[Any]) -> Outcome:
        # No additions, which TensorFlow joins into one where nothing else takes a sum: ranks of a stage would round
        # otherwise, and drift apart.
        return [tf.reduce_sum(tf.stack([tf.cast(tf.reduce_sum(tf.square(g)), tf.float64) for g in inputs]))], []

    def _global_norm(self, node: Node, inputs: list[Any]) -> Outcome:
        return [tf.sqrt(tf.reduce_sum(tf.stack(inputs)))], []

    def _clip(self, node: Node, inputs: list[Any]) -> Outcome:
        norm, *gradients = inputs
        limit = tf.constant(node.attr("limit"), tf.float64)  # tf.cast would round a Python float to float32
        scale = limit / tf.maximum(norm, limit)
        return [gradient * tf.cast(scale, gradient.dtype) for gradient in gradients], []

    def _refresh(self, node: Node, inputs: list[Any]) -> Outcome:
        names = node.strings("variables")
        values = [*inputs, *(_read_variable(self.bindings.owner(name)) for name in names[len(inputs) :])]
        copies = [self.bindings.variable(node, name) for name in names]
        return [], [_assign(copy, value) for copy, value in zip(copies, values, strict=True)]

    def _commit(self, node: Node, inputs: list[Any]) -> Outcome:
        ops = []
        if inputs:
            owners = [self.bindings.owner(name) for name in node.strings("variables")]
            return [], [_assign(owner, value) for owner, value in zip(owners, inputs, strict=True)]
        for name in node.strings("variables"):
            values = [_read_variable(copy) for copy in self.bindings.copies(name)]
            mean = len(values) > 1 and values[0].dtype.is_floating
            merged = tf.add_n(values) / len(values) if mean else values[0]
            ops.append(_assign(self.bindings.owner(name), merged))
        return [], ops

    def _merge(self, node: Node, inputs: list[Any]) -> Outcome:
        outputs, ops = self._merged(node, inputs)
        return ([_check(outputs[0], "the loss")], []) if node.has("check") else (outputs, ops)

    def _merged(self, node: Node, inputs: list[Any]) -> Outcome:
        values, weights = inputs[::2], inputs[1::2]
        if len(values) == 1:
            return [tf.identity(values[0])], []
        match node.string("kind"):
            case "concat":
                return [tf.concat(values, 0)], []
            case "sum":
                return [tf.add_n(values)], []
        return [tf.add_n([v * tf.cast(w, v.dtype) for v, w in zip(values, weights, strict=True)])], []

    def _barrier(self, node: Node, inputs: list[Any]) -> Outcome:
        return ([self._others.meet(node)], []) if node.has("ranks") else ([], [tf.no_op()])

    def _set_updating(self, node: Node, inputs: list[Any]) -> Outcome:
        value = tf.constant(bool(node.attr("updating")))
        return [], [_assign(self.bindings.updating, value)]

    def _timestamp(self, node: Node, inputs: list[Any]) -> Outcome:
        return [tf.timestamp()], []

    def _stack_timestamps(self, node: Node, inputs: list[Any]) -> Outcome:
        return [tf.stack(inputs)], []


HANDLERS: Mapping[OpName, Callable[[Operations, Node, list[Any]], Outcome]] = MappingProxyType(
    {
        OpName.BATCH_SIZE: Operations._batch_size,
        OpName.SLICE: Operations._slice,
        OpName.FORWARD: Operations._call,
        OpName.CAST: Operations._cast,
        OpName.BACKWARD: Operations._call,
        OpName.WEIGHTS: Operations._call,
        OpName.SPLIT: Operations._split,
        OpName.CONCAT: Operations._concat,
        OpName.ADD: Operations._add,
        OpName.ACCUMULATE: Operations._accumulate,
        OpName.GRADIENTS: Operations._gradients,
        OpName.ALLREDUCE: Operations._allreduce,
        OpName.TIED_SUM: Operations._tied_sum,
        OpName.REDUCED_GRADIENTS: Operations._reduced_gradients,
        OpName.SQUARE_NORM: Operations._square_norm,
        OpName.GLOBAL_NORM: Operations._global_norm,
        OpName.CLIP: Operations._clip,
        OpName.MERGE: Operations._merge,
        OpName.BARRIER: Operations._barrier,
        OpName.SET_UPDATING: Operations._set_updating,
        OpName.UPDATE: Operations._call,
        OpName.REFRESH: Operations._refresh,
        OpName.COMMIT: Operations._commit,
        OpName.READ_VARIABLE: Operations._read_variables,
        OpName.READ_STATE: Operations._read_variables,
        OpName.AVERAGE_STATE: Operations._average_state,
        OpName.EXCHANGE: Operations._exchange,
        OpName.COLLECT_TOKENS: Operations._collect_tokens,
        OpName.TIMESTAMP: Operations._timestamp,
        OpName.STACK_TIMESTAMPS: Operations._stack_timestamps,
    }
)
"""The handler of each call-level op but ``input``, whose tensors ``emit`` and ``replay`` are given."""


def call(function: Any, arguments: Sequence[Any]) -> Outcome:
    """Call a ConcreteFunction in the graph being built: its outputs, and the ops that mark its end.

    Where TensorFlow inlines the call, the call op stands for its side effects only, and an IdentityN of all
    outputs for the rest; both are waited for.
    """
    if tf.executing_eagerly():
        return list(function(*arguments) or ()), []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    outputs = function(*arguments)
    ops = [op for op in graph.get_operations()[before:] if op.type in internals.CALL_OPS]
    if not outputs:
        return [], ops
    return list(outputs), [*ops, tf.identity_n(list(outputs))[0].op]


def _check(tensor: Any, what: str) -> Any:
    """The tensor; an error where it is not finite."""
    if tensor.dtype.is_complex:
        with tf.control_dependencies([_check(tf.math.real(tensor), what), _check(tf.math.imag(tensor), what)]):
            return tf.identity(tensor)
    return tf.debugging.check_numerics(tensor, f"{what} is not finite") if tensor.dtype.is_floating else tensor


def _read_variable(variable: tf.Variable) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _assign(variable: tf.Variable, value: Any) -> Any:
    return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def _accumulator(dtypes: Sequence[tf.DType], first: bool) -> Any:
    """A function (buffers, gradients) that stores the first gradients and adds the others."""

    def accumulate(*inputs: Any) -> None:
        handles, values = inputs[: len(dtypes)], inputs[len(dtypes) :]
        for handle, value in zip(handles, values, strict=True):
            write = tf.raw_ops.AssignVariableOp if first else tf.raw_ops.AssignAddVariableOp
            write(resource=handle, value=value)

    specs = [tf.TensorSpec([], tf.resource)] * len(dtypes) + [tf.TensorSpec(None, dtype) for dtype in dtypes]
    attributes = {internals.NO_INLINE: True}
    traced = tf.function(accumulate, autograph=False, input_signature=specs, experimental_attributes=attributes)
    return traced.get_concrete_function()


def micro_batch_bounds(size: Any, node: Node) -> tuple[Any, Any]:
    """First and end sample of the node's micro-batch in a batch of ``size`` samples."""
    m, count = node.integer("micro_batch"), node.integer("micro_batches")
    return size * m // count, size * (m + 1) // count


def slice_bounds(size: Any, node: Node) -> tuple[Any, Any]:
    """First and end sample of the node's replica's share of its micro-batch."""
    begin, end = micro_batch_bounds(size, node)
    i, r = node.integer("replica"), node.integer("replicas")
    return begin + (end - begin) * i // r, begin + (end - begin) * (i + 1) // r


def slice_axis(tensor: Any, axis: int, first: Any, last: Any) -> Any:
    """``tensor[..., first:last, ...]`` on one axis."""
    return tensor[(slice(None),) * axis + (slice(first, last),)]
