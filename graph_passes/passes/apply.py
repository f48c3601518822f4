"""Weight update: once every gradient is there, each stage updates what it owns (DAPPLE, V.A.3, Fig. 10: Apply)."""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.errors import GraphError
from graph_passes.ir.graph import Attr, Control, Function, Graph, Node, TensorType, Value, attributes, tensor
from graph_passes.ir.names import at, nodes_of
from graph_passes.passes.split_update import Updates

_NORM = tensor("float64")
BARRIER = "update/barrier"


@dataclass(frozen=True)
class Apply:
    """Add clipping by the global norm over all stages, the updates, and the end of the step."""

    updates: Updates
    global_clipnorm: float | None = None
    name: str = "apply"

    def __call__(self, graph: Graph) -> Graph:
        """See the class."""
        return apply_updates(graph, self.updates, self.global_clipnorm)


def apply_updates(graph: Graph, updates: Updates, global_clipnorm: float | None = None) -> Graph:
    """The graph with ``stageN/update`` calls behind a barrier, and ``done`` behind everything.

    Nothing is written before the barrier, and the barrier waits for every gradient and for the loss: a step
    that fails in forward, backward or AllReduce leaves all variables as they were.
    """
    reduced = nodes_of(graph, "reduced")
    waits = [Control(node.name, "barrier: no weight changes before every gradient is there") for node in reduced]
    waits += [Control(value.node, "barrier: no weight changes before the loss is there") for value in graph.outputs]
    added = [Node(BARRIER, "barrier", controls=tuple(waits))]
    gradients: dict[str, tuple[Value, TensorType]] = {}
    for node in reduced:
        for name, value, kind in zip(node.strings("variables"), node.values(), node.outputs, strict=True):
            gradients[name] = (value, kind)
    if global_clipnorm is not None:
        added += _clip(reduced, gradients, global_clipnorm)
    functions: list[Function] = []
    begin = Node("update/begin", "mark", attrs=attributes({"updating": True}))
    added.append(begin.after(BARRIER, "barrier: from here on a failure leaves the step half-applied"))
    last = begin.name
    if updates.before is not None:
        added.append(_update(updates.before, None, gradients, (last, "barrier: before all updates")))
        functions.append(updates.before)
        last = added[-1].name
    ends = []
    commits = [node.name for node in nodes_of(graph, "commit")]
    for stage, function in updates.stages:
        update = _update(function, stage, gradients, (last, "barrier: nothing is half-updated by a failure"))
        for name in commits:
            update = update.after(name, "update: the optimizer steps from what forward wrote")
        added.append(update)
        functions.append(function)
        ends.append(Control(added[-1].name, "the optimizer steps once, after all updates"))
    if updates.after is not None:
        node = _update(updates.after, None, gradients, (last, "barrier: nothing is half-updated by a failure"))
        added.append(Node(node.name, node.op, node.inputs, attrs=node.attrs, controls=(*node.controls, *ends)))
        functions.append(updates.after)
        ends = [Control(node.name, "the step ends with the optimizer's")]
    nodes = []
    for node in graph.nodes:
        if node.op == "commit":
            node = node.after(begin.name, "barrier: nothing is half-written by a failure")
            ends.append(Control(node.name, "the step ends when all state is written"))
        nodes.append(node)
    ends = ends or [Control(begin.name, "the step ends after its barrier")]
    done = Node("update/done", "mark", attrs=attributes({"updating": False}), controls=tuple(ends))
    added.append(done)
    return graph.replace(nodes=(*nodes, *added), functions=(*graph.functions, *functions)).sorted()


def _clip(reduced: tuple[Node, ...], gradients: dict[str, tuple[Value, TensorType]], limit: float) -> list[Node]:
    """Scale all gradients so that their common norm is at most ``limit``."""
    squares, clips = [], []
    for node in reduced:
        stage = node.integer("stage")
        place = {"replica": 0, "stage": stage}
        squares.append(
            Node(at(stage, what="square_norm"), "square_norm", node.values(), (_NORM,), attributes(dict(place)))
        )
        inputs = (Value("update/global_norm"), *node.values())
        attrs = attributes({**place, "limit": limit})
        clip = Node(at(stage, what="clip"), "clip", inputs, node.outputs, attrs)
        clips.append(clip)
        for name, value, kind in zip(node.strings("variables"), clip.values(), clip.outputs, strict=True):
            gradients[name] = (value, kind)
    parts = tuple(Value(node.name) for node in squares)
    return [*squares, Node("update/global_norm", "global_norm", parts, (_NORM,)), *clips]


def _update(
    function: Function,
    stage: int | None,
    gradients: dict[str, tuple[Value, TensorType]],
    after: tuple[str, str],
) -> Node:
    wanted = [port.name for _, port in function.input_ports("gradient")]
    for name in wanted:
        if name not in gradients:
            raise GraphError(f"{function.name!r} updates {name!r}, but no backward gives its gradient")
    inputs = tuple(gradients[name][0] for name in wanted)
    attrs: dict[str, Attr] = {"function": function.name}
    if stage is not None:
        attrs |= {"replica": 0, "stage": stage}
    return Node(
        function.name.replace("optimizer", "update"),
        "update",
        inputs,
        (),
        attributes(attrs),
        (Control(*after),),
    )
