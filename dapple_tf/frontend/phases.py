"""Cut the trace of a training step that takes gradients of several targets into phases.

Targets that need nothing of each other's gradients, and that the step could all compute before it takes the first ones,
are of one phase: one forward computes them all. What they need, their gradients, and what the step does with these
before it takes the next ones are a phase. Each phase is a training step of one loss, or of several. A phase computes
what it needs from the batch and from variables by itself, also what an earlier phase has computed too: its operations
and its operands are the same. It does not compute again what depends on a gradient of an earlier phase, what an earlier
phase has written or drawn, and what has been read from a variable that was written since. Such values are *handed
over*: the earlier phase stores them in variables of their own, and the later one reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.graph_passes.analysis.layers import CAPTURED_INPUTS, dependents, variables_of
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value, ancestors

HANDED_OVER = "handed_over"
"""The scope of the ops by which phases store and read what they hand over."""

_ACTING = (Effect.WRITE, Effect.SIDE, Effect.RANDOM)


@dataclass(frozen=True)
class StepTrace:
    """The trace of a training step in the IR: its ``graph``, and the ``numbers`` of its ops in the trace, by node.

    ``place_of``: returns the file and line of a node. ``kept``: the values of the forward that the custom gradient of
    each node uses.
    """

    graph: Graph
    numbers: Mapping[str, int]
    place_of: Callable[[str], str]
    kept: Mapping[str, Sequence[Value]]


@dataclass(frozen=True)
class Asked:
    """The gradients of one or several ``targets``: their ``arguments`` in the graph, by name, and their ``variables``.

    ``first_op``: the number of ops in the trace before they were first asked for. ``unrecorded``: the names of nodes
    through which no gradient passes. ``place``: file and line.
    """

    targets: tuple[Value, ...]
    arguments: frozenset[str]
    variables: frozenset[str]
    first_op: int
    unrecorded: frozenset[str]
    place: str


@dataclass(frozen=True)
class Phase:
    """A phase of a step: the loss of its targets, their gradients, and what is done with these before the next phase.

    ``kept``: the names of its nodes. ``taken``: the values that earlier phases hand over to it; ``given``: those that
    it hands over to later ones. ``returned``: the positions of the step's results that this phase computes.
    """

    kept: frozenset[str]
    taken: tuple[Value, ...]
    given: tuple[Value, ...]
    returned: frozenset[int]


@dataclass(eq=False)
class HandOver:
    """The variables that the phases of a step share, and the devices on which variables live.

    ``variables``: those that hold what is handed over, by the name, dtype and shape of the value. ``owners``: the
    device on which each variable lives, by the identity of the variable.
    """

    variables: dict[str, tf.Variable] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)

    def variable_of(self, tensor: tf.Tensor) -> tf.Variable:
        """Return the variable that holds a tensor of the trace between two phases."""
        dims = None if tensor.shape.rank is None else tensor.shape.as_list()
        key = f"{tensor.name} {tensor.dtype.name} {dims}"
        if key not in self.variables:
            with tf.init_scope():
                first = tf.zeros([] if dims is None else [dim or 0 for dim in dims], tensor.dtype)
                self.variables[key] = tf.Variable(first, shape=tensor.shape, trainable=False, name=HANDED_OVER)
        return self.variables[key]


def join_targets(trace: StepTrace, asked: Sequence[Asked]) -> list[list[int]]:
    """Return the positions in ``asked`` of the targets of each phase, in order.

    A target joins the phase of the targets before it on two conditions. It depends on none of their gradients, neither
    directly nor through what the step computes from them. And between their gradients and this target the step changes
    no floating-point variable on which this target depends. Counters and seeds of draws may change in between.
    """
    found: list[list[int]] = []
    for i, item in enumerate(asked):
        group = [asked[j] for j in found[-1]] if found else []
        if group and _can_join(trace, group, item):
            found[-1].append(i)
        else:
            found.append([i])
    return found


def _can_join(trace: StepTrace, group: Sequence[Asked], item: Asked) -> bool:
    graph, taken = trace.graph, frozenset().union(*(other.arguments for other in group))
    needed = ancestors(graph, _data_ancestors(trace, item))
    if taken & needed or len({graph.type_of(of.targets[0]).dtype for of in (*group, item)}) > 1:
        return False
    for node in (graph.node(name) for name in needed):
        if node.effect is not Effect.WRITE or trace.numbers[node.name] < group[0].first_op:
            continue
        if any(graph.type_of(value).dtype.differentiable for value in node.inputs):
            return False
    return all(_agree(trace, item, other) and _agree(trace, other, item) for other in group)


def _agree(trace: StepTrace, item: Asked, other: Asked) -> bool:
    """Return whether gradients of ``other`` pass through no node at which those of ``item`` end."""
    ends = unrecorded_of(trace, item)
    passed = (_data_ancestors(trace, other) & _of_variables(trace.graph, other)) - unrecorded_of(trace, other)
    return ends.isdisjoint(passed)


def unrecorded_of(trace: StepTrace, asked: Asked) -> frozenset[str]:
    """Return the nodes at which the gradients ``asked`` for end, since no tape recorded them."""
    return asked.unrecorded & _data_ancestors(trace, asked) & _of_variables(trace.graph, asked)


def _of_variables(graph: Graph, asked: Asked) -> set[str]:
    """Return the nodes that depend on the variables of ``asked`` by floating-point values."""
    return dependents(graph, asked.variables, by_gradients=True)


def rowless_targets(trace: StepTrace, asked: Sequence[Asked]) -> list[int]:
    """Return the positions in ``asked`` of targets whose gradients pass through nothing that takes rows of the batch.

    Such gradients need no micro-batches: the rate of a constraint, trained by the mean that a forward has returned.
    """
    graph, of_batch = trace.graph, _of_batch(trace.graph, asked)
    rows = (node for node in graph.nodes if node.op == "arg" and node.name in of_batch)
    sized = all(None not in (kind.shape.dims or (None,)) for node in rows for kind in node.outputs)

    def is_whole(value: Value) -> bool:
        dims = graph.type_of(value).shape.dims
        return value.node not in of_batch or dims == () or not (sized or dims is None or None in dims)

    found = []
    for i, item in enumerate(asked):
        passed = _reached_by_gradients(graph, item) & _data_ancestors(trace, item)
        if all(is_whole(value) for name in passed for value in graph.node(name).inputs):
            found.append(i)
    return found


def _of_batch(graph: Graph, asked: Sequence[Asked]) -> set[str]:
    """Return the nodes that depend on the batch, or on draws, other than by the gradients ``asked`` for."""
    gradients = frozenset().union(*(item.arguments for item in asked))
    rows = {node.name for node in graph.nodes if node.op == "arg" or node.effect is Effect.RANDOM}
    return dependents(graph, rows - gradients)


def join_asked(asked: Sequence[Asked]) -> Asked:
    """Return the gradients of all targets of a phase as one."""
    first = asked[0]
    return Asked(
        tuple(target for item in asked for target in item.targets),
        frozenset().union(*(item.arguments for item in asked)),
        frozenset().union(*(item.variables for item in asked)),
        first.first_op,
        frozenset.intersection(*(item.unrecorded for item in asked)),
        first.place,
    )


def cut_phases(trace: StepTrace, asked: Sequence[Asked], returned: Sequence[Value | None]) -> tuple[Phase, ...]:
    """Return the phases of the trace, one for each item of ``asked``, in this order; ``returned``: by the step.

    Raises CaptureError where a phase needs what it cannot compute and what cannot be handed over to it.
    """
    facts = _Facts.of(trace, asked)
    roots = [
        [
            *(target.node for target in asked[i].targets),
            *(node.name for node in trace.graph.nodes if node.effect in _ACTING and facts.phases[node.name] == i),
            *(value.node for value in returned if value is not None and facts.home(value.node) == i),
        ]
        for i in range(len(asked))
    ]
    given: list[dict[Value, None]] = [{} for _ in asked]
    found: list[Phase] = []
    for i in reversed(range(len(asked))):  # what a phase takes, an earlier one must compute
        names = [*roots[i], *(value.node for value in given[i])]
        kept, taken = _PhaseNodes(trace, facts, asked[i], i).find(names)
        for value in taken:
            given[facts.home(value.node)][value] = None
        here = {k for k, value in enumerate(returned) if value is not None and facts.home(value.node) == i}
        found.append(Phase(frozenset(kept), tuple(taken), tuple(given[i]), frozenset(here)))
    return tuple(reversed(found))


@dataclass(frozen=True)
class _Facts:
    """The uses and dependences of a step's nodes, found before the step is cut into phases.

    ``phases``: the phase before whose end each node can be computed, -1 where any phase can compute it; a node that
    acts belongs to this phase. ``losses``: for each phase the nodes that its target is computed from, and
    ``differentiated``: the nodes through which its gradients pass. ``of_batch``: the nodes that depend on the batch,
    and ``of_gradient`` on a gradient. ``writers``: the nodes that write each variable, and ``written_before``, for each
    node, those that run before it.
    """

    phases: Mapping[str, int]
    losses: tuple[frozenset[str], ...]
    differentiated: tuple[Set[str], ...]
    of_batch: Set[str]
    of_gradient: frozenset[str]
    writers: Mapping[str, Sequence[str]]
    written_before: Mapping[str, Set[str]]

    @staticmethod
    def of(trace: StepTrace, asked: Sequence[Asked]) -> _Facts:
        """Return the facts; see ``cut_phases``."""
        graph = trace.graph
        losses = tuple(_data_ancestors(trace, item) for item in asked)
        differentiated = tuple(_reached_by_gradients(graph, item) for item in asked)
        own = {name: i for i, item in enumerate(asked) for name in item.arguments}
        last_read: dict[str, int] = {}  # by variable, the last phase whose gradients pass through a read so far
        phases: dict[str, int] = {}
        of_batch = _of_batch(graph, asked)
        of_gradient: set[str] = set(own)
        writers: dict[str, list[str]] = {}
        written_before: dict[str, frozenset[str]] = {}
        none = frozenset[str]()
        for node in graph.nodes:  # in topological order
            sources = {value.node for value in node.inputs}
            before = [source for source in node.predecessors() if source in phases]
            if sources & of_gradient:
                of_gradient.add(node.name)
            found = max((phases[source] for source in before), default=-1)
            if node.op in CAPTURED_INPUTS:
                found = own.get(node.name, -1)
            elif node.name in of_batch and node.name not in of_gradient:
                found = max(found, next((i for i, names in enumerate(losses) if node.name in names), -1))
            if node.effect in _ACTING:
                found = max(0, found, sum(item.first_op <= trace.numbers[node.name] for item in asked) - 1)
            earlier = {written_before[source] for source in before}
            written = none.union(*earlier) if len(earlier) != 1 else next(iter(earlier))
            if node.effect is Effect.READ:
                for name in variables_of(graph, node):
                    taking = [i for i, names in enumerate(losses) if node.name in names & differentiated[i]]
                    last_read[name] = max([last_read.get(name, -1), *taking])
            if node.effect is Effect.WRITE:
                for target in node.strings("writes"):
                    writers.setdefault(target, []).append(node.name)
                    found = max(found, last_read.get(target, -1))  # a later phase repeats the forward of before
                written |= {node.name}
            phases[node.name], written_before[node.name] = found, written
        return _Facts(phases, losses, differentiated, of_batch, frozenset(of_gradient), writers, written_before)

    def home(self, node: str) -> int:
        """Return the first phase that computes a node."""
        return max(0, self.phases[node])


class _PhaseNodes:
    """Finds the nodes of one phase, and the values that it takes from earlier ones."""

    def __init__(self, trace: StepTrace, facts: _Facts, asked: Asked, number: int) -> None:
        self._graph, self._facts, self._asked, self._number = trace.graph, facts, asked, number
        self._place_of, self._kept_of = trace.place_of, trace.kept
        self._loss = facts.losses[number]
        self._earlier = {
            node.name for node in trace.graph.nodes if node.effect in _ACTING and facts.phases[node.name] < number
        }
        self._foreign = self._find_foreign()
        self._differentiated = facts.differentiated[number]

    def find(self, roots: Collection[str]) -> tuple[set[str], list[Value]]:
        """Return the names of the nodes that compute ``roots``, and the values to take."""
        self._check_order()
        kept: set[str] = set()
        taken: dict[Value, None] = {}
        pending = list(roots)
        while pending:
            node = self._graph.node(pending.pop())
            if node.name in kept:
                continue
            kept.add(node.name)
            self._check_time(node, node)
            for control in node.controls:
                if control.source in self._graph.by_name:
                    self._check_time(self._graph.node(control.source), node)
            of_gradient = self._kept_of.get(node.name, ())
            for value in (*node.inputs, *of_gradient):
                if self._is_taken(value):
                    self._check_taken(value)
                    if value in of_gradient:
                        raise CaptureError(
                            f"{self._place_of(node.name) or self._asked.place}: the custom gradient of {node.name!r} "
                            f"uses {value.node!r}, which the step has computed for the gradients taken earlier: make "
                            "it an argument of the function that has the custom gradient"
                        )
                    taken[value] = None
                else:
                    pending.append(value.node)
        return kept, list(taken)

    def _find_foreign(self) -> set[str]:
        """Return the nodes that this phase does not compute from the batch and the variables as it finds them."""
        facts, number = self._facts, self._number
        found: set[str] = set()
        for node in self._graph.nodes:
            earlier = facts.phases[node.name] < number
            if node.op in CAPTURED_INPUTS:
                foreign = facts.phases[node.name] >= 0 and earlier
            elif node.effect in _ACTING and earlier:
                foreign = True
            else:
                foreign = self._overwritten(node) != "" or any(value.node in found for value in node.inputs)
            if foreign:
                found.add(node.name)
        return found

    def _overwritten(self, node: Node) -> str:
        """Return the variable that a node reads, and that an earlier phase writes after it; "" where there is none."""
        if node.effect is not Effect.READ:
            return ""
        facts = self._facts
        for name in variables_of(self._graph, node):
            for writer in facts.writers.get(name, ()):
                if facts.phases[writer] < self._number and writer not in facts.written_before[node.name]:
                    return name
        return ""

    def _is_taken(self, value: Value) -> bool:
        name, facts = value.node, self._facts
        node = self._graph.node(name)
        if facts.home(name) >= self._number or (node.op in CAPTURED_INPUTS and name not in self._foreign):
            return False
        of_batch = name in facts.of_batch
        if name not in self._loss:
            return name in self._foreign or (of_batch and facts.phases[name] >= 0)
        if name not in self._foreign:
            return False
        can_be_kept = node.effect is Effect.PURE and node.op not in CAPTURED_INPUTS
        if can_be_kept and name in self._differentiated:
            return False
        if not (can_be_kept and of_batch):
            return True
        kind = self._graph.type_of(value)  # a length may be the batch's, which is another one in each micro-batch
        return kind.dtype.differentiable and kind.shape.dims is not None and None not in kind.shape.dims

    def _check_time(self, source: Node, node: Node) -> None:
        """Raise CaptureError where this phase would need what the step computes after a later phase's loss."""
        if self._facts.phases[source.name] > self._number:
            raise CaptureError(
                f"{self._place_of(node.name) or self._place_of(source.name)}: what the step computes for the gradients "
                f"at {self._asked.place} needs {source.name!r}, which it computes only after it takes later gradients: "
                "take the gradients of one loss after those of the other, in the order in which their losses are "
                "computed"
            )

    def _check_order(self) -> None:
        """Raise CaptureError where the target needs variables both before and after the step changes them."""
        facts = self._facts
        for name in ancestors(self._graph, [target.node for target in self._asked.targets], stop=self._earlier):
            node = self._graph.node(name)
            if node.effect is Effect.WRITE and name in facts.of_gradient:
                raise CaptureError(
                    f"{self._place_of(name) or self._asked.place}: the gradients at {self._asked.place} pass through a "
                    "forward that the step has computed before it changes variables here, and through what it computes "
                    "after that: take the gradients of each by themselves, and add them"
                )

    def _check_taken(self, value: Value) -> None:
        """Raise CaptureError where an earlier phase cannot hand over a value."""
        node, kind = self._graph.node(value.node), self._graph.type_of(value)
        where = f"{self._place_of(value.node) or self._asked.place}: the gradients at {self._asked.place}"
        if kind.dtype.handle:
            raise CaptureError(
                f"{where} need a {kind.dtype.name} ({value}) that comes before the gradients taken earlier, and that "
                "cannot be handed over: compute it again after these"
            )
        if value.node not in self._loss:
            return
        if value.node in self._differentiated:
            variable = self._overwritten(node)
            why = f"reads {variable!r} before the step changes it" if variable else "runs once, for earlier gradients"
            raise CaptureError(
                f"{where} pass through {value.node!r} ({node.op}), which {why}: take all gradients of a forward before "
                "the step changes variables, or compute the forward again"
            )
        if kind.shape.dims is None or None in kind.shape.dims:
            raise CaptureError(
                f"{where} need {value.node!r} ({node.op}), which has a row for each sample and runs once, for the "
                "gradients taken earlier, so it cannot be handed to micro-batches: draw with a seed "
                "(tf.random.Generator, keras.random with a SeedGenerator, tf.random.stateless_*), or pass it as an "
                "argument"
            )


def _data_ancestors(trace: StepTrace, asked: Asked) -> frozenset[str]:
    """Return the nodes whose values the targets and their gradients are computed from."""
    targets = [value.node for value in asked.targets]
    return frozenset(ancestors(trace.graph, targets, by_controls=False, used=trace.kept))


def _reached_by_gradients(graph: Graph, asked: Asked) -> set[str]:
    """Return the nodes through which gradients for the variables pass, as far as the tape has recorded them."""
    stopped = {node.name for node in graph.nodes if node.op == "StopGradient"}
    return dependents(graph, asked.variables, asked.unrecorded | stopped, by_gradients=True)
