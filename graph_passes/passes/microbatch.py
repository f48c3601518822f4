"""Build the call-level graph: each stage's forward, backward and weight gradients, once for each micro-batch.

Micro-batch m of M has the samples [N m / M, N (m+1) / M) of a batch of N, or its given size (see
``analysis.row_bounds``). Backward starts from the micro-batch's share n / N of the batch, so that the gradients are
those of the mean over the whole batch even where the micro-batches are uneven (DAPPLE, Fig. 10, with the weights that
make it exact). Where the loss is a sum over samples, backward starts from 1. Where the optimizer scales the loss, the
share or the 1 is multiplied by the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.analysis.loss_head import LossHeadInput
from dapple_tf.graph_passes.ir.graph import OTHER, Graph, Node, TensorType, Value, make_node, tensor
from dapple_tf.graph_passes.ir.names import BACKWARD_OPS, BATCH_SIZE_NAME, at
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.stage_calls import StageCalls

_HALVES = OpName.INPUTS, OpName.WEIGHTS

MergeKind = Literal["concat", "mean", "sum", "first"]
"""The operation that merges the aux outputs of the micro-batches into one of the step."""


def merge_kind(kind: TensorType) -> MergeKind:
    """Return how to merge an aux output of this type over the micro-batches.

    Tensors with the batch on axis 0 are concatenated in sample order, other floats averaged by samples, integers
    summed. Raises GraphError for any other type.
    """
    dims = kind.shape.dims or ()
    if dims and dims[0] in (None, OTHER):
        return "concat"
    if kind.shape.dims is None or None in dims:
        raise GraphError(
            f"an aux output of shape {kind.shape.dims} does not have the batch on axis 0, so its micro-batches cannot "
            "be merged: transpose it"
        )
    if kind.dtype.differentiable:
        return "mean"
    if kind.dtype.name.startswith(("int", "uint")):
        return "sum"
    raise GraphError(
        f"an aux output of type {kind.dtype.name} without a batch axis cannot be merged over micro-batches: return it "
        "per sample (batched on axis 0), or as a float or an integer"
    )


@dataclass(frozen=True)
class Microbatch(BuiltInPass):
    """Call the functions of ``stages`` stages on each of ``micro_batches`` micro-batches.

    The graph before has ``input`` nodes and, for each stage, the function ``stageN/forward``, and ``stageN/backward``
    or (where backward is split) ``stageN/inputs`` and ``stageN/weights``, unless only forward runs. It may have
    ``stageN/run_once``, ``stageN/loss_head``, which takes the tensors ``head_inputs``, and ``optimizer/loss_scale``,
    which gives the factor by which the optimizer scales the loss. ``aux``: how to merge each aux output. ``loss``:
    whether the loss is the mean or the sum of the losses of the micro-batches. ``split``: stage and micro-batch of each
    backward that is two calls. ``sizes``: the samples of each micro-batch; empty for equal ones.
    """

    stages: int
    micro_batches: int
    aux: tuple[MergeKind, ...] = ()
    loss: Literal["mean", "sum"] = "mean"
    head_inputs: tuple[LossHeadInput, ...] = ()
    split: frozenset[tuple[int, int]] = frozenset()
    sizes: tuple[int, ...] = ()
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.INPUT}),
        forbids=frozenset({OpName.BATCH_SIZE, OpName.FORWARD}),
        produces=frozenset({OpName.BATCH_SIZE, OpName.SLICE, OpName.FORWARD, OpName.MERGE}),
        may_produce=frozenset({*BACKWARD_OPS, OpName.LOSS_GRADIENT, OpName.RUN_ONCE, OpName.ROW_BOUNDS})
        | {OpName.GATHER_ROWS, OpName.LOSS_HEAD, OpName.CUT_ROWS, OpName.LOSS_SCALE},
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with slices, calls, and the merged loss and aux outputs, for one replica of each stage.

        Raises GraphError if there is no micro-batch, no batched argument, an unknown kind of merge, or another number
        of sizes.
        """
        stages, micro_batches = self.stages, self.micro_batches
        self._check(graph)
        size = Node(BATCH_SIZE_NAME, OpName.BATCH_SIZE, (Value(graph.inputs[0]),), (tensor("int64"),))
        calls = StageCalls(graph, micro_batches, self.loss, self.sizes)
        nodes: list[Node] = [*graph.nodes, size, *calls.loss_scale()]
        for stage in range(stages):
            nodes += calls.once(stage)
        has_loss_head = at(stages - 1, what=OpName.LOSS_HEAD) in graph.function_by_name
        for together in [range(micro_batches)] if has_loss_head else [[m] for m in range(micro_batches)]:
            nodes += [node for m in together for stage in range(stages) for node in calls.forward(stage, m)]
            nodes += calls.loss_head(stages - 1, self.head_inputs)
            for m in together:
                for stage in reversed(range(stages)):
                    for op in _HALVES if (stage, m) in self.split else [OpName.BACKWARD]:
                        if at(stage, what=op) in graph.function_by_name:
                            nodes += calls.backward(stage, m, op)
        merged: list[tuple[str, str, MergeKind]] = [("loss", "loss", self.loss)]
        merged += [(f"aux/{i}", str(i), kind) for i, kind in enumerate(self.aux)]
        for name, label, kind in merged:
            results = calls.results[label]
            merge = kind if len(results[0]) > 1 else "first"  # the loss head gives one value for the whole batch
            inputs = tuple(value for result in results for value in result)
            first = calls.types[inputs[0]]
            nodes.append(make_node(name, OpName.MERGE, inputs, [first], kind=merge))
        outputs = tuple(Value(name) for name, _, _ in merged)
        return graph.replace(nodes=tuple(nodes), outputs=outputs)

    def _check(self, graph: Graph) -> None:
        count, sizes = self.micro_batches, self.sizes
        if count < 1:
            raise GraphError(f"M = {count}: there must be at least one micro-batch")
        if sizes and len(sizes) != count:
            raise GraphError(f"M = {count}, but there are {len(sizes)} sizes of micro-batches: give one for each")
        if not graph.inputs:
            raise GraphError("a pipeline needs at least one batched argument")
        for kind in (self.loss, *self.aux):
            if kind not in get_args(MergeKind):
                raise GraphError(f"outputs are merged by one of {', '.join(get_args(MergeKind))}, not by {kind!r}")
