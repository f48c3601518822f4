"""Interfaces of the TensorFlow handlers of call-level ops: their signature, ``Context``, and helper functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.graph_passes.ir.graph import Function, Graph, Node, Port
from dapple_tf.graph_passes.ir.names import MICRO_BATCH

Outcome = tuple[list[Any], list[Any]]
"""A node's output tensors, and the TensorFlow ops at whose end the node is done (none: the ops of the outputs)."""


class Bindings(Protocol):
    """The tf.Variables that the names in a graph stand for."""

    def variable(self, node: Node, name: str) -> tf.Variable:
        """Return the variable, or the replica's copy of it, that ``node`` reads and writes as ``name``."""

    def resource(self, node: Node, port: Port) -> tf.Variable:
        """Return the variable, or the sum of gradients, that a call passes for a port of its function."""

    def owner(self, name: str) -> tf.Variable:
        """Return the user's own variable."""

    def copies(self, node: Node, name: str) -> Sequence[tf.Variable]:
        """Return the copies of a variable that the replicas of the node's stage have in this process."""

    def accumulators(self, node: Node) -> Sequence[tf.Variable]:
        """Return the buffers in which the replica of ``node`` sums the gradients of the node's variables."""

    @property
    def updating(self) -> tf.Variable:
        """A boolean variable that is True while a step writes variables."""


class RankCommunication(Protocol):
    """Communication with the other processes of a job; see ``dapple_tf.distributed.collectives``.

    Token: an int64 that is computed once an op has completed; the step returns the sum of all tokens. ``zero``: a
    variable that the ops read, so that TensorFlow treats them as stateful. ``fits_loops``: whether an exchange can run
    in a loop, for one micro-batch after another. ``running``: a variable with the micro-batch of the last call that a
    loop has begun.
    """

    zero: tf.Variable
    fits_loops: bool
    running: tf.Variable

    def exchange(self, node: Node, inputs: Sequence[Any], micro_batch: Any = None) -> list[Any]:
        """Send ``inputs`` and receive the outputs of ``node``; return these and a token.

        ``micro_batch``: in a loop, the number of the present micro-batch, a tensor.
        """

    def all_reduce(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Return each input summed over the node's ranks, and a token."""

    def merge_state(self, node: Node, inputs: Sequence[Any]) -> list[Any]:
        """Return what ranks wrote, merged: added up, averaged, or that of the first rank; see ``OpName.COMMIT``."""

    def barrier(self, node: Node) -> Any:
        """Return a token that is computed once all of the node's ranks have reached the barrier."""

    def guard_step(self, token: Any) -> Any:
        """Enable hang detection for the step until ``token``, computed after its last exchange; return ``token``."""


Compiled = Mapping[str, Collection[str]]
"""The stage functions that XLA compiles, by name, each with its variables that live on another device."""

ChooseCompiled = Callable[[Graph, Bindings, Sequence[Function]], Compiled]
"""Returns which functions of a pipelined graph XLA compiles.

It takes the graph with its devices, the variables behind it, and the functions of all stages; a rank's graph
has only some.
"""


@dataclass(frozen=True)
class Context:
    """The data that handlers have access to.

    ``functions``: the ConcreteFunctions of the graph's stage functions, by name; ``not_inlined``: the names of those
    whose calls stay one op. ``ranks``: None where the whole graph runs in this process. ``micro_batch``: in a loop over
    micro-batches, the number of the present one, a tensor.
    """

    graph: Graph
    bindings: Bindings
    functions: dict[str, Any]
    ranks: RankCommunication | None
    not_inlined: Collection[str] = frozenset()
    micro_batch: Any = None
    shared_functions: dict[Hashable, Any] = field(default_factory=dict)

    def shared(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """Return the function that the ops of several nodes call, which ``build`` makes for the first of them."""
        if key not in self.shared_functions:
            with tf.init_scope():
                self.shared_functions[key] = build()
        return self.shared_functions[key]

    @property
    def communication(self) -> RankCommunication:
        """``ranks``, which a graph with communication nodes must have."""
        assert self.ranks is not None, "only the graph of a rank has nodes that communicate"
        return self.ranks


Handler = Callable[[Context, Node, list[Any]], Outcome]
"""Builds the TensorFlow ops of a node from the tensors of its inputs (or runs them, where TensorFlow is eager)."""


TEMPLATE = "dapple.template"
"""The name of a node whose ops are copied for other nodes; see ``dapple_tf.backend.emit``."""


def as_template(node: Node) -> Node:
    """Return ``node`` without what differs between the nodes of a template: a handler cannot read its micro-batch."""
    node = replace(node, name=TEMPLATE)
    return node.with_attrs(**{MICRO_BATCH: "any"}) if node.has(MICRO_BATCH) else node


def micro_batch_in_minibatch(node: Node) -> int:
    """Return the number of the node's micro-batch: through a window of several minibatches they are numbered on."""
    return node.integer(MICRO_BATCH) % node.integer("micro_batches")


def call(function: Any, arguments: Sequence[Any], *, not_inlined: bool = False) -> Outcome:
    """Call a ConcreteFunction: its outputs, and in a graph the ops that mark its end.

    ``not_inlined``: the call stays one op, which ends once all outputs are there. Where TensorFlow inlines the call, an
    edge from the call op waits only for side effects, and an edge from an IdentityN of all outputs for the rest: both
    ops are needed.
    """
    if tf.executing_eagerly():
        return list(function(*arguments) or ()), []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    outputs = function(*arguments)
    ops = [op for op in graph.get_operations()[before:] if op.type in internals.CALL_OPS]
    if not_inlined or not outputs:
        return list(outputs or ()), ops
    return list(outputs), [*ops, tf.identity_n(list(outputs))[0].op]


def check_finite(tensor: Any, what: str) -> Any:
    """Return the tensor, by an op that fails if the tensor is not finite; ``what`` names it in the error."""
    if tensor.dtype.is_complex:
        parts = [check_finite(part(tensor), what) for part in (tf.math.real, tf.math.imag)]
        with tf.control_dependencies(parts):
            return tf.identity(tensor)
    return tf.debugging.check_numerics(tensor, f"{what} is not finite") if tensor.dtype.is_floating else tensor


def read_variable(variable: tf.Variable) -> Any:
    """Return the variable's value, read where the op is placed in the order of the graph."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def assign_variable(variable: tf.Variable, value: Any) -> Any:
    """Return the op that assigns ``value``."""
    return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
