"""Writes of variables in backward: in a custom gradient, or in what tf.recompute_grad calls again.

On one device they happen once a step, in the order of the program. In a pipeline they happen once for each micro-batch
and replica, in an order that only data and control edges fix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dapple_tf.errors import CaptureError
from dapple_tf.exactness import Inexactness
from dapple_tf.frontend.captured import Captured
from dapple_tf.graph_passes.analysis.layers import variables_of
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, ancestors
from dapple_tf.graph_passes.passes.backward import StageGradients

_REMEDY = "write it in the loss itself, or take micro_batches=1 and one replica of that stage; or pass inexact='allow'"


def check_backward_writes(captured: Captured, joint: Graph, gradients: Sequence[StageGradients]) -> None:
    """Raise CaptureError if backward writes a variable, and no gradient depends on it, or its order is unknown.

    ``joint``: the graph after differentiation; ``gradients``: of its stages, and of the loss head if any.
    """
    for i, of_stage in enumerate(gradients):
        writes = _writes(joint, of_stage)
        if not writes:
            continue
        needed = _needed(joint, of_stage)
        for node in writes:
            if node.name not in needed:
                raise CaptureError(
                    f"{_describe(captured, node)} in a custom gradient or in tf.recompute_grad, and no gradient "
                    "depends on that write, so its order among the other ops of backward is not known: write the "
                    "variable in the loss itself; in place of tf.recompute_grad give recompute=True to the pipeline"
                )
        others = [_needed(joint, other) for j, other in enumerate(gradients) if j != i]
        for node in writes:
            _check_order(captured, joint, node, needed, others)


def find_write_reasons(
    captured: Captured, joint: Graph, gradients: Sequence[StageGradients], users: Mapping[str, Sequence[int]]
) -> tuple[tuple[int, Inexactness], ...]:
    """Return for each write of backward its stage, and why it is inexact if that stage runs it more than once.

    ``gradients``: of stages, without the loss head, which runs once. ``users``: the stages that use each variable.
    Raises CaptureError if several stages use a variable that backward writes.
    """
    found = []
    for stage, of_stage in enumerate(gradients):
        for node in _writes(joint, of_stage):
            what = _describe(captured, node)
            if any(len(users[name]) > 1 for name in node.strings("writes")):
                raise CaptureError(
                    f"{what} in a custom gradient, and other stages use that variable: cut the model elsewhere, or "
                    "write it in the loss itself"
                )
            why = f"{what} once for each micro-batch and replica; one device writes it once a step"
            found.append((stage, Inexactness(node.name, why, _REMEDY)))
    return tuple(found)


def _writes(joint: Graph, of_stage: StageGradients) -> list[Node]:
    nodes = [joint.node(name) for name in of_stage.acting]
    return [node for node in nodes if node.effect is Effect.WRITE]


def _needed(joint: Graph, of_stage: StageGradients) -> set[str]:
    """Return the nodes that the gradients of a stage depend on."""
    values = [*(value for _, value in of_stage.boundary), *of_stage.of_variables]
    return ancestors(joint, [value.node for value in values])


def _check_order(
    captured: Captured, joint: Graph, write: Node, needed: Collection[str], others: Sequence[Collection[str]]
) -> None:
    """Raise CaptureError if other ops of backward use a variable of ``write`` in an order that is not known.

    On the write's stage: an op that a gradient depends on, where neither it nor the write depends on the other. On
    another stage: any such op. ``needed``: the nodes of the write's stage; ``others``: those of the other stages.
    """
    written, before = set(write.strings("writes")), ancestors(joint, [write.name])
    for node in joint.nodes:
        if node.name in captured.graph.by_name or node.name == write.name:
            continue  # forward has run by then
        if written.isdisjoint(variables_of(joint, node)):
            continue
        ordered = node.name in before or write.name in ancestors(joint, [node.name])
        if (node.name in needed and not ordered) or any(node.name in other for other in others):
            raise CaptureError(
                f"{_describe(captured, write)} in a custom gradient, and {node.name!r} ({node.op}) uses it in backward "
                "too, in an order that is not known: use the value that assign(..., read_value=True) returns, not "
                "another read of the variable, and only in that custom gradient"
            )


def _describe(captured: Captured, node: Node) -> str:
    names = [name for name in node.strings("writes") if name in captured.variables]
    return f"backward writes {', '.join(names) or 'a variable'} ({node.name!r}, {node.op})"
