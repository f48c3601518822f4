"""Copies of variables: refreshed before a replica's first call, committed when the step has succeeded.

A variable has one owner, and there one replica that keeps it. Once a step its value is sent to the other devices that
use it: other replicas, and other stages for tied weights. What forward writes (batch norm, counters, seed states) is
written to a copy, in micro-batch order; ``commit`` stores the result at the owner: floats averaged over the replicas,
other values from replica 0. A variable to which forward only adds sums over samples starts from 0 on all replicas but
the first, and the copies are added up. What is written once a step has the same value on all replicas: the copy of
replica 0 is committed, and in a job each rank commits its own. A step that fails before its barrier thus changes no
variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from dapple_tf.graph_passes.analysis.variable_use import Variables, find_variables
from dapple_tf.graph_passes.ir.graph import Control, Graph, Node, make_node
from dapple_tf.graph_passes.ir.names import STAGE_OPS, WRITING_OPS, Site, at, nodes_of, replica_counts, site_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract


@dataclass(frozen=True)
class CopyVariables(BuiltInPass):
    """Add a ``refresh`` for each replica that uses copies, and a ``commit`` where a stage owns what forward writes.

    ``versioned``: variables that replicas store as versions instead (see ``UseVersions``). ``shares``: see
    ``Variables``.
    """

    versioned: frozenset[str] = frozenset()
    shares: tuple[tuple[str, int], ...] = ()
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=frozenset({OpName.REFRESH, OpName.COMMIT, OpName.BARRIER}),
        may_produce=frozenset({OpName.REFRESH, OpName.COMMIT}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with ``refresh`` and ``commit`` nodes, and edges from a refresh to its replica's calls.

        Each call has an edge of its own, since a schedule may begin with any micro-batch, and since backward's reads of
        a copy do not wait for forward where TensorFlow inlines the calls.
        """
        variables = find_variables(graph, self.shares)
        refreshes: dict[tuple[int, int], Node] = {}
        commits: list[Node] = []
        for stage, replicas in enumerate(replica_counts(graph)):
            for replica in range(replicas):
                names = tuple(name for name in variables.copied(stage, replica) if name not in self.versioned)
                if names:
                    name, own = at(stage, replica, what=OpName.REFRESH), Site(stage, replica).attrs
                    refresh = make_node(name, OpName.REFRESH, **own, variables=names)
                    refreshes[stage, replica] = _with_summed(refresh, variables) if replica else refresh
            state = [name for name in variables.owned(stage) if name in variables.state]
            for what, count, names in (
                (str(OpName.COMMIT), replicas, tuple(name for name in state if name not in variables.once)),
                (f"{OpName.COMMIT}_once", 1, tuple(name for name in state if name in variables.once)),
            ):
                if names:
                    site = Site(stage)
                    commit = make_node(site.at(what), OpName.COMMIT, **site.attrs, replicas=count, variables=names)
                    commits.append(_with_summed(commit, variables) if count > 1 else commit)
        writers: dict[int, list[Control]] = {}
        for node in nodes_of(graph, *WRITING_OPS):
            done = Control(node.name, "commit: every write to the copies is done")
            writers.setdefault(node.integer("stage"), []).append(done)
        commits = [
            replace(commit, controls=(*writers[commit.integer("stage")], *_reads_before(commit, refreshes.values())))
            for commit in commits
        ]
        nodes: list[Node] = []
        added: set[str] = set()
        for node in graph.nodes:
            place = site_of(node) if node.op in STAGE_OPS else None
            if place in refreshes:
                refresh = refreshes[place]
                if refresh.name not in added:
                    nodes.append(refresh)
                    added.add(refresh.name)
                node = node.after(refresh.name, "refresh: the copies of variables hold this step's values")
            nodes.append(node)
        return graph.replace(nodes=(*nodes, *commits))


def _reads_before(commit: Node, refreshes: Iterable[Node]) -> Iterator[Control]:
    """Yield control edges from the refreshes of other stages, which read the values that ``commit`` replaces.

    Those of its own stage come before the writes that it waits for.
    """
    names = set(commit.strings("variables"))
    for refresh in refreshes:
        if refresh.integer("stage") != commit.integer("stage") and names & set(refresh.strings("variables")):
            yield Control(refresh.name, "commit: the copies of other stages hold this step's values")


def _with_summed(node: Node, variables: Variables) -> Node:
    """Return the node with the names of those of its variables whose copies are added up, if there are any."""
    summed = tuple(name for name in node.strings("variables") if name in variables.summed)
    return node.with_attrs(summed=summed) if summed else node
