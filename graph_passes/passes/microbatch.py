"""Build the call-level graph: each stage's forward, backward and weight gradients, once for each micro-batch.

Micro-batch m of M has the samples [N m / M, N (m+1) / M) of a batch of N. Backward starts from the micro-batch's share
n / N of the batch, so that the gradients are those of the mean over the whole batch even where the micro-batches are
uneven (DAPPLE, Fig. 10, with the weights that make it exact).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from graph_passes.errors import GraphError
from graph_passes.ir.graph import OTHER, Attr, Function, Graph, Node, TensorType, Value, attributes, tensor
from graph_passes.ir.names import at
from graph_passes.ir.ops import OpName
from graph_passes.passes.base import Contract

BATCH_SIZE_NAME = "batch/size"
_SHARE = tensor("float64")

MergeKind = Literal["concat", "mean", "sum"]
"""How an aux output of the micro-batches becomes one of the step."""


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
class Microbatch:
    """Call the functions of ``stages`` stages on each of ``micro_batches`` micro-batches.

    The graph before has ``input`` nodes and the functions ``stageN/forward``, ``stageN/backward`` and, where backward
    is split, ``stageN/weights``. ``aux``: the types of the aux outputs.
    """

    stages: int
    micro_batches: int
    aux: tuple[TensorType, ...] = ()
    name: str = "microbatch"
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.INPUT}),
        forbids=frozenset({OpName.BATCH_SIZE, OpName.FORWARD}),
        produces=frozenset({OpName.BATCH_SIZE, OpName.SLICE, OpName.FORWARD, OpName.BACKWARD, OpName.MERGE}),
        may_produce=frozenset({OpName.CAST, OpName.WEIGHTS}),
    )

    def __call__(self, graph: Graph) -> Graph:
        return call_stages(graph, self.stages, self.micro_batches, self.aux)


def call_stages(graph: Graph, stages: int, micro_batches: int, aux: Sequence[TensorType] = ()) -> Graph:
    """Return the graph with slices, calls, and the merged loss and aux outputs, for one replica of each stage.

    Raises GraphError if there is no micro-batch, no batched argument, or an aux output that cannot be merged.
    """
    if micro_batches < 1:
        raise GraphError(f"M = {micro_batches}: there must be at least one micro-batch")
    if not graph.inputs:
        raise GraphError("a pipeline needs at least one batched argument")
    size = Node(BATCH_SIZE_NAME, OpName.BATCH_SIZE, (Value(graph.inputs[0]),), (tensor("int64"),))
    calls = _StageCalls(graph, micro_batches)
    nodes: list[Node] = [*graph.nodes, size]
    for m in range(micro_batches):
        for stage in range(stages):
            nodes += calls.forward(stage, m)
        for stage in reversed(range(stages)):
            nodes += calls.backward(stage, m, OpName.BACKWARD)
            if at(stage, what=OpName.WEIGHTS) in graph.function_by_name:
                nodes += calls.backward(stage, m, OpName.WEIGHTS)
    merged: list[tuple[str, MergeKind, list[tuple[Value, Value]]]] = [("loss", "mean", calls.results["loss"])]
    merged += [(f"aux/{i}", merge_kind(kind), calls.results[str(i)]) for i, kind in enumerate(aux)]
    for name, merge, pairs in merged:
        first = calls.types[pairs[0][0]]
        inputs = tuple(value for pair in pairs for value in pair)
        nodes.append(Node(name, OpName.MERGE, inputs, (first,), attributes({"kind": merge})))
    outputs = tuple(Value(name) for name, _, _ in merged)
    return graph.replace(nodes=tuple(nodes), outputs=outputs)


class _StageCalls:
    """Makes the nodes of each stage and micro-batch, and notes the values that later ones take.

    ``values``: the value for a role, port name, stage and micro-batch. ``results``: for each name of an output, its
    value and its share of the samples, for each micro-batch. ``types``: the types of all calls' outputs.
    """

    def __init__(self, graph: Graph, micro_batches: int) -> None:
        self.graph = graph
        self.micro_batches = micro_batches
        self.types: dict[Value, TensorType] = {}
        self.values: dict[tuple[str, str, int, int], Value] = {}
        self.shares: dict[tuple[int, int], Value] = {}  # by stage and micro-batch
        self.seeds: dict[tuple[int, int], Value] = {}  # the share in the dtype of the loss
        self.results: dict[str, list[tuple[Value, Value]]] = {}

    def forward(self, stage: int, m: int) -> list[Node]:
        function = self.graph.function(at(stage, what=OpName.FORWARD))
        names = (at(stage, what=op) for op in (OpName.BACKWARD, OpName.WEIGHTS))
        others = [self.graph.function_by_name[name] for name in names if name in self.graph.function_by_name]
        slices = self._slice(stage, m, function, *others)
        inputs = []
        for port in function.inputs:
            if port.role == "arg":
                inputs.append(self.values["arg", port.name, stage, m])
            elif port.role == "boundary":
                inputs.append(self.values["boundary", port.name, stage - 1, m])
        node = self._call(function, stage, m, OpName.FORWARD, inputs)
        for value, port in zip(node.values(), function.outputs, strict=True):
            self.values[port.role, port.name, stage, m] = value
            if port.role in ("loss", "aux"):
                self.results.setdefault(port.name, []).append((value, self.shares[stage, m]))
        return [*slices, node]

    def backward(self, stage: int, m: int, op: OpName) -> list[Node]:
        """Return the call of a stage's backward or weights function, which ``op`` is."""
        function = self.graph.function(at(stage, what=op))
        nodes: list[Node] = []
        inputs = []
        for port in function.inputs:
            if port.role == "variable":
                continue
            if port.role == "gradient":
                inputs.append(self.values["gradient", port.name, stage + 1, m])
            elif port.role == "boundary":
                inputs.append(self.values["boundary", port.name, stage - 1, m])
            elif port.role == "seed":
                if (stage, m) not in self.seeds:
                    nodes.append(self._cast(stage, m, port.type))
                inputs.append(self.seeds[stage, m])
            else:
                inputs.append(self.values[port.role, port.name, stage, m])
        node = self._call(function, stage, m, op, inputs)
        for value, port in zip(node.values(), function.outputs, strict=True):
            self.values[port.role, port.name, stage, m] = value
        return [*nodes, node]

    def _cast(self, stage: int, m: int, kind: TensorType) -> Node:
        """Return the share of the stage's rows in the type of the loss."""
        node = Node(at(stage, 0, m, "seed"), OpName.CAST, (self.shares[stage, m],), (kind,), _place(stage, m))
        self.seeds[stage, m] = Value(node.name)
        return node

    def _slice(self, stage: int, m: int, *functions: Function) -> list[Node]:
        """Return the node of the rows that the stage's functions take of each argument, and of their share."""
        names = dict.fromkeys(port.name for f in functions for _, port in f.input_ports("arg"))
        has_results = any(f.output_ports("loss", "aux") for f in functions)
        if not names and not has_results:
            return []
        inputs = [Value(BATCH_SIZE_NAME), *(Value(name) for name in names)]
        kinds = [self.graph.type_of(Value(name)) for name in names]
        attrs = _place(stage, m, micro_batches=self.micro_batches, replicas=1)
        node = Node(at(stage, 0, m, OpName.SLICE), OpName.SLICE, tuple(inputs), (_SHARE, *kinds), attrs)
        self.shares[stage, m] = Value(node.name, 0)
        for i, name in enumerate(names, 1):
            self.values["arg", name, stage, m] = Value(node.name, i)
        return [node]

    def _call(self, function: Function, stage: int, m: int, op: OpName, inputs: Sequence[Value]) -> Node:
        attrs = _place(stage, m, function=function.name)
        node = Node(at(stage, 0, m, op), op, tuple(inputs), tuple(port.type for port in function.outputs), attrs)
        self.types.update(zip(node.values(), node.outputs, strict=True))
        return node


def _place(stage: int, m: int, **attrs: Attr) -> tuple[tuple[str, Attr], ...]:
    """Return the attributes of a node of the first replica, and ``attrs``."""
    return attributes({"micro_batch": m, "replica": 0, "stage": stage, **attrs})
