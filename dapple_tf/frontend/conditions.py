"""Open the conditions of a traced update: put the nodes of their branches into its graph, so that it can be cut.

Keras puts the whole update into one condition if the optimizer scales the loss (all gradients must be finite), and
parts of it into conditions if gradients are accumulated or weights are overwritten by their averages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

from dapple_tf import internals
from dapple_tf.frontend.read_graph import read_graph, read_value
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
    search_back,
    topological,
)

_USES = (Effect.READ, Effect.WRITE)
_PLAIN = (Effect.PURE, Effect.READ)
_ORDER = "effect: in the order of the trace"


def open_conditions(graph: Graph, func_graph: Any) -> Graph:
    """Return ``graph``, read from ``func_graph``, with its conditions that write variables open, nested ones too.

    The results of an open condition are chosen by its predicate, from what both branches compute. A condition stays as
    it is where its results are used and cannot be computed in both cases: they come from ops that act, from a loop, or
    have other shapes in each branch. Where one is opened, all ops that use a variable are
    ordered as in the trace, variable by variable: a condition as a whole was ordered after all that it uses.
    """
    library = dict(graph.library)
    nodes, results = _open(graph, func_graph, library)
    if not any(node.has("open") for node in nodes):
        return graph
    outputs = tuple(results.get(value, value) for value in graph.outputs)
    return graph.replace(nodes=topological(_order(nodes)), outputs=outputs, library=tuple(sorted(library.items())))


def _open(graph: Graph, func_graph: Any, library: dict[str, bytes]) -> tuple[list[Node], dict[Value, Value]]:
    """Return the nodes of ``graph``: each opened condition becomes a marker, followed by the nodes of its branches.

    Nodes that only use its result, and that nothing needs, are left out. ``library`` gets what the branches call. The
    mapping gives, for each result of an opened condition that is used, the value that has it.
    """
    acting = [node.name for node in graph.nodes if node.effect not in (Effect.PURE, Effect.READ)]
    live = ancestors(graph, [*(value.node for value in graph.outputs), *acting])
    consumed = {value for node in graph.nodes if node.name in live for value in node.inputs} | set(graph.outputs)
    opened: dict[str, list[Node]] = {}
    results: dict[Value, Value] = {}
    for node in graph.nodes:
        if node.op == "If" and node.effect == Effect.WRITE:
            used = [value for value in node.values() if value in consumed]
            parts, chosen = _open_condition(graph, node, func_graph, library, used)
            if len(chosen) == len(used):
                opened[node.name] = parts
                results |= chosen
    result: list[Node] = []
    unused = set(opened)  # nodes to leave out: they take a result of an opened condition, which has none
    for node in graph.nodes:
        node = node.replace_inputs(results)
        if node.name not in live and not unused.isdisjoint(value.node for value in node.inputs):
            unused.add(node.name)
            continue
        node = dataclasses.replace(node, controls=tuple(c for c in node.controls if c.source not in opened))
        result += opened.get(node.name, [node])
    return result, results


def _open_condition(
    graph: Graph, node: Node, func_graph: Any, library: dict[str, bytes], used: Sequence[Value]
) -> tuple[list[Node], dict[Value, Value]]:
    """Return the marker of a condition and the nodes of its branches, and the values of those results that it can give.

    What these are computed from is guarded by no condition.
    """
    pred, *entering = node.inputs
    attrs = {key: value for key, value in node.attrs if key != "writes"}
    controls = tuple(c for c in node.controls if graph.node(c.source).effect == Effect.SIDE)
    branches = []
    for side in BRANCHES:
        reference = node.attr(side)
        assert isinstance(reference, FunctionRef), "TensorFlow's If names its branches"
        body = internals.function_graph(func_graph, reference.name)
        branches.append(_open_branch(graph, node.name, side, body, entering, library, {value.index for value in used}))
    parts = Graph(node.name, tuple(part for nodes, _ in branches for part in nodes))
    inside = parts.by_name
    needed: set[str] = set()
    selects: dict[Value, Node] = {}
    for value in used:
        sources = [outputs[value.index] for _, outputs in branches]
        computing, _ = search_back(parts, sources, lambda value: value.node not in inside)
        kind = node.outputs[value.index]
        dims = kind.shape.dims
        known = dims is not None and None not in dims and kind.dtype.name not in ("resource", "variant")
        if known and all(_can_always_run(inside, inside[name]) for name in computing):
            needed |= computing
            attrs_of_select = attributes({"T": kind.dtype})
            name = f"{node.name}/result{value.index}"
            selects[value] = Node(name, "SelectV2", (pred, *sources), (kind,), attrs_of_select)
    nodes = [_always(part, node.name) if part.name in needed else part for part in inside.values()]
    marker = Node(node.name, "If", (pred,), (), attributes({**attrs, "open": True}), controls)
    return [marker, *nodes, *selects.values()], {value: Value(select.name) for value, select in selects.items()}


def _can_always_run(inside: Mapping[str, Node], node: Node) -> bool:
    """Return whether a node of a branch can run whatever the predicate is: before the branches' writes, or after."""
    if node.effect not in _PLAIN or node.op in internals.LOOP_OPS:  # one may not end for the other predicate
        return False
    read = {value.node for value in node.inputs} if node.effect is Effect.READ else set()
    names = list(inside)
    writes = [
        i for i, part in enumerate(inside.values()) if part.effect is Effect.WRITE and read & {*part.strings("writes")}
    ]
    place = names.index(node.name)
    return not writes or place < writes[0] or place > writes[-1]


