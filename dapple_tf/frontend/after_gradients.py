"""Divide the trace of a training step: the loss, which micro-batches compute, and the part after the gradients.

What the target of ``tape.gradient`` needs is the loss. The part after the gradients runs once a step. It has all nodes
that depend on a gradient, and all nodes with an effect (writes, prints, Python code, draws) that the loss does not
need. It takes *whole values*: results of the loss's graph for the whole batch, which are put together from the results
of the micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError
from dapple_tf.frontend.conditions import open_conditions
from dapple_tf.frontend.optimizer_update import TracedUpdate
from dapple_tf.frontend.phases import StepTrace
from dapple_tf.frontend.trace_inputs import TraceInputs
from dapple_tf.graph_passes.analysis.layers import dependents, layer_of
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value, ancestors, attributes, search_back
from dapple_tf.graph_passes.ir.names import without_target

_ACTING = (Effect.WRITE, Effect.SIDE, Effect.RANDOM)
WHOLE = "whole"
"""The role of the values of the loss's graph that the part after the gradients takes."""


@dataclass(frozen=True, eq=False)
class AfterGradients:
    """The part of a training step that runs after its gradients.

    ``graph``: the whole trace; a gradient is an ``arg`` node, whose port is the variable. ``nodes``: the names of the
    nodes that run after the gradients. ``whole``: the values of the loss's graph that these nodes take, or that the
    step returns, the loss first. ``returned``: what the step returns, flattened, None where it returns None;
    ``structure``: its nesting. ``variables``, ``constants``: of the whole trace. ``place_of``: returns the file and
    line of a node.
    """

    graph: Graph
    nodes: frozenset[str]
    whole: tuple[Value, ...]
    returned: tuple[Value | None, ...]
    structure: Any
    variables: Mapping[str, tf.Variable]
    constants: Mapping[str, tf.Tensor]
    place_of: Callable[[str], str]

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of the gradients that are used, in the order in which the step has asked for them."""
        arguments = (node for node in self.graph.nodes if node.op == "arg" and node.name in self.nodes)
        return tuple(dict.fromkeys(node.string("port") for node in arguments))

    @property
    def roots(self) -> tuple[Value, ...]:
        """The values that the part after the gradients takes from elsewhere, and those that the step returns."""
        taken = (v for node in self.graph.nodes if node.name in self.nodes for v in node.inputs)
        return tuple(dict.fromkeys([*taken, *(v for v in self.returned if v is not None)]))


def part_step(
    trace: StepTrace,
    inputs: TraceInputs,
    target: Value,
    first_op: int,
    returned: Sequence[Value | None],
    structure: Any,
    handed_over: Set[str],
) -> AfterGradients:
    """Return the part of the trace after the gradients of ``target``.

    ``inputs``: of the trace. ``first_op``: the number of ops before the gradients were taken. ``handed_over``: the
    nodes that read values which earlier phases hand over. These are values of the whole batch, so they belong to the
    part after the gradients unless the target needs them. Raises CaptureError where the target depends on a gradient.
    """
    graph, numbers = trace.graph, trace.numbers
    needed = ancestors(graph, [target.node], used=trace.kept)
    of_batch = dependents(graph, [node.name for node in graph.nodes if node.op == "arg" and not node.has("role")])

    def acts_after(node: Node) -> bool:
        """Return whether a node with an effect runs once, after the gradients, also if it depends on none of them."""
        if node.effect not in _ACTING or node.name in needed:
            return False
        own = not layer_of(node) or (node.name in of_batch and not node.has("batch_norm"))
        return numbers[node.name] >= first_op or (node.effect is Effect.WRITE and own)

    kept = [node for node in graph.nodes if node.effect is Effect.WRITE and not acts_after(node)]
    state = {name for node in kept for name in node.strings("writes")}
    after: set[str] = set()
    for node in graph.nodes:  # in topological order
        # What the loss has written is complete only after all micro-batches.
        of_state = node.effect is Effect.READ and any(value.node in state for value in node.inputs)
        reads_state = of_state and node.name not in needed and numbers[node.name] >= first_op
        is_gradient = node.op == "arg" and node.has("role")
        of_whole = node.name in handed_over and node.name not in needed
        starts = acts_after(node) or reads_state or is_gradient or of_whole
        if starts or any(source in after for source in node.predecessors()):
            after.add(node.name)
    if late := sorted(after & needed, key=lambda name: numbers[name]):
        raise CaptureError(
            f"{trace.place_of(late[0])}: the target of tape.gradient depends on what the step computes from its "
            "gradients, or on what it does after taking them: compute the target before"
        )
    acting = [name for name in after if graph.node(name).effect in _ACTING]
    after &= ancestors(graph, [*acting, *(value.node for value in returned if value is not None)])
    part = AfterGradients(
        graph,
        frozenset(after),
        (target,),
        tuple(returned),
        structure,
        inputs.variables,
        inputs.constants,
        trace.place_of,
    )
    return dataclasses.replace(part, whole=(target, *_crossing(part, part.roots, {target})))


def take_inputs_of(part: AfterGradients, values: Sequence[Value]) -> AfterGradients:
    """Return the part with the nodes that compute ``values``: it takes the inputs of these nodes from the loss's graph.

    ``values``: some of those that it took from the loss's graph until now. A value is taken from there as before if its
    node cannot run after the gradients: it is an argument, draws numbers, has an effect, or reads a variable.
    """
    keep = {value for value in part.whole if value == part.whole[0] or value not in values}
    inputs: list[Value] = []
    for value in values:
        node = part.graph.node(value.node)
        if node.op == "arg" or node.effect is not Effect.PURE:
            keep.add(value)
        else:
            inputs += node.inputs
    kept = tuple(value for value in part.whole if value in keep)
    return dataclasses.replace(part, whole=(*kept, *_crossing(part, inputs, keep)))


def _crossing(part: AfterGradients, values: Sequence[Value], known: Set[Value]) -> list[Value]:
    """Return those of ``values`` that are to be taken from the loss's graph, and that are not ``known``."""
    own = part.nodes | _without_batch(part)
    return list(dict.fromkeys(value for value in values if value.node not in own and value not in known))


