"""After a step has failed: run it again call by call, to say where.

When several devices run at once, TensorFlow often reports a transfer that was cancelled because of the failure,
and not the failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dapple_tf.backend.operations import Operations
from graph_passes.ir.graph import Graph, Node, Value
from graph_passes.ir.ops import OpName

# What a failed step must not do again, or what has no result.
_LEFT_OUT = frozenset(
    {
        OpName.UPDATE,
        OpName.COMMIT,
        OpName.SET_UPDATING,
        OpName.BARRIER,
        OpName.TIMESTAMP,
        OpName.STACK_TIMESTAMPS,
    }
)


def find_failure(graph: Graph, operations: Operations, batch: Sequence[Any]) -> str:
    """Where the step fails and why: stage, micro-batch and message; "" when it does not fail again.

    Everything up to the weight update is run, in order; only copies of variables and sums of gradients are
    written.
    """
    values = {Value(name): tf.convert_to_tensor(tensor) for name, tensor in zip(graph.inputs, batch, strict=True)}
    for node in graph.nodes:
        if node.op in _LEFT_OUT or Value(node.name) in values:
            continue
        if any(value not in values for value in node.inputs):
            continue
        try:
            with tf.device(node.device):
                outputs, _ = operations.run(node, [values[value] for value in node.inputs])
        except tf.errors.OpError as error:
            return f"{_place(node)}: {error.message}"
        values.update(zip(node.values(), outputs, strict=True))
    return ""


def _place(node: Node) -> str:
    words = {"micro_batch": "micro-batch"}
    parts = [
        f"{words.get(key, key)} {node.integer(key)}" for key in ("stage", "replica", "micro_batch") if node.has(key)
    ]
    return ", ".join([*parts, node.op])
