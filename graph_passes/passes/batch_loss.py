"""Call the loss head of a model once a step, on the rows of all micro-batches (see ``analysis.loss_head``).

The last stage's forward gives rows of the inputs of the loss head. When all micro-batches have run forward,
``gather_rows`` puts their rows together in sample order, ``loss_head`` computes the loss and its gradients from them,
and ``cut_rows`` cuts the gradients of the rows into micro-batches again. Each backward of the last stage starts with
its piece. All three run on the first replica of the last stage.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

from dapple_tf.errors import ScheduleError
from dapple_tf.graph_passes.analysis.loss_head import LossHeadInput
from dapple_tf.graph_passes.ir.graph import Function, Node, Port, TensorType, Value, make_node, tensor
from dapple_tf.graph_passes.ir.names import Site, at, of_replica
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.schedules.schedule import Schedule

LOSS_HEAD_OPS = frozenset({OpName.GATHER_ROWS, OpName.LOSS_HEAD, OpName.CUT_ROWS})
"""Ops that run once a step, on the first replica of the last stage."""


def check_forwards_first(schedule: Schedule) -> None:
    """Raise ScheduleError unless the last stage runs all forwards before its first backward."""
    last, m = len(schedule.stages) - 1, schedule.micro_batches
    if schedule.warm_up[-1] < m:
        raise ScheduleError(
            f"with batch_loss the loss needs the rows of all M={m} micro-batches, but stage {last} runs backward after "
            f"K={schedule.warm_up[-1]} of them: use schedule 'gpipe' (or 'auto')"
        )


def call_loss_head(
    function: Function,
    stage: int,
    head_inputs: Sequence[LossHeadInput],
    pieces: Callable[[str], Sequence[Value]],
    source: Callable[[Port], Value],
) -> tuple[list[Node], dict[str, list[Value]]]:
    """Return the nodes that run the loss head after ``stage``, and the gradient of each of its inputs, by micro-batch.

    ``pieces``: returns the values of an input of the loss head, one for each micro-batch. ``source``: returns the value
    of any other input of the function. The second of the nodes is the call of ``function``.
    """
    kinds = {port.name: port.type for _, port in function.input_ports("boundary")}
    kinds |= {port.name: port.type for _, port in function.output_ports("gradient")}
    taken = {str(entry.value): entry for entry in head_inputs if str(entry.value) in kinds}
    parts = [pieces(name) for name in taken]
    count = len(parts[0])
    gathered = [*(kinds[name] for name in taken), *(tensor("int64", count) for _ in taken)]
    gather = _row_node(OpName.GATHER_ROWS, stage, taken.values(), count, itertools.chain(*parts), gathered)
    whole = dict(zip(taken, gather.values(), strict=False))
    lengths = dict(zip(taken, gather.values()[len(taken) :], strict=True))
    inputs = (whole[port.name] if port.role == "boundary" else source(port) for port in function.passed)
    call = function.call(at(stage, 0, what=OpName.LOSS_HEAD), OpName.LOSS_HEAD, inputs, replica=0, stage=stage)
    given = {port.name: Value(call.name, i) for i, port in function.output_ports("gradient")}
    if not given:
        return [gather, call], {}
    cut_entries = {name: entry for name, entry in taken.items() if name in given}
    tensors = [*(given[name] for name in cut_entries), *(lengths[name] for name in cut_entries)]
    cut_kinds = [kinds[name] for name in cut_entries for _ in range(count)]
    cut = _row_node(OpName.CUT_ROWS, stage, cut_entries.values(), count, tensors, cut_kinds)
    return [gather, call, cut], {name: list(cut.values()[k * count :][:count]) for k, name in enumerate(cut_entries)}


def _row_node(
    op: OpName,
    stage: int,
    entries: Collection[LossHeadInput],
    count: int,
    inputs: Iterable[Value],
    outputs: Iterable[TensorType],
) -> Node:
    """Return the node that gathers or cuts rows of these inputs of the loss head, in ``count`` pieces."""
    axes, outer = tuple(entry.axis for entry in entries), tuple(entry.outer for entry in entries)
    site = Site(stage)
    return make_node(at(*site, what=op), op, inputs, outputs, **site.attrs, axes=axes, outer=outer, pieces=count)


def replicate_loss_head(node: Node, replicas: int) -> Node:
    """Return ``node``, one of ``LOSS_HEAD_OPS``, for ``replicas`` replicas of the last stage.

    The pieces of a tensor are those of all replicas of the first micro-batch, then those of the second one, and so on:
    the order of the samples.
    """
    if node.op == OpName.LOSS_HEAD or replicas == 1:
        return node
    count = node.integer("pieces")
    if node.op == OpName.CUT_ROWS:
        outputs = tuple(kind for kind in node.outputs for _ in range(replicas))
        node = dataclasses.replace(node, outputs=outputs)
    else:
        tensors = len(node.integers("axes"))
        inputs = tuple(Value(of_replica(v.node, r), v.index) for v in node.inputs for r in range(replicas))
        lengths = tuple(tensor("int64", count * replicas) for _ in range(tensors))
        node = dataclasses.replace(node, inputs=inputs, outputs=(*node.outputs[:tensors], *lengths))
    return node.with_attrs(pieces=count * replicas)


def piece_of_replica(value: Value, replica: int, replicas: int) -> Value:
    """Return the piece that ``replica`` takes where one replica would take ``value``, an output of ``cut_rows``."""
    return Value(value.node, value.index * replicas + replica)
