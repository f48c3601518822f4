"""Compute statistics of the whole batch on one replica of a stage, which sends them to the others.

This is for jobs whose ranks read only the rows that they need, and for statistics that ``combine_statistics`` cannot
compute from partial ones (a median). The rank of the first replica reads all rows of the arguments that the statistics
take, the other ranks only their own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.analysis.layers import can_run_elsewhere, dependents
from dapple_tf.graph_passes.ir.extract import extract_function
from dapple_tf.graph_passes.ir.graph import Control, Effect, Function, Graph, Node, Value, ancestors
from dapple_tf.graph_passes.ir.names import SHARED_STATISTICS, at, nodes_of, replica_counts
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract


@dataclass(frozen=True)
class ShareStatistics(BuiltInPass):
    """Call the part of ``run_once`` that takes rows of the batch on the first replica of each stage only."""

    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}), forbids=frozenset({OpName.EXCHANGE, OpName.TIMESTAMP})
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph in which replicas take statistics of the batch from the first replica of their stage.

        The ``run_once`` of a stage is not changed if a node of it that depends on the batch's rows has an effect, or
        needs a variable that ``run_once`` writes.
        """
        replicas = replica_counts(graph)
        moved: dict[Value, Value] = {}
        nodes: dict[str, list[Node]] = {}
        functions: dict[str, tuple[Function, ...]] = {}
        for node in nodes_of(graph, OpName.RUN_ONCE):
            function = graph.function(node.string("function"))
            stage = node.integer("stage")
            cut = _cut_function(function, at(stage, what=SHARED_STATISTICS)) if replicas[stage] > 1 else None
            if cut is None:
                continue
            functions[function.name] = tuple(part for part in (cut.own, cut.shared) if part)
            shared = at(stage, 0, what=SHARED_STATISTICS)
            moved |= {Value(node.name, i): Value(shared, j) for j, i in enumerate(cut.shared_outputs)}
            moved |= {Value(node.name, i): Value(node.name, j) for j, i in enumerate(cut.own_outputs)}
            nodes[node.name] = list(_calls(node, function, cut, shared))
        if not nodes:
            return graph
        changed = [_reconnect(one, moved, nodes) for node in graph.nodes for one in nodes.get(node.name, [node])]
        kept = [part for function in graph.functions for part in functions.get(function.name, (function,))]
        outputs = tuple(moved.get(value, value) for value in graph.outputs)
        return graph.replace(nodes=tuple(changed), functions=tuple(kept), outputs=outputs).sorted()


@dataclass(frozen=True)
class _Cut:
    """A ``run_once`` in two: ``shared`` computes the outputs that depend on rows of the batch, ``own`` all else.

    ``own`` has the other outputs and all effects, and is None if there are none.

    ``shared_outputs`` and ``own_outputs``: the numbers of the whole function's outputs that each gives.
    """

    shared: Function
    own: Function | None
    shared_outputs: tuple[int, ...]
    own_outputs: tuple[int, ...]


def _cut_function(function: Function, name: str) -> _Cut | None:
    """Return the function in two, the shared one called ``name``; None if it takes no rows or cannot be cut."""
    graph = function.graph
    of_batch = dependents(graph, [graph.inputs[i] for i, _ in function.input_ports("arg")])
    shared = tuple(i for i, value in enumerate(graph.outputs) if value.node in of_batch)
    if not shared or not can_run_elsewhere(graph, ancestors(graph, of_batch)):
        return None
    own = tuple(i for i in range(len(graph.outputs)) if i not in shared)
    effects = [node.name for node in graph.nodes if node.effect not in (Effect.PURE, Effect.READ)]
    roots = [*effects, *(graph.outputs[i].node for i in own)]
    return _Cut(
        _extract(function, name, shared, [graph.outputs[i].node for i in shared]),
        _extract(function, function.name, own, roots) if roots else None,
        shared,
        own,
    )


def _extract(function: Function, name: str, outputs: Iterable[int], roots: Iterable[str]) -> Function:
    members, results = ancestors(function.graph, roots), [function.results[i] for i in outputs]
    return extract_function(name, function.graph, members, function.input_key, results)


def _calls(node: Node, function: Function, cut: _Cut, shared: str) -> Iterator[Node]:
    """Yield the calls that replace ``node``: of the shared function, on the first replica only, and of the own one."""
    entering = function.passed_by(node)

    def call(name: str, called: Function) -> Node:
        inputs = (entering[port.role, port.name] for port in called.passed)
        made = called.call(name, node.op, inputs, **dict(node.attrs))
        return dataclasses.replace(made, controls=node.controls, device=node.device)

    if node.integer("replica") == 0:
        yield call(shared, cut.shared)
    if cut.own is not None:
        yield call(node.name, cut.own)


def _reconnect(node: Node, moved: dict[Value, Value], replaced: dict[str, list[Node]]) -> Node:
    """Return ``node`` with inputs and control edges from the new calls in place of those that they replace."""
    controls: list[Control] = []
    for control in node.controls:
        sources = [one.name for one in replaced[control.source]] if control.source in replaced else [control.source]
        controls += [dataclasses.replace(control, source=source) for source in sources]
    return dataclasses.replace(node.replace_inputs(moved), controls=tuple(controls))
