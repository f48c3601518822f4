"""The layers of a model's graph, and the places where it can be cut into stages.

Capture gives each op the attribute ``layer``, the path of the Keras layer that called it, or ``within``, where that
layer contains other layers. Consecutive ops with the same ``layer`` form a layer. Every other op is a layer of its own,
named by its path and the op's name.

*Floating* nodes belong to no layer: constants, reads of variables that forward does not write, shapes of the batch's
tensors, and what is computed from these. They are repeated in each stage that uses them, so neither a weight nor a
shape crosses a stage boundary. Weight terms do not float: see ``weight_terms``.

A node with the attribute ``captures`` has a custom gradient that uses the results of the nodes of these names, which
cannot leave their device: the model is not cut between them and the node.

Nodes with the attribute ``once`` belong to no layer either: they run once a step, on the whole batch, in each stage
that uses them. Nodes of the loss head belong to no layer (see ``loss_head``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.analysis.loss_head import (
    LossHeadInput,
    find_head_inputs,
    find_loss_head,
    outside_of_loss_head,
)
from dapple_tf.graph_passes.analysis.weight_terms import find_weight_terms
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, TensorType, Value, ancestors

CAPTURED_INPUTS = frozenset({"arg", "rows", "variable", "capture"})
"""Ops of the inputs of a captured graph."""

TAKES_ROWS = "takes_rows"
"""Attribute of a node that takes a micro-batch's rows of a value computed once a step. Such a node does not float."""

SHAPE_OPS = frozenset({"Shape", "ShapeN", "Size", "Rank"})
"""Ops whose results depend on the shapes of their inputs only."""

SMALL_OPS = SHAPE_OPS | {"BroadcastGradientArgs"}
"""Ops that give small integers, computed from shapes."""


@dataclass(frozen=True)
class Layer:
    """Ops that are never cut apart. ``name`` is unique: a path of Keras layers, or the name of an op."""

    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """The cut before layer ``position``: the tensors that cross it, and why it is impossible ("" if it is possible).

    ``splittable``: each tensor has one batch axis or is a weight term, so the stages on both sides may have different
    replica counts.
    """

    position: int
    crossing: tuple[Value, ...]
    splittable: bool
    problem: str


@dataclass(frozen=True)
class Layers:
    """The layers of ``graph`` in a topological order, and the cut before each layer but the first.

    ``floating``: the nodes of no layer, which stages repeat; ``once``: those that run once a step. ``weight_terms``:
    the nodes of layers whose results are equal on all replicas. ``loss_head``: the nodes that run once, after all
    micro-batches, on the rows of ``head_inputs``.
    """

    graph: Graph
    layers: tuple[Layer, ...]
    cuts: tuple[Cut, ...]
    floating: frozenset[str]
    weight_terms: frozenset[str]
    once: frozenset[str] = frozenset()
    loss_head: frozenset[str] = frozenset()
    head_inputs: tuple[LossHeadInput, ...] = ()

    def cut(self, position: int) -> Cut:
        """Return the cut before layer ``position``, which is at least 1."""
        return self.cuts[position - 1]

    def positions(self) -> tuple[int, ...]:
        """Return the positions where the graph can be cut."""
        return tuple(cut.position for cut in self.cuts if not cut.problem)

    def cut_only_as(self, other: Layers) -> Layers:
        """Return these layers without the possible cuts that are impossible in ``other``, a trace of the same function.

        A cut that is taken away stays in ``cuts``, with the reason as its ``problem``.
        """
        where = {layer.name: position for position, layer in enumerate(other.layers)}

        def with_problem(cut: Cut) -> Cut:
            name = self.layers[cut.position].name
            there = (
                other.cut(where[name]).problem if where.get(name) else "with one micro-batch no stage can start here"
            )
            return cut if cut.problem else replace(cut, problem=there)

        return replace(self, cuts=tuple(map(with_problem, self.cuts)))

    def find(self, name: str) -> int:
        """Return the index of the first layer that ``name`` matches: a layer's name, or a part of its path.

        Raises PartitionError if the name is unknown (the message has the nearest names) or ambiguous (the message has
        up to six paths that it may mean).
        """
        return self.find_all(name)[0]

    def find_all(self, name: str) -> tuple[int, ...]:
        """Return the indices of all layers that ``name`` matches. Raises PartitionError as ``find`` does."""
        for index, layer in enumerate(self.layers):
            if layer.name == name:
                return (index,)
        wanted = tuple(name.split("/"))
        found: dict[tuple[str, ...], int] = {}
        for index, layer in enumerate(self.layers):
            parts = tuple(layer.name.split("/"))
            for end in range(len(wanted), len(parts) + 1):
                if parts[end - len(wanted) : end] == wanted:
                    found.setdefault(parts[:end], index)
        if len(set(found.values())) == 1:
            (path, *_) = found
            return tuple(i for i, layer in enumerate(self.layers) if tuple(layer.name.split("/"))[: len(path)] == path)
        if found:
            names = ", ".join("/".join(parts) for parts in list(found)[:6])
            raise PartitionError(f"layer name {name!r} is ambiguous: it may be {names}. Write the longer name.")
        known = dict.fromkeys(part for layer in self.layers for part in (layer.name, *layer.name.split("/")))
        near = difflib.get_close_matches(name, known, n=4, cutoff=0.4) or list(known)[:4]
        raise PartitionError(f"no layer is called {name!r}; the nearest are {', '.join(map(repr, near))}")


