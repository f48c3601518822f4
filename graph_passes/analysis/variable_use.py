"""Find the stage that owns each variable, the other stages that use it, and the variables that forward writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dapple_tf.graph_passes.analysis.layers import written_variables
from dapple_tf.graph_passes.ir.graph import Function, Graph, Node
from dapple_tf.graph_passes.ir.names import (
    BACKWARD_OPS,
    OWNED,
    SHARED_STATISTICS,
    STAGE_OPS,
    Site,
    at,
    nodes_of,
    site_of,
    without_target,
)
from dapple_tf.graph_passes.ir.ops import OpName


@dataclass(frozen=True)
class Variables:
    """The use of variables by stages.

    ``users``: for each variable the stages that use it. The owner comes first, even if it does not use the variable. A
    variable that the loss head writes is owned by the stage of the loss head; the micro-batches of other stages use the
    value that it had before the step. ``state``: the variables that forward writes. ``once``: the variables of
    ``state`` that are written only once a step, with the same value on all replicas. ``summed``: the variables to which
    every write adds a sum over its samples, so the amounts that the replicas add are summed. ``at_end``: variables that
    only ``write_statistics`` uses, after all other calls. ``shares``: the variables whose update is sharded, each with
    the replica of its owner that keeps and updates it (see ``shard_optimizer``); replica 0 keeps the others.
    """

    users: tuple[tuple[str, tuple[int, ...]], ...]
    state: frozenset[str]
    once: frozenset[str] = frozenset()
    summed: frozenset[str] = frozenset()
    at_end: frozenset[str] = frozenset()
    shares: tuple[tuple[str, int], ...] = ()

    def owned(self, stage: int) -> tuple[str, ...]:
        """Return the variables that ``stage`` owns."""
        return tuple(name for name, stages in self.users if stages[0] == stage)

    def used(self, stage: int) -> tuple[str, ...]:
        """Return the variables that ``stage`` reads or writes."""
        return tuple(name for name, stages in self.users if stage in stages)

    def owner(self, name: str) -> int:
        """Return the stage that keeps and updates the variable: the first in its ``users``.

        ``name``: the name of the variable, or of a gradient of it (see ``names.of_target``). Raises KeyError if no
        stage uses the variable.
        """
        return dict(self.users)[without_target(name)][0]

    def home(self, name: str) -> Site:
        """Return the replica of the variable's owner that keeps it; ``name``: as for ``owner``."""
        return Site(self.owner(name), self.keepers.get(without_target(name), 0))

    @cached_property
    def keepers(self) -> Mapping[str, int]:
        """The ``shares`` by variable."""
        return dict(self.shares)

    @cached_property
    def sharded(self) -> frozenset[int]:
        """The stages whose update is sharded."""
        return frozenset(map(self.owner, self.keepers))

    def copied(self, stage: int, replica: int) -> tuple[str, ...]:
        """Return the variables that this replica uses as a copy.

        These are the variables kept elsewhere (by another device, or by another stage: tied weights) and those that
        forward writes, whose copies are committed only if the step succeeds.
        """
        return tuple(
            name
            for name in self.used(stage)
            if (name in self.state or self.home(name) != (stage, replica)) and name not in self.at_end
        )


def find_variables(graph: Graph, shares: tuple[tuple[str, int], ...] = ()) -> Variables:
    """Return the use of variables by the stage functions of ``graph``; ``shares``: see ``Variables``."""
    users: dict[str, list[int]] = {}
    state: set[str] = set()
    per_micro_batch: set[str] = set()
    added: set[str] = set()
    assigned: set[str] = set()
    for stage, function, once in _stage_functions(graph):
        for _, port in function.input_ports("variable"):
            stages = users.setdefault(port.name, [])
            if stage not in stages:
                stages.append(stage)
        writes = written_variables(function.graph)
        state |= writes.keys()
        per_micro_batch |= set() if once else writes.keys()
        for name, nodes in writes.items():
            (added if all(node.has("adds") for node in nodes) else assigned).add(name)
    count = _count_stages(graph)
    owners: dict[str, int] = {}
    for stage in range(count):
        owned = graph.function_by_name.get(at(stage, what=OWNED))
        owners |= {port.name: stage for _, port in owned.input_ports("variable")} if owned else {}
        owners |= dict.fromkeys(written_by_loss_head(graph, stage), stage)  # commits store what the owner's copy holds
    for name, stage in owners.items():
        if name in users:
            users[name] = [stage, *(other for other in users[name] if other != stage)]
    at_end: dict[str, list[int]] = {}
    for stage in range(count):
        end = graph.function_by_name.get(at(stage, what=OpName.WRITE_STATISTICS))
        names = [port.name for _, port in end.input_ports("variable")] if end else []
        at_end |= {name: [stage] for name in names if name not in users}
    found = tuple((name, tuple(stages)) for name, stages in (users | at_end).items())
    return Variables(
        found,
        frozenset(state),
        frozenset(state - per_micro_batch),
        frozenset(added - assigned),
        frozenset(at_end),
        tuple((name, replica) for name, replica in shares if name in users | at_end),
    )


