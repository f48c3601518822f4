"""Update the weights: once all gradients are computed, each stage updates its variables (DAPPLE, V.A.3, Fig. 10)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Control, Function, Graph, Node, Role, Value, make_node, tensor
from dapple_tf.graph_passes.ir.names import Site, nodes_of, site_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.passes.gather_slices import dense_type
from dapple_tf.graph_passes.passes.split_update import Updates

_NORM = tensor("float64")
BARRIER_NAME = "update/barrier"

Gradients = dict[tuple[Role, str], Value]
"""The gradients and terms that updates may take, by the role and the name of the port."""


@dataclass(frozen=True)
class Apply(BuiltInPass):
    """Add clipping by the global norm over all stages, the updates, and the end of the step."""

    updates: Updates
    global_clipnorm: float | None = None
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD, OpName.MERGE}),
        requires_if_trained=frozenset({OpName.REDUCED_GRADIENTS}),
        requires_if_sparse=frozenset({OpName.GATHER_SLICES}),
        forbids=frozenset({OpName.BARRIER, OpName.UPDATE, OpName.DENSIFY, OpName.TIMESTAMP}),
        produces=frozenset({OpName.BARRIER, OpName.SET_UPDATING}),
        may_produce=frozenset({OpName.UPDATE, OpName.SQUARE_NORM, OpName.GLOBAL_NORM, OpName.CLIP})
        | {OpName.UPDATE_TERMS, OpName.COMBINE_TERMS},
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with a barrier, the calls ``stageN/update`` after it, and ``update/done`` after everything.

        Its outputs are followed by what the updates return. What the optimizer computes from the gradients of several
        stages is computed before the barrier; in a later round, after the updates of the rounds before.

        No variable is written before the barrier, and the barrier waits for all gradients and for the loss: a step that
        fails in forward, backward or AllReduce leaves all variables as they were. Raises GraphError if an update takes
        the gradient of a variable that no backward call gives.
        """
        reduced, gathered = nodes_of(graph, OpName.REDUCED_GRADIENTS), nodes_of(graph, OpName.GATHER_SLICES)
        barrier = Node(BARRIER_NAME, OpName.BARRIER)
        for node in (*reduced, *gathered):
            barrier = barrier.after(node.name, "barrier: no weight changes before every gradient is there")
        for value in graph.outputs:
            barrier = barrier.after(value.node, "barrier: no weight changes before the loss is there")
        for node in nodes_of(graph, OpName.WRITE_STATISTICS):
            for value in node.inputs:
                barrier = barrier.after(value.node, "barrier: no variable changes before all statistics are there")
        added: list[Node] = []
        gradients: Gradients = {}
        for node in (*reduced, *gathered):
            gradients |= complete_gradients(node)
        gradients |= {("whole", str(number)): value for number, value in enumerate(graph.outputs)}
        if self.global_clipnorm is not None:
            added += _clip(reduced, gathered, gradients, float(self.global_clipnorm))
        terms = _terms(self.updates, gradients)
        for node in terms:
            barrier = barrier.after(node.name, "barrier: no weight changes before the optimizer's terms are there")
        added = [barrier, *added, *terms]
        begin = make_node("update/begin", OpName.SET_UPDATING, updating=True)
        begin = begin.after(BARRIER_NAME, "barrier: from here on a failure leaves the step half-applied")
        added.append(begin)
        start: tuple[Control, ...] = (Control(begin.name, "barrier: nothing is half-updated by a failure"),)
        calls, ends = _round(graph, self.updates, gradients, start)
        added += calls
        states = [node.name for node in nodes_of(graph, OpName.COMMIT, OpName.WRITE_STATISTICS)]
        for later in self.updates.rounds[1:]:
            before = [*([control.source for control in ends] or [begin.name]), *states]
            start = tuple(Control(name, "round: it reads what was written before") for name in before)
            terms = [dataclasses.replace(node, controls=start) for node in _terms(later, gradients)]
            calls, ends = _round(graph, later, gradients, start)
            added += [*terms, *calls]
            ends = ends or [Control(name, "the step ends after its last round") for name in before]
        nodes = []
        for node in graph.nodes:
            if node.op in (OpName.COMMIT, OpName.WRITE_STATISTICS):
                node = node.after(begin.name, "barrier: nothing is half-written by a failure")
                ends.append(Control(node.name, "the step ends when all state is written"))
            nodes.append(node)
        ends = ends or [Control(begin.name, "the step ends after its barrier")]
        done = make_node("update/done", OpName.SET_UPDATING, (), (), ends, updating=False)
        added.append(done)
        outputs = [*graph.outputs]
        for number, port in enumerate(self.updates.returned):
            value = gradients[port]
            if port[0] == "partial":  # one stage has the value: in a job this node gives it to every rank
                kind = next(node for node in added if node.name == value.node).outputs[value.index]
                added.append(make_node(f"returned/{number}", OpName.MERGE, [value], [kind], kind="first"))
                value = Value(added[-1].name)
            outputs.append(value)
        return graph.replace(
            nodes=(*nodes, *added), outputs=tuple(outputs), functions=(*graph.functions, *self.updates.functions)
        ).sorted()