def batch_axis(kind: TensorType) -> int | None:
    """Return the batch axis, the only axis of unknown length, or None if there is not exactly one."""
    unknown = [axis for axis, dim in enumerate(kind.shape.dims or ()) if dim is None]
    return unknown[0] if len(unknown) == 1 else None


def written_variables(graph: Graph) -> dict[str, list[Node]]:
    """Return the variables that the graph writes, each with the nodes that write it."""
    written: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for variable in node.written:
            written.setdefault(variable, []).append(node)
    return written


def variables_of(graph: Graph, node: Node) -> tuple[str, ...]:
    """Return the names of the variables that a node takes as resources."""
    return tuple(v.node for v in node.inputs if graph.node(v.node).op == "variable")


def find_floating(graph: Graph) -> frozenset[str]:
    """Return the names of the nodes that each stage may repeat: inputs, floating nodes and weight terms."""
    written = written_variables(graph)
    floating = {node.name for node in graph.nodes if node.op in CAPTURED_INPUTS}
    once = find_once(graph)
    args = {node.name for node in graph.nodes if node.op == "arg"}
    for node in graph.nodes:
        if node.op in CAPTURED_INPUTS or node.name in once or node.effect not in (Effect.PURE, Effect.READ):
            continue
        if node.has(TAKES_ROWS):
            continue
        sources = set(node.predecessors())
        if sources & args and (node.op not in SHAPE_OPS or not sources <= args):
            continue
        if sources <= floating | once and not any(name in written for name in variables_of(graph, node)):
            floating.add(node.name)
    return frozenset(floating)


def _computed_of_rows(graph: Graph) -> set[str]:
    """Return the nodes that depend on variables and also on the batch or on the numbers of the micro-batch's rows."""
    rows = [node.name for node in graph.nodes if node.op in ("arg", "rows")]
    variables = [node.name for node in graph.nodes if node.op == "variable"]
    return dependents(graph, rows) & dependents(graph, variables)


def dependents(
    graph: Graph,
    roots: Iterable[str],
    stop: Iterable[str] = (),
    *,
    by_gradients: bool = False,
    by_controls: bool = False,
) -> set[str]:
    """Return ``roots`` and all nodes that take their values, directly or not, without those in ``stop``.

    The nodes are in topological order. ``by_gradients``: count only values that have gradients, or may hold such
    values: floats, and handles of variables and lists. ``by_controls``: count control edges, too.
    """
    barred = set(stop)
    found = set(roots) - barred
    for node in graph.nodes:
        kinds = (graph.type_of(value).dtype for value in node.inputs if value.node in found)
        takes = any(not by_gradients or kind.differentiable or kind.handle for kind in kinds)
        waits = by_controls and any(control.source in found for control in node.controls)
        if node.name not in barred and (takes or waits):
            found.add(node.name)
    return found


def can_run_elsewhere(graph: Graph, names: Iterable[str]) -> bool:
    """Return whether these nodes give the same values when they run without the other nodes of the graph.

    They do if none writes, acts on the outside world or draws random numbers, and none reads a variable that the graph
    writes.
    """
    written = written_variables(graph)
    return all(
        node.effect in (Effect.PURE, Effect.READ) and not (node.op == "variable" and node.string("port") in written)
        for node in map(graph.node, names)
    )


def layer_of(node: Node) -> str:
    """Return the path of the Keras layer that has made this node; "" where none has."""
    return next((node.string(key) for key in ("layer", "within") if node.has(key)), "")


def find_once(graph: Graph) -> frozenset[str]:
    """Return the names of the nodes that run once a step, on the whole batch."""
    return frozenset(node.name for node in graph.nodes if node.has("once"))


def live_nodes(graph: Graph) -> set[str]:
    """Return the names of the nodes that run for each micro-batch: what outputs, writes and other effects need."""
    return outside_of_loss_head(graph, find_once(graph))


def find_layers(graph: Graph) -> Layers:
    """Group the ops of a captured graph into layers and examine each cut.

    Raises PartitionError if the graph computes nothing from its arguments.
    """
    floating, once, live = find_floating(graph), find_once(graph), live_nodes(graph)
    in_layers = [node for node in graph.nodes if node.name in live and node.name not in floating]
    if not in_layers:  # such as a loss of drawn samples, which takes only their number from its arguments
        floating -= _computed_of_rows(graph)
        in_layers = [node for node in graph.nodes if node.name in live and node.name not in floating]
    if not in_layers:
        raise PartitionError(f"the function {graph.name!r} computes nothing from its arguments")
    layers = _group(in_layers)
    terms = find_weight_terms(graph, floating, live, _layer_of_nodes(layers))
    layers = _add_terms(layers, terms)
    head_inputs = find_head_inputs(graph)
    cuts = _find_cuts(graph, layers, terms.keys(), head_inputs)
    return Layers(
        graph, layers, cuts, floating - terms.keys(), frozenset(terms), once, find_loss_head(graph), head_inputs
    )