def _always(node: Node, marker: str) -> Node:
    """Return the node of a branch as one that runs whatever the predicate is."""
    controls = tuple(control for control in node.controls if control.source != marker)
    return dataclasses.replace(node.without("guard"), controls=controls)


def _open_branch(
    graph: Graph,
    marker: str,
    side: str,
    body: Any,
    entering: Sequence[Value],
    library: dict[str, bytes],
    used: Set[int],
) -> tuple[list[Node], list[Value]]:
    """Return the nodes of a branch, read from the FuncGraph ``body``, under names of their own and guarded.

    With them its results; those with the numbers ``used`` are needed.
    """
    inputs: dict[str, Node] = {}
    values: dict[Value, Value] = {}
    for i, (tensor, value) in enumerate(zip(body.inputs, entering, strict=True)):
        is_variable = graph.node(value.node).op == "variable"
        inputs[tensor.op.name] = Node(value.node, "variable") if is_variable else Node(f"entering/{i}", "capture")
        values[Value(inputs[tensor.op.name].name)] = value
    branch = read_graph(body, inputs, marker)
    outputs = tuple(read_value(tensor, inputs) for tensor in body.outputs)
    branch = branch.replace(outputs=tuple(value for i, value in enumerate(outputs) if i in used))
    library.update(branch.library)
    taken = {node.name for node in inputs.values()}

    def rename(name: str) -> str:
        return name if name in taken else f"{marker}.{side}/{name}"

    def renamed(value: Value) -> Value:
        return values.get(value, Value(rename(value.node), value.index))

    result = []
    nodes, chosen = _open(branch, body, library)
    for node in nodes:
        if node.name in taken:
            continue
        copy = dataclasses.replace(
            node,
            name=rename(node.name),
            inputs=tuple(map(renamed, node.inputs)),
            controls=tuple(Control(rename(c.source), c.reason) for c in node.controls),
        )
        if node.has("guard"):  # by a condition inside of this one
            around, inner = node.strings("guard")
            result.append(copy.with_attrs(guard=(rename(around), inner)))
        else:
            result.append(guarded(copy, marker, side))
    return result, [renamed(chosen.get(value, value)) for value in outputs]


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
