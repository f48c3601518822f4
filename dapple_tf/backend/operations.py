"""The TensorFlow ops of each call-level op: one handler an op.

The same handlers build the step's graph (``emit``) and run it node by node to locate a failure (``replay``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.backend import batch_handlers, gradient_handlers
from dapple_tf.backend.branches import build_branches
from dapple_tf.backend.handler import (
    Bindings,
    Compiled,
    Context,
    Handler,
    Outcome,
    RankCommunication,
    assign_variable,
    call,
    read_variable,
)
from dapple_tf.backend.stage_function import build_compiled_function, build_function
from dapple_tf.frontend.batch_norms import join
from dapple_tf.graph_passes.analysis.layers import written_variables
from dapple_tf.graph_passes.ir.graph import BOUND_ROLES, Graph, Node
from dapple_tf.graph_passes.ir.names import nodes_of
from dapple_tf.graph_passes.ir.ops import CALL_OPS, OpName

# --- Handlers of the ops that read and write variables and the replicas' copies of them


def _read_variables(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    return [read_variable(context.bindings.variable(node, name)) for name in node.strings("variables")], []


def _refresh(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    names = node.strings("variables")
    summed = node.get("summed", ())
    owned = [read_variable(context.bindings.owner(name)) for name in names[len(inputs) :]]
    zeroed = [tf.zeros_like(v) if n in summed else v for n, v in zip(names[len(inputs) :], owned, strict=True)]
    values = [*inputs, *zeroed]
    copies = [context.bindings.variable(node, name) for name in names]
    return [], [assign_variable(copy, value) for copy, value in zip(copies, values, strict=True)]


def _store_version(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    owners = [context.bindings.owner(name) for name in node.strings("variables")]
    stored = [context.bindings.variable(node, name) for name in node.strings("variables")]
    dtypes = tuple(variable.dtype for variable in owners)
    copy = context.shared((node.op, dtypes), lambda: _build_copier(dtypes))
    handles = [variable.handle for variable in (*owners, *stored)]
    return call(copy, handles, not_inlined=True)


def _build_copier(dtypes: Sequence[tf.DType]) -> Any:
    """Return a function (sources, targets) that gives variables of these dtypes the values of others.

    A window stores a version for each of its minibatches. As two ops a variable that takes 0.4 MB of memory for eight
    variables, whatever their size; as a call 0.15 MB.
    """

    def copy(*handles: Any) -> None:
        count = len(dtypes)
        for source, target, dtype in zip(handles[:count], handles[count:], dtypes, strict=True):
            value = tf.raw_ops.ReadVariableOp(resource=source, dtype=dtype)
            tf.raw_ops.AssignVariableOp(resource=target, value=value)

    return internals.trace_function(copy, [tf.TensorSpec([], tf.resource)] * (2 * len(dtypes)), internals.NO_INLINE)


def _commit(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    owners = [context.bindings.owner(name) for name in node.strings("variables")]
    values = inputs or [_merge_copies(context, node, name) for name in node.strings("variables")]
    return [], [assign_variable(owner, value) for owner, value in zip(owners, values, strict=True)]


def _merge_copies(context: Context, node: Node, name: str) -> Any:
    """Return the sum of the replicas' copies where it is so marked; else their average, if they are floating-point."""
    values = [read_variable(copy) for copy in context.bindings.copies(node, name)]
    if name in node.get("summed", ()):
        return tf.add_n(values)
    mean = node.integer("replicas") > 1 and len(values) > 1 and values[0].dtype.is_floating
    return tf.add_n(values) / len(values) if mean else values[0]


