"""Build the call-level graph: every stage's forward, backward and weight gradients once for each micro-batch.

Micro-batch m of M holds samples [N m / M, N (m+1) / M) of a batch of N. The seed of a backward call is its
share n / N of the batch, so that gradients are those of the mean over the whole batch however uneven the
micro-batches are (DAPPLE, Fig. 10, with the weights that make it exact).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph_passes.errors import GraphError
from graph_passes.ir.graph import OTHER, Function, Graph, Node, TensorType, Value, attributes, tensor
from graph_passes.ir.names import at

WEIGHT = tensor("float64")


@dataclass(frozen=True)
class Aux:
    """How an aux output of the micro-batches becomes one of the step: ``concat``, ``mean`` or ``sum``."""

    kind: str


def aux_kind(kind: TensorType) -> Aux:
    """How to merge an aux output of this type.

    Tensors batched on axis 0 are concatenated in sample order, other floats averaged by samples, integers
    summed; GraphError for the rest.
    """
    dims = kind.shape.dims or ()
    if dims and dims[0] in (None, OTHER):
        return Aux("concat")
    if kind.shape.dims is None or None in dims:
        raise GraphError(
            f"an aux output of shape {kind.shape.dims} does not have the batch on axis 0, so its micro-batches cannot "
            "be merged: transpose it"
        )
    if kind.dtype.differentiable:
        return Aux("mean")
    if kind.dtype.name.startswith(("int", "uint")):
        return Aux("sum")
    raise GraphError(
        f"an aux output of type {kind.dtype.name} without a batch axis cannot be merged over micro-batches: return it "
        "per sample (batched on axis 0), or as a float or an integer"
    )


@dataclass(frozen=True)
class Microbatch:
    """Unfold stage functions over ``micro_batches`` micro-batches.

    The input graph holds the ``input`` nodes and, as ``functions``, ``stageN/forward``, ``stageN/backward`` and,
    where backward is split, ``stageN/weights``; ``aux`` gives the types of the aux outputs.
    """

    stages: int
    micro_batches: int
    aux: tuple[TensorType, ...] = ()
    name: str = "microbatch"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return unfold(graph, self.stages, self.micro_batches, self.aux)


def unfold(graph: Graph, stages: int, micro_batches: int, aux: Sequence[TensorType] = ()) -> Graph:
    """Slices, forward and backward calls, and the merged loss and aux, for one replica of each stage."""
    if micro_batches < 1:
        raise GraphError(f"M = {micro_batches}: there must be at least one micro-batch")
    if not graph.inputs:
        raise GraphError("a pipeline needs at least one batched argument")
    size = Node("batch/size", "batch_size", (Value(graph.inputs[0]),), (tensor("int64"),))
    builder = _Builder(graph, micro_batches)
    nodes: list[Node] = [*graph.nodes, size]
    for m in range(micro_batches):
        for stage in range(stages):
            nodes += builder.forward(stage, m)
        for stage in reversed(range(stages)):
            nodes += builder.backward(stage, m)
            if at(stage, what="weights") in graph.function_by_name:
                nodes += builder.backward(stage, m, "weights")
    merged = [("loss", "mean", builder.results["loss"])]
    merged += [(f"aux/{i}", aux_kind(t).kind, builder.results[str(i)]) for i, t in enumerate(aux)]
    for name, kind, pairs in merged:
        first = builder.types[pairs[0][0]]
        inputs = tuple(value for pair in pairs for value in pair)
        nodes.append(Node(name, "merge", inputs, (first,), attributes({"kind": kind})))
    outputs = tuple(Value(name) for name, _, _ in merged)
    return graph.replace(nodes=tuple(nodes), outputs=outputs)


class _Builder:
    def __init__(self, graph: Graph, micro_batches: int) -> None:
        self.graph = graph
        self.micro_batches = micro_batches
        self.types: dict[Value, TensorType] = {}
        # (role, port name, stage, micro-batch) -> the value that carries it
        self.carriers: dict[tuple[str, str, int, int], Value] = {}
        self.results: dict[str, list[tuple[Value, Value]]] = {}

    def forward(self, stage: int, m: int) -> list[Node]:
        function = self.graph.function(at(stage, what="forward"))
        others = [self.graph.function_by_name.get(at(stage, what=what)) for what in ("backward", "weights")]
        slices = self._slice(stage, m, function, *filter(None, others))
        inputs = []
        for port in function.inputs:
            if port.role == "arg":
                inputs.append(self.carriers["arg", port.name, stage, m])
            elif port.role == "boundary":
                inputs.append(self.carriers["boundary", port.name, stage - 1, m])
        node = self._call(function, stage, m, "forward", inputs)
        for value, port in zip(node.values(), function.outputs, strict=True):
            self.carriers[port.role, port.name, stage, m] = value
            if port.role in ("loss", "aux"):
                weight = self.carriers["seed", "loss", stage, m]
                self.results.setdefault(port.name, []).append((value, weight))
        return [*slices, node]

    def backward(self, stage: int, m: int, what: str = "backward") -> list[Node]:
        function = self.graph.function(at(stage, what=what))
        nodes: list[Node] = []
        inputs = []
        for port in function.inputs:
            if port.role == "variable":
                continue
            if port.role == "gradient":
                inputs.append(self.carriers["gradient", port.name, stage + 1, m])
            elif port.role == "boundary":
                inputs.append(self.carriers["boundary", port.name, stage - 1, m])
            elif port.role == "seed":
                if ("cast", "loss", stage, m) not in self.carriers:
                    nodes.append(self._cast(stage, m, port.type))
                inputs.append(self.carriers["cast", "loss", stage, m])
            else:
                inputs.append(self.carriers[port.role, port.name, stage, m])
        node = self._call(function, stage, m, what, inputs)
        for value, port in zip(node.values(), function.outputs, strict=True):
            self.carriers[port.role, port.name, stage, m] = value
        return [*nodes, node]

    def _cast(self, stage: int, m: int, kind: TensorType) -> Node:
        """The weight of the stage's rows in the type of the loss."""
        weight = self.carriers["seed", "loss", stage, m]
        node = Node(at(stage, 0, m, "seed"), "cast", (weight,), (kind,), _place(stage, m))
        self.carriers["cast", "loss", stage, m] = Value(node.name)
        return node

    def _slice(self, stage: int, m: int, *functions: Function) -> list[Node]:
        """The rows of every argument that the stage needs, and the weight of these rows."""
        names = dict.fromkeys(port.name for f in functions for _, port in f.input_ports("arg"))
        weighs = any(f.output_ports("loss", "aux") for f in functions)
        if not names and not weighs:
            return []
        inputs = [Value("batch/size"), *(Value(name) for name in names)]
        kinds = [self.graph.type_of(Value(name)) for name in names]
        attrs = attributes({**dict(_place(stage, m)), "micro_batches": self.micro_batches, "replicas": 1})
        node = Node(at(stage, 0, m, "slice"), "slice", tuple(inputs), (WEIGHT, *kinds), attrs)
        self.carriers["seed", "loss", stage, m] = Value(node.name, 0)
        for i, name in enumerate(names, 1):
            self.carriers["arg", name, stage, m] = Value(node.name, i)
        return [node]

    def _call(self, function: Function, stage: int, m: int, op: str, inputs: Sequence[Value]) -> Node:
        attrs = attributes({**dict(_place(stage, m)), "function": function.name})
        node = Node(at(stage, 0, m, op), op, tuple(inputs), tuple(port.type for port in function.outputs), attrs)
        self.types.update(zip(node.values(), node.outputs, strict=True))
        return node


def _place(stage: int, m: int) -> tuple[tuple[str, int], ...]:
    return (("micro_batch", m), ("replica", 0), ("stage", stage))