def _without_batch(part: AfterGradients) -> set[str]:
    """Return the nodes outside the part that it may compute again: they depend on no batch and on nothing written."""
    graph, found = part.graph, set[str]()
    outside = [node for node in graph.nodes if node.name not in part.nodes]
    written = {name for node in outside if node.effect is Effect.WRITE for name in node.strings("writes")}
    for node in outside:
        if node.op == "arg" or node.effect not in (Effect.PURE, Effect.READ):
            continue
        sources = {value.node for value in node.inputs}
        if sources <= found and not (node.effect is Effect.READ and sources & written):
            found.add(node.name)
    return found


def loss_nodes(part: AfterGradients, used: Mapping[str, Sequence[Value]]) -> set[str]:
    """Return the nodes of the loss's graph, with those that act besides (a layer's writes), and all batch arguments.

    ``used``: the values of the forward that the custom gradient of each node uses. Of batch norm all nodes are kept:
    its statistics may be written from others than the layer itself uses.
    """
    graph = part.graph
    kept = [node.name for node in graph.nodes if node.has("batch_norm") and node.name not in part.nodes]
    acting = [node.name for node in graph.nodes if node.effect in _ACTING and node.name not in part.nodes]
    arguments = [node.name for node in graph.nodes if node.op == "arg" and not node.has("role")]
    return ancestors(graph, [*(value.node for value in part.whole), *acting, *arguments, *kept], used=used)


def trace_of(part: AfterGradients, func_graph: Any, trained: Sequence[str]) -> TracedUpdate:
    """Return the part as an update that can be cut into stages: see ``TracedUpdate``.

    It takes gradients, and whole values by their number among ``whole``. ``func_graph``: the trace. ``trained``: the
    names of the variables that have gradients. Raises CaptureError where the part draws from the hidden state of a
    generator.
    """
    graph = part.graph
    taken = {value: Node(f"{WHOLE}/{i}", "arg") for i, value in enumerate(part.whole)}
    computed, used = search_back(graph, part.roots, lambda value: value in taken)
    members = part.nodes | computed
    whole = [
        dataclasses.replace(
            taken[value],
            outputs=(graph.type_of(value),),
            attrs=attributes({"port": str(part.whole.index(value)), "role": WHOLE}),
        )
        for value in part.whole
        if value in used
    ]
    nodes = [
        dataclasses.replace(
            node.replace_inputs({value: Value(argument.name) for value, argument in taken.items()}),
            controls=tuple(control for control in node.controls if control.source in members),
        )
        for node in graph.nodes
        if node.name in members
    ]
    for node in nodes:
        if node.effect is Effect.RANDOM:
            raise CaptureError(
                f"{part.place_of(node.name)}: {node.name!r} ({node.op}) draws from a hidden state after the gradients, "
                "so its numbers would not be those of one device: give the draw a seed (keras.random with a "
                "SeedGenerator, tf.random.stateless_*, tf.random.Generator)"
            )
    outputs = tuple(value for value in part.returned if value is not None and value not in taken)
    update = graph.replace(
        name="after gradients", inputs=(), nodes=(*whole, *nodes), outputs=tuple(dict.fromkeys(outputs))
    )
    update = open_conditions(update.sorted(), func_graph)
    names = {node.name for node in update.nodes if node.op == "variable"}
    constants = {name: value for name, value in part.constants.items() if name in update.by_name}
    return TracedUpdate(
        update,
        dict(part.variables),
        constants,
        tuple(internals.keras_variables([part.variables[without_target(name)] for name in trained])),
        None,
        func_graph,
        "",
        frozenset(names - set(trained)),
    )
