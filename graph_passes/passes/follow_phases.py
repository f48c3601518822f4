"""Let a phase of a step begin while earlier phases still run: each of its nodes waits only for what it depends on.

The phases of a training step run in one TensorFlow function. Between two of them there are these edges:

* A device runs the calls of a phase after its calls of the phases before.
* A node that uses a variable runs after the nodes of the last earlier phase that writes this variable.
* The barrier of a phase, before which it changes no variable, comes after all nodes of the phases before. So a phase
  changes nothing that an earlier one still reads, and phases change variables in their order.
* A call with an effect other than on variables, such as a print or a draw from a hidden state, comes after all nodes of
  the phases before.

All edges lead from a phase to a later one, so they add no cycle, and no ranks that wait for each other. They order
whole calls, so no call is inlined: TensorFlow could then read a variable for a later phase before an earlier one writes
it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import ClassVar

from dapple_tf.graph_passes.analysis.variable_use import variable_uses, written_by
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, make_node
from dapple_tf.graph_passes.ir.names import STAGE_OPS, nodes_of, of_phase
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.instrument import end_of, starts_of

_ACTING = (Effect.SIDE, Effect.RANDOM)
_ON_DEVICES = frozenset({*STAGE_OPS, OpName.ACCUMULATE})


@dataclass(frozen=True)
class PhaseGraph:
    """The finished graph of a phase. ``variables``: for each variable a key that is the same in all phases."""

    graph: Graph
    variables: Mapping[str, int]


@dataclass(frozen=True)
class FollowPhases(BuiltInPass):
    """Add ``follow`` nodes, by which the graph of a phase waits for nodes of the ``earlier`` phases of its step.

    ``variables``: as in ``PhaseGraph``. ``last``: no phase follows this one.
    """

    earlier: tuple[PhaseGraph, ...]
    variables: Mapping[str, int]
    last: bool
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=frozenset({OpName.FOLLOW}),
        may_produce=frozenset({OpName.FOLLOW}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph in which nodes that depend on earlier phases have a ``follow`` node to wait for.

        A node gets none if nodes before it wait for the same. No call is inlined. A phase that is not the last does not
        record the end of the writing of variables, and hang detection does not end with its tokens.
        """
        waits = _find_waits(PhaseGraph(graph, self.variables), self.earlier)
        nodes: list[Node] = []
        known: dict[str, frozenset[str]] = {}  # for each node, the nodes of earlier phases after which it runs
        added: dict[tuple[str, frozenset[str]], str] = {}
        for node in graph.nodes:
            known[node.name] = frozenset[str]().union(*(known[source] for source in node.predecessors()))
            needed = waits.get(node.name, frozenset()) - known[node.name]
            if needed:
                known[node.name] |= needed
                place = node.device, needed
                if place not in added:
                    added[place] = f"{OpName.FOLLOW}/{len(added)}"
                    follow = make_node(added[place], OpName.FOLLOW, after=tuple(sorted(needed)))
                    nodes.append(replace(follow, device=node.device))
                node = node.after(added[place], "phases: it depends on what earlier ones do")
            nodes.append(node.without("inline") if node.has("inline") else node)
        found = graph.replace(nodes=tuple(nodes))
        return found if self.last else _open_ended(found)


def _open_ended(graph: Graph) -> Graph:
    """Return the graph of a phase after which others follow."""
    ends = {node.name for node in nodes_of(graph, OpName.SET_UPDATING) if not node.attr("updating")}
    nodes = [
        node.with_attrs(guarded=False)
        if node.op == OpName.COLLECT_TOKENS
        else replace(node, controls=tuple(control for control in node.controls if control.source not in ends))
        for node in graph.nodes
        if node.name not in ends
    ]
    return graph.replace(nodes=tuple(nodes))


def _find_waits(phase: PhaseGraph, earlier: Sequence[PhaseGraph]) -> Mapping[str, frozenset[str]]:
    """Return, by the name of a node, the nodes of earlier phases after which it has to run."""
    if not earlier:
        return {}
    ends = [_PhaseEnds(number, found) for number, found in enumerate(earlier)]
    writers: dict[int, frozenset[str]] = {}
    last_calls: dict[str, frozenset[str]] = {}
    for end in ends:
        writers |= end.writers
        last_calls |= end.last_calls
    everything = ends[-1].everything  # the barrier of the phase before has waited for the phases before that
    acts = cache(lambda function: any(node.effect in _ACTING for node in phase.graph.function(function).graph.nodes))
    waits: dict[str, frozenset[str]] = {}
    for node, names in variable_uses(phase.graph):
        found = frozenset[str]().union(*(writers.get(phase.variables[name], ()) for name in names))
        if node.op in STAGE_OPS:
            found |= last_calls.get(node.device, frozenset())
        if node.op == OpName.BARRIER or written_by(phase.graph, node, names):
            found |= everything
        if node.has("function") and acts(node.string("function")):
            found |= everything
        for name in (node.name, *starts_of(phase.graph, node)):
            waits[name] = waits.get(name, frozenset()) | found
    return waits


@dataclass(frozen=True)
class _PhaseEnds:
    """The nodes of a phase for which later phases may have to wait, by the names that they have in later phases.

    ``number``: the number of the phase, from 0.
    """

    number: int
    phase: PhaseGraph

    @cached_property
    def writers(self) -> Mapping[int, frozenset[str]]:
        """The nodes that write each variable, by the key of the variable."""
        graph, found = self.phase.graph, defaultdict[int, set[str]](set)
        for node, names in variable_uses(graph):
            for name in written_by(graph, node, names):
                found[self.phase.variables[name]].add(self._name(node))
        return {key: frozenset(names) for key, names in found.items()}

    @cached_property
    def last_calls(self) -> Mapping[str, frozenset[str]]:
        """The last calls of each device, and the nodes that accumulate their gradients."""
        graph = self.phase.graph
        own = {node.name: node for node in graph.nodes if node.op in _ON_DEVICES}
        followed = {
            source
            for node in own.values()
            for source in node.predecessors()
            if source in own and own[source].device == node.device
        }
        found = defaultdict[str, set[str]](set)
        for node in own.values():
            if node.name not in followed:
                found[node.device].add(self._name(node))
        return {device: frozenset(names) for device, names in found.items()}

    @cached_property
    def everything(self) -> frozenset[str]:
        """The nodes for which no other node of the phase waits: after them all have run."""
        graph = self.phase.graph
        followed = {source for node in graph.nodes for source in node.predecessors()}
        ends = (node for node in graph.nodes if node.name not in followed and node.op != OpName.INPUT)
        return frozenset(map(self._name, ends))

    def _name(self, node: Node) -> str:
        return of_phase(self.number, end_of(self.phase.graph, node))
