"""Change the copies of variables for a job, where each replica is a process (rank) that keeps variables of its own.

Each rank of a stage keeps the stage's variables and updates them from equal gradients, so replicas need no copies, and
neither does another stage on the same ranks (tied weights). Two kinds of copies remain. Variables that forward writes
have copies, since a failed step must change no variable. Variables that other ranks keep have copies too, and these
ranks send their values when the step starts: tied weights of a stage on other ranks, and variables of a stage whose
update is sharded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.analysis.variable_use import Variables, find_variables
from dapple_tf.graph_passes.ir.graph import Graph, Node, TensorType, Value, make_node
from dapple_tf.graph_passes.ir.names import WRITING_OPS, Site, at, nodes_of, site_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract

_ADDED = frozenset({OpName.READ_VARIABLE, OpName.READ_STATE, OpName.MERGE_STATE})


@dataclass(frozen=True)
class RankVariables(BuiltInPass):
    """Change the copies of variables to those that ranks need.

    ``types``: the type of each variable's value. ``ranks``: the ranks of each stage, as for ``Project``. ``shares``:
    see ``Variables``.
    """

    types: tuple[tuple[str, TensorType], ...]
    ranks: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[str, int], ...] = ()
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        forbids=_ADDED | {OpName.EXCHANGE, OpName.TIMESTAMP},
        may_produce=_ADDED,
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph in which owners send variables to other ranks' copies; state is merged before ``commit``."""
        variables, types = find_variables(graph, self.shares), dict(self.types)
        nodes: list[Node] = []
        reads: dict[str, Node] = {}
        removed: set[str] = set()
        for node in graph.nodes:
            if node.op == OpName.REFRESH:
                refresh = _rank_refresh(node, variables, types, self.ranks, reads)
                nodes += [] if refresh is None else [refresh]
                removed |= {node.name} if refresh is None else set()
            elif node.op == OpName.COMMIT and node.integer("replicas") > 1:
                nodes += _merge_state(graph, node, types)
            elif node.op == OpName.BARRIER:
                nodes.append(_after_merges(graph, node))
            else:
                nodes.append(node)
        connected = [
            dataclasses.replace(node, controls=tuple(c for c in node.controls if c.source not in removed))
            for node in nodes
        ]
        return graph.replace(nodes=(*reads.values(), *_after_reads(connected, reads))).sorted()


def _after_reads(nodes: Iterable[Node], reads: Mapping[str, Node]) -> Iterator[Node]:
    """Yield the nodes; each ``commit`` gets control edges from the reads of its variables, which it changes."""
    for node in nodes:
        if node.op == OpName.COMMIT:
            for name in node.strings("variables"):
                if name in reads:
                    node = node.after(reads[name].name, "commit: other ranks get this step's values")
        yield node


def _rank_refresh(
    node: Node,
    variables: Variables,
    types: Mapping[str, TensorType],
    ranks: Sequence[Sequence[int]],
    reads: dict[str, Node],
) -> Node | None:
    """Return the refresh of the copies that a rank needs, or None if it needs none.

    It takes the values of variables that other ranks keep (a ``read_variable`` there is added to ``reads``), and reads
    those that forward writes itself.
    """
    stage, replica = site_of(node)

    def is_kept_here(name: str) -> bool:
        home = variables.home(name)
        if name in variables.keepers:
            return ranks[home.stage][home.replica] == ranks[stage][replica]
        return tuple(ranks[home.stage]) == tuple(ranks[stage])

    foreign = [name for name in node.strings("variables") if not is_kept_here(name)]
    state = [name for name in node.strings("variables") if name in variables.state and name not in foreign]
    if not foreign and not state:
        return None
    op = OpName.READ_VARIABLE
    for name in foreign:
        home = variables.home(name)
        read = make_node(at(home.stage, what=f"{op}/{name}"), op, (), [types[name]], **home.attrs, variables=(name,))
        reads.setdefault(name, read)
    inputs = tuple(Value(reads[name].name) for name in foreign)
    return dataclasses.replace(node, inputs=inputs).with_attrs(variables=(*foreign, *state))


def _merge_state(graph: Graph, commit: Node, types: Mapping[str, TensorType]) -> list[Node]:
    """Return a ``read_state`` of the variables that forwards wrote for each replica, the merge, and its ``commit``."""
    stage, names = commit.integer("stage"), commit.strings("variables")
    kinds = tuple(types[name] for name in names)
    states: list[Node] = []
    for replica in range(commit.integer("replicas")):
        site, op = Site(stage, replica), OpName.READ_STATE
        state = make_node(at(*site, what=op), op, (), kinds, **site.attrs, variables=names)
        for node in nodes_of(graph, *WRITING_OPS):
            if site_of(node) == site:
                state = state.after(node.name, "state: every forward has written its copy")
        states.append(state)
    inputs = tuple(value for state in states for value in state.values())
    kept = {key: value for key, value in commit.attrs if key in ("summed", "variables")}
    attrs = Site(stage).attrs | kept | {"replicas": len(states)}
    merge = make_node(_merge_name(stage), OpName.MERGE_STATE, inputs, kinds, **attrs)
    controls = tuple(c for c in commit.controls if graph.node(c.source).op not in WRITING_OPS)
    return [*states, merge, dataclasses.replace(commit, inputs=merge.values(), controls=controls)]


def _merge_name(stage: int) -> str:
    return at(stage, what=OpName.MERGE_STATE)


def _after_merges(graph: Graph, barrier: Node) -> Node:
    """Return the barrier with control edges from all merges of state, since these may fail too."""
    for commit in nodes_of(graph, OpName.COMMIT):
        if commit.integer("replicas") > 1:
            merge = _merge_name(commit.integer("stage"))
            barrier = barrier.after(merge, "barrier: no variable changes before all state is merged")
    return barrier