def _round(
    graph: Graph, updates: Updates, gradients: Gradients, start: tuple[Control, ...]
) -> tuple[list[Node], list[Control]]:
    """Return the calls of a round's updates, and control edges from the last ones; put results in ``gradients``."""
    added: list[Node] = []
    commits = [node.name for node in nodes_of(graph, OpName.COMMIT)]
    statistics = nodes_of(graph, OpName.WRITE_STATISTICS)
    first = start
    if updates.before is not None:
        added.append(_update(updates.before, None, gradients, start))
        gradients |= _results(updates.before, added[-1])
        first = (Control(added[-1].name, "barrier: nothing is half-updated by a failure"),)
    ends = []
    for site, function in updates.stages:
        update = _update(function, site, gradients, first)
        for name in commits:
            update = update.after(name, "update: the optimizer steps from what forward wrote")
        for node in statistics:
            if _variables(graph.function(node.string("function"))) & _variables(function):
                update = update.after(node.name, "update: it uses the statistics that forward wrote")
        added.append(update)
        gradients |= _results(function, update)
        ends.append(Control(update.name, "the optimizer steps once, after all updates"))
    if updates.after is not None:
        node = _update(updates.after, None, gradients, first)
        gradients |= _results(updates.after, node)
        added.append(dataclasses.replace(node, controls=(*node.controls, *ends)))
        ends = [Control(node.name, "the step ends after the optimizer")]
    return added, ends or list(first if updates.before is not None else ())


def _variables(function: Function) -> set[str]:
    return {port.name for _, port in function.input_ports("variable")}


def _clip(reduced: Sequence[Node], gathered: Sequence[Node], gradients: Gradients, limit: float) -> list[Node]:
    """Return nodes that scale all gradients to a global norm of at most ``limit``, and put them in ``gradients``.

    As in Keras, the norm counts each slice by itself, also slices of the same row; the scaled gradients are dense.
    """
    squares, clips = [], []
    norm = "update/global_norm"
    for site in sorted({site_of(node) for node in (*reduced, *gathered)}):
        dense = [node for node in reduced if site_of(node) == site]
        sparse = [node for node in gathered if site_of(node) == site]
        measured = (*(value for node in dense for value in node.values()), *(node.values()[0] for node in sparse))
        squares.append(make_node(site.at(OpName.SQUARE_NORM), OpName.SQUARE_NORM, measured, [_NORM], **site.attrs))
        inputs = (Value(norm), *(value for node in (*dense, *sparse) for value in node.values()))
        kinds = (*(kind for node in dense for kind in node.outputs), *map(dense_type, sparse))
        attrs = site.attrs | {"limit": limit} | ({"slices": len(sparse)} if sparse else {})
        clip = make_node(site.at(OpName.CLIP), OpName.CLIP, inputs, kinds, **attrs)
        clips.append(clip)
        names = [name for node in dense for name in node.strings("variables")]
        names += [node.string("variable") for node in sparse]
        gradients |= {("gradient", variable): value for variable, value in zip(names, clip.values(), strict=True)}
    parts = tuple(Value(node.name) for node in squares)
    return [*squares, Node(norm, OpName.GLOBAL_NORM, parts, (_NORM,)), *clips]


def _terms(updates: Updates, gradients: Gradients) -> list[Node]:
    """Return the calls that compute and combine the stages' terms, and put their results in ``gradients``."""
    calls: list[Node] = []
    for site, function in updates.terms:
        inputs = update_inputs(function, gradients)
        calls.append(function.call(function.name, OpName.UPDATE_TERMS, inputs, **site.attrs))
        gradients |= _results(function, calls[-1])
    if updates.combine is not None:
        name, inputs = updates.combine.name.replace("optimizer", "update"), update_inputs(updates.combine, gradients)
        calls.append(updates.combine.call(name, OpName.COMBINE_TERMS, inputs))
        gradients |= _results(updates.combine, calls[-1])
    return calls


def _results(function: Function, call: Node) -> Gradients:
    return {(port.role, port.name): value for port, value in zip(function.outputs, call.values(), strict=True)}


def complete_gradients(node: Node) -> Gradients:
    """Return the gradients that a ``reduced_gradients`` or ``gather_slices`` node gives."""
    if node.op == OpName.GATHER_SLICES:
        slices, indices = node.values()
        return {("slices", node.string("variable")): slices, ("indices", node.string("variable")): indices}
    return {("gradient", name): value for name, value in zip(node.strings("variables"), node.values(), strict=True)}


def update_inputs(function: Function, gradients: Gradients) -> tuple[Value, ...]:
    """Return the values that a function of the optimizer takes, variables left out.

    Raises GraphError if it takes a gradient or a term that is not among ``gradients``.
    """
    taken = [port for port in function.inputs if port.role != "variable"]
    for port in taken:
        if (port.role, port.name) not in gradients:
            what = "gradient" if port.role == "gradient" else f"{port.role} (its gradient is dense)"
            raise GraphError(f"{function.name!r} updates {port.name!r}, but no backward gives its {what}")
    return tuple(gradients[port.role, port.name] for port in taken)


def _update(function: Function, site: Site | None, gradients: Gradients, after: tuple[Control, ...]) -> Node:
    name, attrs = function.name.replace("optimizer", "update"), {} if site is None else site.attrs
    call = function.call(name, OpName.UPDATE, update_inputs(function, gradients), **attrs)
    return dataclasses.replace(call, controls=after)
