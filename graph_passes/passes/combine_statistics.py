"""Compute statistics of the whole batch from partial ones, which each replica of a stage computes from its own rows.

This is for jobs whose ranks read only the rows that they need. A sum, product, maximum, minimum, ``all`` or ``any``
over samples can be computed from the results of the same operation on disjoint parts of the rows. The frontend marks
such nodes (``COMBINES``) if nothing that needs the whole batch enters them. Each replica computes them for its rows of
every micro-batch, and combines the results. The replicas exchange these, combine them in the same order, so that all
get the same numbers, and compute the statistics from them. A stage whose statistics need the rows of the batch in any
other way is left to ``share_statistics``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.analysis.layers import can_run_elsewhere
from dapple_tf.graph_passes.ir.extract import extract_function, results_of
from dapple_tf.graph_passes.ir.graph import (
    Attr,
    Effect,
    Function,
    Graph,
    Node,
    Role,
    Value,
    ancestors,
    make_node,
    tensor,
)
from dapple_tf.graph_passes.ir.names import (
    BATCH_SIZE_NAME,
    at,
    cut_attributes,
    micro_batch_count,
    replica_counts,
    replica_shares,
    share_attributes,
    site_of,
)
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract

COMBINES = "combines"
"""The attribute of a node that names the operation by which the node's values on disjoint rows can be combined."""

_ADDED = frozenset({OpName.PARTIALS, OpName.COMBINE_PARTIALS})


@dataclass(frozen=True)
class CombineStatistics(BuiltInPass):
    """Compute the statistics of stages with several replicas from partial ones, where that is possible."""

    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=_ADDED | {OpName.EXCHANGE, OpName.TIMESTAMP},
        may_produce=_ADDED | {OpName.SLICE},
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph in which ``run_once`` of replicated stages takes combined partial statistics, not the batch.

        The ``run_once`` of a stage is not changed if it needs the batch's rows in another way, or if a partial
        statistic needs the batch's size, a random draw, or a variable that ``run_once`` writes.
        """
        replicas = replica_counts(graph)
        nodes: list[Node] = []
        functions = {function.name: [function] for function in graph.functions}
        for node in graph.nodes:
            replicated = node.op == OpName.RUN_ONCE and replicas[node.integer("stage")] > 1
            cut = _cut(graph.function(node.string("function"))) if replicated else None
            if cut is None:
                nodes.append(node)
                continue
            functions[cut.rest.name] = [cut.rest, cut.partials]
            nodes += _nodes(node, graph, cut, replicas[node.integer("stage")])
        kept = tuple(function for found in functions.values() for function in found)
        return graph.replace(nodes=tuple(nodes), functions=kept).sorted()


@dataclass(frozen=True)
class _Cut:
    """A ``run_once`` cut in two: ``partials`` computes partial statistics of some rows, and ``rest`` everything else.

    ``marked``: the nodes whose values ``partials`` returns, in this order; ``rest`` takes the combined values.
    """

    partials: Function
    rest: Function
    marked: tuple[Node, ...]


def _cut(function: Function) -> _Cut | None:
    """Return the function in two; None if it takes no rows of the batch, or cannot be cut (see above)."""
    graph = function.graph
    batch = {graph.inputs[i] for i, _ in function.input_ports("arg")}
    marked = {node.name for node in graph.nodes if node.has(COMBINES)}
    if not batch or not marked:
        return None
    effects = [node.name for node in graph.nodes if node.effect not in (Effect.PURE, Effect.READ)]
    rest = ancestors(graph, [*(value.node for value in graph.outputs), *effects], stop=marked)
    taken = {value.node for value in (*graph.outputs, *(v for name in rest for v in graph.node(name).inputs))}
    used = tuple(node for node in graph.nodes if node.name in marked & taken)
    before = ancestors(graph, [node.name for node in used])
    if rest & batch or not _can_run_on_rows(function, before):
        return None

    def port_or_partial(value: Value) -> tuple[Role, str] | None:
        return ("once", str(value)) if value.node in marked else function.input_key(value)

    results = results_of(graph, "once", (Value(node.name) for node in used))
    name = f"{function.name.rpartition('/')[0]}/{OpName.PARTIALS}"
    inputs = set(graph.inputs)
    return _Cut(
        extract_function(name, graph, before - inputs, function.input_key, results),
        extract_function(function.name, graph, rest - inputs, port_or_partial, function.results),
        used,
    )


def _can_run_on_rows(function: Function, names: Set[str]) -> bool:
    """Return whether these nodes, when they run on some of the rows, compute the contribution of these rows alone.

    They do not if they need the batch's size, or cannot run without the rest of the function.
    """
    bounds = {function.graph.inputs[i] for i, _ in function.input_ports("rows")}
    return bounds.isdisjoint(names) and can_run_elsewhere(function.graph, names)


def _nodes(node: Node, graph: Graph, cut: _Cut, replicas: int) -> Iterator[Node]:
    """Yield the nodes that replace the ``run_once`` of one replica."""
    stage, replica, count = node.integer("stage"), node.integer("replica"), micro_batch_count(graph)
    entering = graph.function(node.string("function")).passed_by(node)
    rows = [entering["arg", port.name] for _, port in cut.partials.input_ports("arg")]
    types = tuple(port.type for port in cut.partials.outputs)
    calls, shares = [], share_attributes(replica_shares(graph, stage))
    for m in range(count):
        place: dict[str, Attr] = {**site_of(node).attrs, "micro_batch": m}
        piece = make_node(
            at(stage, replica, m, "rows_for_partials"),
            OpName.SLICE,
            (Value(BATCH_SIZE_NAME), *rows),
            (tensor("float64"), *map(graph.type_of, rows)),
            **place,
            **cut_attributes(graph),
            replicas=replicas,
            **shares,
        )
        call = cut.partials.call(at(stage, replica, m, OpName.PARTIALS), OpName.PARTIALS, piece.values()[1:], **place)
        # It may read copies of variables, which must be up to date.
        calls.append(dataclasses.replace(call, controls=node.controls))
        yield piece
        yield calls[-1]
    operations = tuple(marked.string(COMBINES) for marked in cut.marked)

    def combine(what: str, pieces: Sequence[str]) -> Node:
        inputs = (Value(piece, i) for i in range(len(types)) for piece in pieces)
        attrs = site_of(node).attrs | {"operations": operations, "pieces": len(pieces)}
        return make_node(at(stage, replica, what=what), OpName.COMBINE_PARTIALS, inputs, types, **attrs)

    yield combine("own_partials", [call.name for call in calls])
    combined = combine("all_partials", [at(stage, r, what="own_partials") for r in range(replicas)])
    yield combined
    results = {str(Value(marked.name)): value for marked, value in zip(cut.marked, combined.values(), strict=True)}
    inputs = tuple(
        results[port.name] if port.role == "once" else entering[port.role, port.name] for port in cut.rest.passed
    )
    yield dataclasses.replace(node, inputs=inputs)
