"""Lay open the conditions of a traced update, so that it can be cut into stages.

Keras puts the whole update into one condition where an optimizer scales the loss (all gradients are finite), and parts
of it where gradients are accumulated or weights are overwritten by their averages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dapple_tf import internals
from dapple_tf.frontend.read_graph import read_graph
from dapple_tf.graph_passes.ir.conditions import BRANCHES, guarded
from dapple_tf.graph_passes.ir.graph import (
    Control,
    Effect,
    FunctionRef,
    Graph,
    Node,
    Value,
    ancestors,
    attributes,
    topological,
)

_USES = (Effect.READ, Effect.WRITE)
_ORDER = "effect: in the order of the trace"


def open_conditions(graph: Graph, func_graph: Any) -> Graph:
    """Return ``graph``, read from ``func_graph``, with its conditions that write variables open, nested ones too.

    A condition whose results are used stays as it is. Where one is opened, all ops that use a variable are
    ordered as in the trace, variable by variable: a condition as a whole was ordered after all that it uses.
    """
    library = dict(graph.library)
    nodes = _open(graph, func_graph, library)
    if not any(node.has("open") for node in nodes):
        return graph
    return graph.replace(nodes=topological(_order(nodes)), library=tuple(sorted(library.items())))


def _open(graph: Graph, func_graph: Any, library: dict[str, bytes]) -> list[Node]:
    """Return the nodes of ``graph``: each opened condition becomes a marker, followed by the nodes of its branches.

    Nodes that only use its result, and that nothing needs, are left out. ``library`` gets what the branches call.
    """
    acting = [node.name for node in graph.nodes if node.effect not in (Effect.PURE, Effect.READ)]
    live = ancestors(graph, [*(value.node for value in graph.outputs), *acting])
    consumed = {value.node for node in graph.nodes if node.name in live for value in node.inputs}
    opened = {n.name for n in graph.nodes if n.op == "If" and n.effect == Effect.WRITE and n.name not in consumed}
    result: list[Node] = []
    unused = set(opened)  # nodes to leave out: they take a result of an opened condition, which has none
    for node in graph.nodes:
        if node.name not in live and not unused.isdisjoint(value.node for value in node.inputs):
            unused.add(node.name)
            continue
        node = dataclasses.replace(node, controls=tuple(c for c in node.controls if c.source not in opened))
        if node.name not in opened:
            result.append(node)
            continue
        pred, *entering = node.inputs
        attrs = {key: value for key, value in node.attrs if key != "writes"}
        controls = tuple(c for c in node.controls if graph.node(c.source).effect == Effect.SIDE)
        result.append(Node(node.name, "If", (pred,), (), attributes({**attrs, "open": True}), controls))
        for side in BRANCHES:
            reference = node.attr(side)
            assert isinstance(reference, FunctionRef), "TensorFlow's If names its branches"
            body = internals.function_graph(func_graph, reference.name)
            result += _open_branch(graph, node.name, side, body, entering, library)
    return result


def _open_branch(
    graph: Graph, marker: str, side: str, body: Any, entering: Sequence[Value], library: dict[str, bytes]
) -> list[Node]:
    """Return the nodes of a branch, read from the FuncGraph ``body``, under names of their own and guarded."""
    inputs: dict[str, Node] = {}
    values: dict[Value, Value] = {}
    for i, (tensor, value) in enumerate(zip(body.inputs, entering, strict=True)):
        is_variable = graph.node(value.node).op == "variable"
        inputs[tensor.op.name] = Node(value.node, "variable") if is_variable else Node(f"entering/{i}", "capture")
        values[Value(inputs[tensor.op.name].name)] = value
    branch = read_graph(body, inputs, marker)
    library.update(branch.library)
    taken = {node.name for node in inputs.values()}

    def rename(name: str) -> str:
        return name if name in taken else f"{marker}.{side}/{name}"

    result = []
    for node in _open(branch, body, library):
        if node.name in taken:
            continue
        copy = dataclasses.replace(
            node,
            name=rename(node.name),
            inputs=tuple(values.get(v, Value(rename(v.node), v.index)) for v in node.inputs),
            controls=tuple(Control(rename(c.source), c.reason) for c in node.controls),
        )
        if node.has("guard"):  # by a condition inside of this one
            around, inner = node.strings("guard")
            result.append(copy.with_attrs(guard=(rename(around), inner)))
        else:
            result.append(guarded(copy, marker, side))
    return result


def _order(nodes: Sequence[Node]) -> list[Node]:
    """Return ``nodes``, in the order of the trace, with control edges between those that use the same variables."""
    variables = {node.name for node in nodes if node.op == "variable"}
    written: dict[str, tuple[str, ...]] = {}
    read: dict[str, tuple[str, ...]] = {}
    result = []
    for node in nodes:
        used = [v.node for v in node.inputs if v.node in variables] if node.effect in _USES else []
        writes = node.strings("writes") if node.effect == Effect.WRITE else ()
        for name in dict.fromkeys(used):
            before = written.get(name, ())
            if name in writes:
                before = (*before, *read.get(name, ()))
                written[name], read[name] = (node.name,), ()
            else:
                read[name] = (*read.get(name, ()), node.name)
            for source in before:
                node = node.after(source, _ORDER)
        result.append(node)
    return result
