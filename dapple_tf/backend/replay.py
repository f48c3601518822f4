"""Locate the failure of a step: run the step again, call by call.

When several devices run at once, TensorFlow often reports a transfer that was cancelled because of the failure instead
of the failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dapple_tf.backend.operations import Operations
from graph_passes.ir.graph import Graph, Node, Value
from graph_passes.ir.names import find_minibatch, nodes_of
from graph_passes.ir.ops import OpName

# Ops that write the user's variables, and ops without a result that others use.
_SKIPPED = frozenset(
    {
        OpName.UPDATE,
        OpName.COMMIT,
        OpName.WRITE_STATISTICS,
        OpName.SET_UPDATING,
        OpName.COUNT_UPDATE,
        OpName.BARRIER,
        OpName.TIMESTAMP,
        OpName.STACK_TIMESTAMPS,
    }
)


def find_failure(graph: Graph, operations: Operations, batch: Sequence[Any]) -> str:
    """Return where a step on ``batch`` fails and why: stage, replica, micro-batch, op and message.

    "" where it does not fail again. Runs everything up to the weight update in the graph's order, and writes only
    replicas' copies of variables and accumulated gradients.
    """
    values = {Value(name): tf.convert_to_tensor(tensor) for name, tensor in zip(graph.inputs, batch, strict=True)}
    for node in graph.nodes:
        if node.op in _SKIPPED or Value(node.name) in values:
            continue
        if any(value not in values for value in node.inputs):  # computed from a skipped node
            continue
        try:
            with tf.device(node.device):
                outputs, _ = operations.run(node, [values[value] for value in node.inputs])
        except tf.errors.OpError as error:
            return f"{_describe_place(node, _count_micro_batches(graph))}: {error.message}"
        values.update(zip(node.values(), outputs, strict=True))
    return ""


def _count_micro_batches(graph: Graph) -> int:
    """Return into how many micro-batches each minibatch of an asynchronous window is cut; 0 for a synchronous step."""
    minibatches = len(nodes_of(graph, OpName.MINIBATCH))
    numbers = {node.integer("micro_batch") for node in nodes_of(graph, OpName.FORWARD)}
    return len(numbers) // minibatches if minibatches else 0


def _describe_place(node: Node, of_minibatch: int) -> str:
    """Return the place of a call; ``of_minibatch``: the micro-batches of a minibatch, 0 for a synchronous step."""
    words = {"stage": "stage", "replica": "replica", "micro_batch": "micro-batch"}
    op = node.string("of") if node.op == OpName.PART else node.op
    places = [f"{word} {node.integer(key)}" for key, word in words.items() if node.has(key)]
    if of_minibatch and node.has("micro_batch"):
        minibatch, micro_batch = divmod(node.integer("micro_batch"), of_minibatch)
        places[-1] = f"minibatch {minibatch}" + (f", micro-batch {micro_batch}" if of_minibatch > 1 else "")
    elif (number := find_minibatch(node.name)) is not None:
        places.append(f"minibatch {number}")
    return ", ".join([*places, op])
