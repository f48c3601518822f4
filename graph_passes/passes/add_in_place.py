"""Let backward add its gradients to the sums itself, so that the gradients of a micro-batch never exist all at once.

A call returns all its results at its end. So where backward returns the gradients of all variables of its stage, they
take as much memory as the weights, beside their sums. A function that takes the sums adds each gradient as soon as it
is computed, and then TensorFlow frees the gradient. See ``bound_backward`` for the order of its ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.ir.graph import (
    ROLES,
    Control,
    Effect,
    Function,
    Graph,
    Node,
    Port,
    Role,
    TensorType,
    Value,
    attributes,
    tensor,
)
from dapple_tf.graph_passes.ir.names import at, nodes_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import Contract
from dapple_tf.graph_passes.passes.bound_backward import bound_backward
from dapple_tf.graph_passes.schedules.schedule import FREEING, Schedule

_SUM: Role = "sum"
_RESOURCE = tensor("resource")
_ADD_OP = "AssignAddVariableOp"


@dataclass(frozen=True)
class AddInPlace:
    """Give the sums of gradients to the backward calls of the stages that run them in micro-batch order.

    Gradients that are added in buckets (see ``Overlap``: those of the last micro-batch) are still returned.
    """

    schedule: Schedule
    name: str = "add_in_place"
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        requires_if_trained=frozenset({OpName.REDUCED_GRADIENTS}),
        forbids=frozenset({OpName.CLEAR_SUMS, OpName.TIMESTAMP, OpName.PART}),
        may_produce=frozenset({OpName.CLEAR_SUMS}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with ``clear_sums`` in place of each first ``accumulate``, and without the other ones.

        The functions of the calls take the sums (role ``sum``), and do not return the gradients any more.
        """
        in_order = [_runs_in_order(self.schedule, stage) for stage in range(len(self.schedule.stages))]
        sums = [node for node in nodes_of(graph, OpName.ACCUMULATE) if in_order[node.integer("stage")]]
        call_of = {node.name: node.inputs[0].node for node in sums if not node.has("bucket")}
        adding: dict[str, _Adding] = {}
        moved: dict[Value, Value] = {}
        outputs: dict[str, tuple[TensorType, ...]] = {}
        first: dict[str, str] = {}
        for name, call in ((name, graph.node(call)) for name, call in call_of.items()):
            function = call.string("function")
            if function not in adding:
                adding[function] = _add(graph.function(function), graph.node(name))
            left = [value for value in call.values() if value.index not in adding[function].added]
            moved |= {value: Value(call.name, i) for i, value in enumerate(left)}
            outputs[call.name] = tuple(call.outputs[value.index] for value in left)
            if graph.node(name).attr("first"):
                first[call.name] = _clear(graph.node(name)).name
        nodes: list[Node] = []
        for node in graph.nodes:
            if node.name in call_of:
                nodes += [_clear(node)] if node.attr("first") else []
                continue
            if node.name in outputs or not moved.keys().isdisjoint(node.inputs):
                inputs = tuple(moved.get(value, value) for value in node.inputs)
                node = dataclasses.replace(node, inputs=inputs, outputs=outputs.get(node.name, node.outputs))
            if node.name in first:
                node = node.after(first[node.name], "sum: it is cleared before")
            nodes.append(_wait_for_calls(node, call_of))
        return graph.replace(
            nodes=tuple(nodes),
            outputs=tuple(moved.get(value, value) for value in graph.outputs),
            functions=tuple(adding[f.name].function if f.name in adding else f for f in graph.functions),
        ).sorted()


def _wait_for_calls(node: Node, call_of: Mapping[str, str]) -> Node:
    """Return the node, which waits for the calls themselves where it waited until their gradients were added."""
    if not any(control.source in call_of for control in node.controls):
        return node
    controls: dict[str, Control] = {}
    for control in node.controls:
        source = call_of.get(control.source, control.source)
        controls.setdefault(source, Control(source, control.reason))
    return dataclasses.replace(node, controls=tuple(controls.values()))


@dataclass(frozen=True)
class _Adding:
    """A backward ``function`` that takes sums; ``added``: the outputs of the original that it does not return."""

    function: Function
    added: frozenset[int]


def _runs_in_order(schedule: Schedule, stage: int) -> bool:
    """Return whether a stage computes the gradients of its weights in micro-batch order, in which they are added."""
    micro_batches = [action.micro_batch for action in schedule.stages[stage] if action.kind in FREEING]
    return micro_batches == sorted(micro_batches)


def _add(function: Function, accumulate: Node) -> _Adding:
    """Return the function that adds the gradients which ``accumulate`` takes from its calls."""
    graph = function.graph
    added = {value.index: name for value, name in zip(accumulate.inputs, accumulate.strings("variables"), strict=True)}
    entering = list(zip(function.inputs, graph.inputs, strict=True))
    adds, sums = [], []
    for i, (place, name) in enumerate(added.items()):
        source = Node(f"{_SUM}/{i}", _SUM, (), (_RESOURCE,), attributes({"port": name}))
        gradient = graph.outputs[place]
        attrs = attributes({"dtype": graph.type_of(gradient).dtype, "writes": ()})
        inputs = (Value(source.name), gradient)
        adds.append(Node(f"{source.name}/add", _ADD_OP, inputs, attrs=attrs, effect=Effect.WRITE))
        sums.append(source)
        entering.append((Port(_SUM, name, _RESOURCE), source.name))
    entering.sort(key=lambda entry: ROLES.index(entry[0].role))
    left = [i for i in range(len(function.outputs)) if i not in added]
    body = graph.replace(
        nodes=(*sums, *graph.nodes, *adds),
        inputs=tuple(name for _, name in entering),
        outputs=tuple(graph.outputs[i] for i in left),
    )
    ports = tuple(port for port, _ in entering)
    body = bound_backward(body, [add.name for add in adds])
    return _Adding(Function(function.name, body, ports, tuple(function.outputs[i] for i in left)), frozenset(added))


def _clear(accumulate: Node) -> Node:
    """Return the node that clears the sums to which ``accumulate`` would have assigned the first gradients."""
    place = {key: accumulate.integer(key) for key in ("replica", "stage")}
    attrs = attributes({**place, "variables": accumulate.strings("variables")})
    return Node(at(place["stage"], place["replica"], what=OpName.CLEAR_SUMS), OpName.CLEAR_SUMS, attrs=attrs)
