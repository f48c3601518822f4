"""Call the functions of replicated stages part by part, and join what the parts compute over the replicas.

So batch norm has the statistics of all samples of a micro-batch (``batch_norm="sync"``). All replicas call the same
parts in the same order, and each join takes a value from each of them. This pass comes after all passes that look at
whole calls. The last part of a call, which runs after the others, keeps the name of the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.ir.graph import BOUND_ROLES, Function, Graph, Node, Value, attributes, make_node
from dapple_tf.graph_passes.ir.names import BACKWARD_OPS, nodes_of, of_replica, replica_counts, site_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.function_parts import JOIN, FunctionParts, cut_function, has_joins

_CALLS = (OpName.FORWARD, *BACKWARD_OPS)
_ADDED = frozenset({OpName.PART, OpName.JOIN})


@dataclass(frozen=True)
class JoinReplicas(BuiltInPass):
    """Join values over the replicas of each stage that has several."""

    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=_ADDED | {OpName.EXCHANGE},
        may_produce=_ADDED,
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph in which calls of functions with joins, on stages with several replicas, are in parts.

        The functions of the whole calls stay in the graph: they say what a stage uses.
        """
        replicas = replica_counts(graph)
        parts: dict[str, FunctionParts] = {}
        calls: dict[str, _Call] = {}
        for node in nodes_of(graph, *_CALLS):
            function = graph.function(node.string("function"))
            if replicas[node.integer("stage")] > 1 and has_joins(function):
                if function.name not in parts:
                    parts[function.name] = cut_function(function)
                calls[node.name] = _Call(node, function, parts[function.name])
        nodes: list[Node] = []
        for node in graph.nodes:
            moved = tuple(_moved(value, calls) for value in node.inputs)
            if node.name in calls:
                stage, own = site_of(node)
                siblings = [calls[of_replica(node.name, r, own)] for r in range(replicas[stage])]
                nodes += calls[node.name].nodes(siblings, calls)
            else:
                nodes.append(dataclasses.replace(node, inputs=moved))
        functions = (*graph.functions, *(function for found in parts.values() for function in found.functions))
        outputs = tuple(_moved(value, calls) for value in graph.outputs)
        return graph.replace(nodes=tuple(nodes), functions=functions, outputs=outputs).sorted()


def first_part(graph: Graph, call: Node) -> Node:
    """Return the node of the first part of a call: the call itself where it is not cut into parts."""
    return graph.by_name.get(_part_name(call.name, 0), call)


def _part_name(call: str, part: int) -> str:
    return f"{call}/part{part}"


def _moved(value: Value, calls: Mapping[str, _Call]) -> Value:
    """Return where a value is once calls are in parts."""
    call = calls.get(value.node)
    return value if call is None else call.output(value.index, calls)


class _Call:
    """A call that becomes a node for each part of its function, and one for the joins after each part."""

    def __init__(self, node: Node, function: Function, parts: FunctionParts) -> None:
        self.node = node
        self.function = function
        self.parts = parts
        self._by_port = function.passed_by(node)
        self._given: dict[Value, Value] = {}
        for part, results in enumerate(parts.results):
            self._given |= {value: Value(self._name(part), i) for i, value in enumerate(results)}
        for part, joins in enumerate(parts.joins):
            joined = {Value(join.name): Value(f"{node.name}/join{part}", i) for i, join in enumerate(joins)}
            self._given |= joined
        self._by_name = {str(value): found for value, found in self._given.items()}

    def output(self, index: int, calls: Mapping[str, _Call]) -> Value:
        """Return the value that is output number ``index`` of the whole call."""
        return self._find(self.function.graph.outputs[index], calls)

    def nodes(self, siblings: list[_Call], calls: Mapping[str, _Call]) -> list[Node]:
        """Return the nodes of this call; ``siblings``: the calls of all replicas, in order; ``calls``: all by name."""
        nodes: list[Node] = []
        for part, function in enumerate(self.parts.functions):
            nodes.append(self._part(part, function, calls))
            if self.parts.joins[part]:
                nodes.append(self._join(part, siblings, calls))
        return nodes

    def _find(self, value: Value, calls: Mapping[str, _Call]) -> Value:
        if value in self._given:
            return self._given[value]
        port = self.function.input_key(value)
        assert port is not None, "parts and joins give all that inputs do not"
        return _moved(self._by_port[port], calls)

    def _name(self, part: int) -> str:
        return self.node.name if part == len(self.parts.functions) - 1 else _part_name(self.node.name, part)

    def _part(self, part: int, function: Function, calls: Mapping[str, _Call]) -> Node:
        inputs = []
        for port in function.inputs:
            key = (port.role, port.name)
            if key in self._by_port:
                inputs.append(_moved(self._by_port[key], calls))
            elif port.role not in BOUND_ROLES:
                inputs.append(self._by_name[port.name])
        last = part == len(self.parts.functions) - 1
        attrs = {**dict(self.node.attrs), "function": function.name}
        if not last:  # not inlined: TensorFlow could find a constant in it, and a join may be an exchange between ranks
            attrs.pop("inline", None)
            attrs.pop("shares", None)  # the last part has them
            attrs["of"] = self.node.op
        made = Node(
            self._name(part),
            self.node.op if last else OpName.PART,
            tuple(inputs),
            tuple(port.type for port in function.outputs),
            attributes(attrs),
            () if part else self.node.controls,
            device=self.node.device,
        )
        return made.after(self._name(part - 1), "join: the parts of a call run in order") if part else made

    def _join(self, part: int, siblings: list[_Call], calls: Mapping[str, _Call]) -> Node:
        joins = self.parts.joins[part]
        node = make_node(
            f"{self.node.name}/join{part}",
            OpName.JOIN,
            (sibling._find(join.inputs[0], calls) for join in joins for sibling in siblings),
            (join.outputs[0] for join in joins),
            **site_of(self.node).attrs,
            micro_batch=self.node.integer("micro_batch"),
            kinds=tuple(join.string(JOIN) for join in joins),
            pieces=len(siblings),
        )
        return dataclasses.replace(node, device=self.node.device)
