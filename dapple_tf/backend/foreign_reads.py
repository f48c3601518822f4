"""Stage functions that take the values of variables in place of the variables, which live on other devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from dapple_tf.graph_passes.ir.graph import Function, Node, Port, Value

_READ = "ReadVariableOp"


def only_read(function: Function, variable: str) -> bool:
    """Return whether the function does nothing to the variable but read it, so that its value can be passed."""
    holders = {function.graph.inputs[i] for i, port in function.input_ports("variable") if port.name == variable}
    users = [node for node in function.graph.nodes if any(value.node in holders for value in node.inputs)]
    return all(node.op == _READ for node in users)


def pass_values(function: Function, variables: Collection[str]) -> Function:
    """Return the function whose ports of these ``variables``, which it may only read, take their values."""
    graph = function.graph
    positions = {graph.inputs[i]: i for i, port in function.input_ports("variable") if port.name in variables}
    read_of = {node.name: node.inputs[0].node for node in graph.nodes if _reads(node, positions)}
    types = {holder: graph.node(read).outputs[0] for read, holder in read_of.items()}
    nodes = []
    for node in graph.nodes:
        if node.name in read_of:
            continue
        if node.name in types:
            nodes.append(Node(node.name, "arg", (), (types[node.name],)))
            continue
        inputs = tuple(Value(read_of.get(value.node, value.node), value.index) for value in node.inputs)
        controls = tuple(control for control in node.controls if control.source not in read_of)
        nodes.append(dataclasses.replace(node, inputs=inputs, controls=controls))
    outputs = tuple(Value(read_of.get(value.node, value.node), value.index) for value in graph.outputs)
    ports = list(function.inputs)
    for holder, kind in types.items():
        position = positions[holder]
        ports[position] = Port("variable", ports[position].name, kind)
    return dataclasses.replace(function, graph=graph.replace(nodes=tuple(nodes), outputs=outputs), inputs=tuple(ports))


def _reads(node: Node, holders: Collection[str]) -> bool:
    return node.op == _READ and node.inputs[0].node in holders