def _set_updating(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    return [], [assign_variable(context.bindings.updating, tf.constant(bool(node.attr("updating"))))]


def _count_update(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    name = node.string("variable")
    count = read_variable(context.bindings.owner(name))
    offset = tf.constant(node.integer("offset"), count.dtype)
    return [], [assign_variable(context.bindings.variable(node, name), count + offset)]


# --- The TensorFlow ops of each call-level op: one handler an op


_REDUCE: Mapping[str, Callable[[Any, int], Any]] = MappingProxyType(
    {
        "sum": tf.reduce_sum,
        "product": tf.reduce_prod,
        "max": tf.reduce_max,
        "min": tf.reduce_min,
        "all": tf.reduce_all,
        "any": tf.reduce_any,
    }
)


class Operations:
    """The handlers for one pipelined graph, whose stage functions are built.

    ``inline``: whether TensorFlow may inline the stage functions of a graph that calls each of them once (see
    ``build_function``); it may always inline those whose calls have the attribute ``inline``. It may inline no function
    of a stage whose backward writes variables: a call that is one op waits for all its inputs, so backward cannot write
    before forward has read. Nor any of an asynchronous window, even of one minibatch: an update waits for the gradients
    only, and an inlined backward may read the weights after it has computed these. ``ranks``: communication with the
    other processes, for the graph of one rank. ``compiled``: the functions that XLA compiles.

    The attribute ``inlines_nothing``: TensorFlow may inline no stage function, so the graph itself has nothing to
    optimise.
    """

    def __init__(
        self,
        graph: Graph,
        bindings: Bindings,
        constants: Mapping[str, tf.Tensor],
        library: Mapping[str, bytes],
        inline: bool = True,
        ranks: RankCommunication | None = None,
        compiled: Compiled = MappingProxyType({}),
    ) -> None:
        self.bindings = bindings
        calls = Counter(node.string("function") for node in graph.nodes if node.has("function"))
        inlined = {node.string("function") for node in graph.nodes if node.has("inline")}
        self._branches = [build_branches(f, constants, library) for f in graph.functions if calls[f.name]]
        inline = inline and set(calls.values()) <= {1} and not nodes_of(graph, OpName.MINIBATCH)
        never_inlined = _never_inlined(graph)
        functions, inlinable = {}, set()
        for built in self._branches:
            function, every = built.function, {**library, **built.library}
            name = function.name
            if name in compiled:
                functions[name] = build_compiled_function(function, constants, every, compiled[name])
            else:
                whole = name in never_inlined or (name not in inlined and not inline)
                if not whole:
                    inlinable.add(name)
                functions[name] = build_function(function, constants, every, whole=whole)
        self.inlines_nothing = not inlinable
        self._context = Context(graph, bindings, functions, ranks, not_inlined=functions.keys() - inlinable)

    def run(self, node: Node, inputs: list[Any], micro_batch: Any = None) -> Outcome:
        """Build the TensorFlow ops of ``node``, or run them where TensorFlow is eager.

        ``micro_batch``: in a loop over micro-batches, the number of the present one, a tensor.
        """
        context = self._context if micro_batch is None else replace(self._context, micro_batch=micro_batch)
        return HANDLERS[OpName(node.op)](context, node, inputs)

    def resources(self, node: Node) -> list[tf.Variable]:
        """Return the variables whose resources the ops of ``node`` take."""
        bindings = self.bindings
        if self._context.ranks is not None and node.has("ranks"):
            return [self._context.ranks.zero]
        match node.op:
            case OpName.ACCUMULATE | OpName.CLEAR_SUMS:
                return list(bindings.accumulators(node))
            case OpName.GRADIENTS:
                return [] if node.inputs else list(bindings.accumulators(node))
            case OpName.READ_VARIABLE | OpName.READ_STATE:
                return [bindings.variable(node, name) for name in node.strings("variables")]
            case OpName.SET_UPDATING:
                return [bindings.updating]
            case OpName.REFRESH:
                names = node.strings("variables")
                owners = [bindings.owner(name) for name in names[len(node.inputs) :]]
                return [*owners, *(bindings.variable(node, name) for name in names)]
            case OpName.STORE_VERSION:
                return [v for n in node.strings("variables") for v in (bindings.owner(n), bindings.variable(node, n))]
            case OpName.COUNT_UPDATE:
                return [bindings.owner(node.string("variable")), bindings.variable(node, node.string("variable"))]
            case OpName.COMMIT:
                return [v for n in node.strings("variables") for v in (bindings.owner(n), *bindings.copies(node, n))]
        if node.has("function"):
            ports = self._context.graph.function(node.string("function")).input_ports(*BOUND_ROLES)
            noted = [] if self._context.ranks is None else [self._context.ranks.running]
            return [*noted, *(bindings.resource(node, port) for _, port in ports)]
        return []

    @property
    def running(self) -> int | None:
        """The micro-batch of the last call that a loop of a rank has begun; None where there are no ranks."""
        return None if self._context.ranks is None else int(self._context.ranks.running)


def _call(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    function = context.graph.function(node.string("function"))
    values = iter(inputs)
    arguments = [
        context.bindings.resource(node, port).handle if port.role in BOUND_ROLES else next(values)
        for port in function.inputs
    ]
    with tf.control_dependencies(_note_running(context)):
        return call(context.functions[function.name], arguments, not_inlined=function.name in context.not_inlined)


def _note_running(context: Context) -> list[Any]:
    """Return ops that note the micro-batch of a call before it runs: in a loop its ops do not have the number."""
    if context.ranks is None or context.micro_batch is None:
        return []
    with tf.device(context.ranks.running.device):
        return [assign_variable(context.ranks.running, context.micro_batch)]


def _join(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    count = node.integer("pieces")
    pieces = (inputs[i : i + count] for i in range(0, len(inputs), count))
    return [join(kind, tensors) for kind, tensors in zip(node.strings("kinds"), pieces, strict=True)], []


def _combine_partials(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    count = node.integer("pieces")
    pieces = (tf.stack(inputs[i : i + count]) for i in range(0, len(inputs), count))
    return [_REDUCE[kind](each, 0) for kind, each in zip(node.strings("operations"), pieces, strict=True)], []


def _exchange(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    return context.communication.exchange(node, inputs, context.micro_batch), []


def _collect_tokens(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    total = tf.add_n(inputs)
    return [context.communication.guard_step(total) if node.get("guarded", True) else total], [total.op]


def _barrier(context: Context, node: Node, inputs: list[Any]) -> Outcome:
    return ([context.communication.barrier(node)], []) if node.has("ranks") else ([], [tf.no_op()])


def _never_inlined(graph: Graph) -> set[str]:
    """Return the names of all functions of the stages whose backward writes variables."""
    stages = {
        function.name.partition("/")[0]
        for function in graph.functions
        if any(op in function.name for op in (OpName.BACKWARD, OpName.INPUTS)) and written_variables(function.graph)
    }
    return {function.name for function in graph.functions if function.name.partition("/")[0] in stages}


HANDLERS: Mapping[OpName, Handler] = MappingProxyType(
    {
        **batch_handlers.HANDLERS,
        **gradient_handlers.HANDLERS,
        OpName.READ_VARIABLE: _read_variables,
        OpName.READ_STATE: _read_variables,
        OpName.REFRESH: _refresh,
        OpName.STORE_VERSION: _store_version,
        OpName.COMMIT: _commit,
        OpName.SET_UPDATING: _set_updating,
        OpName.COUNT_UPDATE: _count_update,
        **dict.fromkeys(CALL_OPS, _call),
        OpName.COMBINE_PARTIALS: _combine_partials,
        OpName.JOIN: _join,
        OpName.BARRIER: _barrier,
        OpName.MERGE_STATE: lambda context, node, inputs: (context.communication.merge_state(node, inputs), []),
        OpName.EXCHANGE: _exchange,
        OpName.COLLECT_TOKENS: _collect_tokens,
        OpName.FOLLOW: lambda context, node, inputs: ([], [tf.no_op()]),
        OpName.TIMESTAMP: lambda context, node, inputs: ([tf.timestamp()], []),
        OpName.STACK_TIMESTAMPS: lambda context, node, inputs: ([tf.stack(inputs)], []),
    }
)
"""The handler of each call-level op except ``input``, whose tensors are the arguments of the step."""
