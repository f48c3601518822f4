"""Make the nodes that call a stage's functions on a micro-batch, or the loss head, and the nodes of their inputs."""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf.graph_passes.analysis.loss_head import LossHeadInput
from dapple_tf.graph_passes.ir.graph import Attr, Function, Graph, Node, Port, TensorType, Value, make_node, tensor
from dapple_tf.graph_passes.ir.names import BACKWARD_OPS, BATCH_SIZE_NAME, at
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.batch_loss import call_loss_head

LOSS_SCALE_NAME = "optimizer/loss_scale"
"""The name of the function, and of the node, that gives the factor by which the optimizer scales the loss."""

_SHARE = tensor("float64")
_ROWS = tensor("int64", 3)


class StageCalls:
    """Makes the nodes of each stage and micro-batch, and keeps the values that later nodes take.

    ``values``: the value for each role, port name, stage and micro-batch. ``results``: for each output (``loss``, or
    the number of an aux output) a pair for each micro-batch: the value, and the micro-batch's share of the samples. An
    output of the loss head has one value and no share. ``types``: the types of the outputs of all calls. ``sizes``:
    see ``Microbatch``.
    """

    def __init__(self, graph: Graph, micro_batches: int, loss: str, sizes: Sequence[int] = ()) -> None:
        self.graph = graph
        self.micro_batches = micro_batches
        self.cut: dict[str, Attr] = {"micro_batches": micro_batches, **({"sizes": tuple(sizes)} if sizes else {})}
        self.loss = loss
        self.types: dict[Value, TensorType] = {}
        self.values: dict[tuple[str, str, int, int], Value] = {}
        self.shares: dict[tuple[int, int], Value] = {}  # by stage and micro-batch
        self.seeds: dict[tuple[int, int], Value] = {}  # the gradient of the loss
        self.results: dict[str, list[tuple[Value, ...]]] = {}

    def loss_scale(self) -> list[Node]:
        """Return the call of the function of the loss scale, if there is one."""
        function = self.graph.function_by_name.get(LOSS_SCALE_NAME)
        if function is None:
            return []
        return [function.call(LOSS_SCALE_NAME, OpName.LOSS_SCALE, ())]

    def once(self, stage: int) -> list[Node]:
        """Return the call of a stage's function that runs once a step, on the whole batch, and what it takes."""
        function = self.graph.function_by_name.get(at(stage, what=OpName.RUN_ONCE))
        if function is None:
            return []
        nodes: list[Node] = []
        inputs = []
        for port in function.inputs:
            if port.role == "arg":
                inputs.append(Value(port.name))
            elif port.role == "rows":
                nodes.append(_whole_batch_bounds(stage))
                inputs.append(Value(nodes[-1].name))
        call = function.call(at(stage, 0, what=OpName.RUN_ONCE), OpName.RUN_ONCE, inputs, replica=0, stage=stage)
        for value, port in zip(call.values(), function.outputs, strict=True):
            self.values["once", port.name, stage, 0] = value
        return [*nodes, call]

    def forward(self, stage: int, m: int) -> list[Node]:
        """Return the call of a stage's forward function, and the nodes of the rows that a micro-batch takes there."""
        function = self.graph.function(at(stage, what=OpName.FORWARD))
        names = (at(stage, what=op) for op in BACKWARD_OPS)
        others = [self.graph.function_by_name[name] for name in names if name in self.graph.function_by_name]
        slices = self._slice(stage, m, function, *others)
        node = self._call(function, stage, m, OpName.FORWARD)
        if at(stage, what=OpName.RUN_ONCE) in self.graph.function_by_name:
            node = node.after(
                at(stage, 0, what=OpName.RUN_ONCE), "once: what runs once a step comes before micro-batches"
            )
        for value, port in zip(node.values(), function.outputs, strict=True):
            self.values[port.role, port.name, stage, m] = value
            if port.role in ("loss", "aux"):
                self.results.setdefault(port.name, []).append((value, self.shares[stage, m]))
        return [*slices, node]

    def loss_head(self, stage: int, head_inputs: Sequence[LossHeadInput]) -> list[Node]:
        """Return the call of the loss head after the last ``stage``, if there is one, and what it takes."""
        function = self.graph.function_by_name.get(at(stage, what=OpName.LOSS_HEAD))
        if function is None:
            return []

        def source(port: Port) -> Value:
            match port.role:
                case "arg":
                    return Value(port.name)
                case "rows":
                    return Value(_whole_batch_bounds(stage).name)
                case "seed":
                    return Value(LOSS_SCALE_NAME)
            return self.values[port.role, port.name, stage, 0]

        def pieces(name: str) -> list[Value]:
            return [self.values["boundary", name, stage, m] for m in range(self.micro_batches)]

        nodes, gradients = call_loss_head(function, stage, head_inputs, pieces, source)
        call = nodes[1]
        self.types.update(zip(call.values(), call.outputs, strict=True))
        for i, port in function.output_ports("loss", "aux"):
            self.results[port.name] = [(Value(call.name, i),)]
        for name, cut in gradients.items():
            self.values |= {("gradient", name, stage + 1, m): value for m, value in enumerate(cut)}
        once = self.graph.function_by_name.get(at(stage, what=OpName.RUN_ONCE))
        has_bounds = once is not None and once.input_ports("rows")
        if function.input_ports("rows") and not has_bounds:
            nodes = [_whole_batch_bounds(stage), *nodes]
        return nodes

    def backward(self, stage: int, m: int, op: OpName) -> list[Node]:
        """Return the call of a stage's backward function, or of one of its two parts, as ``op`` says.

        The node of the gradient of the loss stands before the first call that takes this gradient.
        """
        function = self.graph.function(at(stage, what=op))
        nodes: list[Node] = []
        for _, port in function.input_ports("seed"):
            if (stage, m) not in self.seeds:
                nodes.append(self._seed(stage, m, port.type))
        node = self._call(function, stage, m, op)
        for value, port in zip(node.values(), function.outputs, strict=True):
            self.values[port.role, port.name, stage, m] = value
        return [*nodes, node]

    def _seed(self, stage: int, m: int, kind: TensorType) -> Node:
        """Return the node of the gradient of the loss, with which backward starts."""
        factors = [] if self.loss == "sum" else [self.shares[stage, m]]
        if LOSS_SCALE_NAME in self.graph.function_by_name:
            factors.append(Value(LOSS_SCALE_NAME))
        node = make_node(at(stage, 0, m, "seed"), OpName.LOSS_GRADIENT, factors, [kind], **_place(stage, m))
        self.seeds[stage, m] = Value(node.name)
        return node

    def _slice(self, stage: int, m: int, *functions: Function) -> list[Node]:
        """Return the nodes of a micro-batch's rows of the arguments, its share of the samples and its row bounds."""
        nodes = []
        attrs = {**_place(stage, m), **self.cut, "replicas": 1}
        for name in dict.fromkeys(port.name for f in functions for _, port in f.input_ports("rows")):
            bounds = at(stage, 0, m, OpName.ROW_BOUNDS)
            nodes.append(make_node(bounds, OpName.ROW_BOUNDS, [Value(BATCH_SIZE_NAME)], [_ROWS], **attrs))
            self.values["rows", name, stage, m] = Value(nodes[-1].name)
        names = dict.fromkeys(port.name for f in functions for _, port in f.input_ports("arg"))
        has_results = any(f.output_ports("loss", "aux") for f in functions)
        if not names and not has_results:
            return nodes
        tensors = list(map(Value, names))
        inputs, kinds = [Value(BATCH_SIZE_NAME), *tensors], [_SHARE, *map(self.graph.type_of, tensors)]
        node = make_node(at(stage, 0, m, OpName.SLICE), OpName.SLICE, inputs, kinds, **attrs)
        self.shares[stage, m] = Value(node.name, 0)
        for i, name in enumerate(names, 1):
            self.values["arg", name, stage, m] = Value(node.name, i)
        return [*nodes, node]

    def _call(self, function: Function, stage: int, m: int, op: OpName) -> Node:
        """Return the call of a stage's function on a micro-batch. The nodes whose values it takes must exist."""
        inputs = (self._find(port, stage, m) for port in function.passed)
        node = function.call(at(stage, 0, m, op), op, inputs, **_place(stage, m))
        self.types.update(zip(node.values(), node.outputs, strict=True))
        return node

    def _find(self, port: Port, stage: int, m: int) -> Value:
        """Return the value that a call of a stage's function on a micro-batch takes at an input."""
        match port.role:
            case "seed":
                return self.seeds[stage, m]
            case "once":
                return self.values["once", port.name, stage, 0]
            case "boundary":
                return self.values["boundary", port.name, stage - 1, m]
            case "gradient":
                return self.values["gradient", port.name, stage + 1, m]
        return self.values[port.role, port.name, stage, m]


def _place(stage: int, m: int) -> dict[str, Attr]:
    """Return the place of a node: the stage, its first replica, and the micro-batch ``m``."""
    return {"micro_batch": m, "replica": 0, "stage": stage}


def _whole_batch_bounds(stage: int) -> Node:
    """Return the node of the row bounds that a call of a stage takes when it runs on the whole batch."""
    name = at(stage, 0, what=OpName.ROW_BOUNDS)
    return make_node(name, OpName.ROW_BOUNDS, [Value(BATCH_SIZE_NAME)], [_ROWS], replica=0, stage=stage)