def _layer_of_nodes(layers: Sequence[Layer]) -> dict[str, int]:
    return {name: index for index, layer in enumerate(layers) for name in layer.nodes}


def _add_terms(layers: Sequence[Layer], terms: Mapping[str, int]) -> tuple[Layer, ...]:
    added: dict[int, list[str]] = {}
    for name, index in terms.items():
        added.setdefault(index, []).append(name)
    return tuple(Layer(layer.name, (*layer.nodes, *added.get(i, ()))) for i, layer in enumerate(layers))


def _group(nodes: Sequence[Node]) -> tuple[Layer, ...]:
    runs: list[tuple[str, bool, list[str]]] = []  # the name, whether it is a Keras layer without others in it, the ops
    for node in nodes:
        leaf = node.has("layer")
        name = node.string("layer") if leaf else node.name
        if node.has("within"):
            name = node.string("within") + "/" + node.name.rsplit("/", 1)[-1]
        if leaf and runs and runs[-1][:2] == (name, True):
            runs[-1][2].append(node.name)
        else:
            runs.append((name, leaf, [node.name]))
    used: set[str] = set()
    layers = []
    for name, _, nodes_of_run in runs:
        unique, count = name, 1
        while unique in used:
            count += 1
            unique = f"{name}.{count}"
        used.add(unique)
        layers.append(Layer(unique, tuple(nodes_of_run)))
    return tuple(layers)


def _find_cuts(
    graph: Graph, layers: Sequence[Layer], terms: Set[str], head_inputs: Sequence[LossHeadInput]
) -> tuple[Cut, ...]:
    layer_of = _layer_of_nodes(layers)
    last_use = {
        entry.value: len(layers) - 1 for entry in head_inputs
    }  # the last stage gives all of them to the loss head
    for node in graph.nodes:
        if node.name in layer_of:
            for value in node.inputs:
                if value.node in layer_of:
                    last_use[value] = max(last_use.get(value, 0), layer_of[node.name])
    spans = _state_spans(graph, layer_of)
    captured = _captured_spans(graph, layer_of)
    cuts = []
    for position in range(1, len(layers)):
        crossing = tuple(v for v, last in last_use.items() if layer_of[v.node] < position <= last)
        batched = tuple(value for value in crossing if value.node not in terms)
        splittable = all(batch_axis(graph.type_of(value)) is not None for value in batched)
        problem = _problem(graph, position, batched, spans)
        held = [name for name, (first, last) in captured.items() if first < position <= last]
        if held and not problem:
            problem = f"the custom gradient of {held[0]!r} captures a list of tensors, which cannot leave its device"
        cuts.append(Cut(position, crossing, splittable, problem))
    return tuple(cuts)


def _captured_spans(graph: Graph, layer_of: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return, for each node with the attribute ``captures``, the first layer that it captures from, and its own."""
    found = {}
    for node in graph.nodes:
        if node.has("captures") and node.name in layer_of:
            # Captured nodes of no layer are computed again in the stage of the gradient, from results of layers.
            unused = ancestors(graph, node.strings("captures"), stop=layer_of)
            sources = {source for name in unused for source in graph.node(name).predecessors()}
            held = [graph.node(name) for name in {*node.strings("captures"), *sources} & layer_of.keys()]
            stay = [layer_of[n.name] for n in held if not all(kind.dtype.transferable for kind in n.outputs)]
            found[node.name] = min(stay, default=layer_of[node.name]), layer_of[node.name]
    return found


def _state_spans(graph: Graph, layer_of: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return, for each variable that forward writes, the first and the last layer that use it."""
    spans: dict[str, tuple[int, int]] = {}
    written = written_variables(graph)
    for node in graph.nodes:
        if node.name not in layer_of:
            continue
        for variable in variables_of(graph, node):
            if variable in written:
                first, last = spans.get(variable, (layer_of[node.name], layer_of[node.name]))
                spans[variable] = (min(first, layer_of[node.name]), max(last, layer_of[node.name]))
    return spans


def _problem(graph: Graph, position: int, crossing: Sequence[Value], spans: dict[str, tuple[int, int]]) -> str:
    if not crossing:
        return "no tensor crosses here, so the parts are not a pipeline"
    for value in crossing:
        dtype = graph.type_of(value).dtype
        if not dtype.transferable:
            return f"{value} crosses here, and a {dtype.name} tensor cannot leave its device"
    for variable, (first, last) in spans.items():
        if first < position <= last:
            return f"forward writes variable {variable!r} and uses it on both sides"
    return ""