def _count_stages(graph: Graph) -> int:
    """Return the number of stages that have functions in ``graph``."""
    return sum(1 for function in graph.functions if function.name.endswith(f"/{OpName.FORWARD}"))


def _stage_functions(graph: Graph) -> Iterator[tuple[int, Function, bool]]:
    """Yield each function of forward, backward or the loss head: its stage, itself, and whether it runs once a step."""
    of_micro_batches = OpName.FORWARD, *BACKWARD_OPS
    of_the_step = OpName.RUN_ONCE, SHARED_STATISTICS, OpName.PARTIALS, OpName.LOSS_HEAD
    for stage in range(_count_stages(graph)):
        for op in (*of_micro_batches, *of_the_step):
            function = graph.function_by_name.get(at(stage, what=op))
            if function is not None:
                yield stage, function, op in of_the_step


def find_writers(graph: Graph) -> Mapping[str, frozenset[int]]:
    """Return the stages that change each variable while they compute the loss."""
    found = defaultdict[str, set[int]](set)
    for stage, function, _ in _stage_functions(graph):
        for name in written_variables(function.graph):
            found[name].add(stage)
    return {name: frozenset(stages) for name, stages in found.items()}


def written_by_loss_head(graph: Graph, stage: int) -> frozenset[str]:
    """Return the variables that the loss head writes, if the stage has it."""
    head = graph.function_by_name.get(at(stage, what=OpName.LOSS_HEAD))
    return frozenset(written_variables(head.graph)) if head else frozenset()


# --- Find the variables that a rank must keep in memory: its graph reads or writes their values


# Ops that use a replica's copy of a variable, where it has one.
_USE_COPIES = frozenset({*STAGE_OPS, OpName.READ_STATE})
_USE_OWN = frozenset({OpName.READ_VARIABLE, OpName.READ_STATE, OpName.COMMIT, OpName.STORE_VERSION})


def resident_variables(graph: Graph) -> frozenset[str]:
    """Return the names of the variables that a rank's graph (see ``passes.project``) reads or writes itself.

    A copy is a variable of its own: where another rank owns a variable (tied weights), only its copy is resident.
    """
    return frozenset(name for _, names in variable_uses(graph) for name in names)


def variable_uses(graph: Graph) -> Iterator[tuple[Node, Sequence[str]]]:
    """Yield each node with the names of the variables that it reads or writes itself, not a replica's copy of them."""
    refreshes = nodes_of(graph, OpName.REFRESH)
    copies = {(*site_of(node), name) for node in refreshes for name in node.strings("variables")}
    for node in graph.nodes:
        names = _variables_of(graph, node)
        if node.op in _USE_COPIES:
            names = [name for name in names if (*site_of(node), name) not in copies]
        yield node, names


def written_by(graph: Graph, node: Node, names: Sequence[str]) -> Sequence[str]:
    """Return those of the variables ``names``, which a node uses, that it writes."""
    if node.has("function"):
        written = written_variables(graph.function(node.string("function")).graph)
        return [name for name in names if name in written]
    return names if node.op in (OpName.COMMIT, OpName.COUNT_UPDATE) else ()


def _variables_of(graph: Graph, node: Node) -> Sequence[str]:
    """Return the names of the variables that a node reads or writes, directly or as a copy."""
    if node.has("function"):
        return [port.name for _, port in graph.function(node.string("function")).input_ports("variable")]
    if node.op == OpName.REFRESH:
        return node.strings("variables")[len(node.inputs) :]  # the values of the first are inputs
    if node.op == OpName.COUNT_UPDATE:  # even where no update uses the step counter, such as SGD's
        return [node.string("variable")]
    return node.strings("variables") if node.op in _USE_OWN else ()
