"""Layers of a model's graph, and the places where it can be cut into stages.

Capture leaves on each op the attribute ``layer`` (the path of the Keras layer whose call made it) or, where
that layer holds other layers, ``within``. Consecutive ops of one ``layer`` form a layer; elsewhere every op is
a layer of its own, named by its path and its op's name.

*Floating* nodes belong to no layer: constants, reads of variables that forward leaves alone, shapes of the
batch arguments, and what is computed from those. They are repeated in every stage that uses them, so
neither a weight nor a shape ever crosses a stage boundary. Terms of the weights alone do not float: see ``terms``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from graph_passes.analysis.weight_terms import find_weight_terms
from graph_passes.errors import PartitionError
from graph_passes.ir.graph import Effect, Graph, Node, TensorType, Value, ancestors

INPUT_OPS = frozenset({"arg", "variable", "capture"})
SHAPE_OPS = frozenset({"Shape", "ShapeN", "Size", "Rank"})


@dataclass(frozen=True)
class Layer:
    """A run of ops that is never cut. ``name`` is unique: a path of Keras layers, or an op's name."""

    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """The place before layer ``position``: what crosses, and why it cannot be cut there (else "").

    ``splittable``: each tensor has one batch axis or is a term, so stages of different replica counts can meet here.
    """

    position: int
    crossing: tuple[Value, ...]
    splittable: bool
    problem: str


@dataclass(frozen=True)
class Layers:
    """The layers of ``graph`` in a topological order, and the cut before each but the first.

    ``floating``: the nodes of no layer. ``weight_terms``: those that every replica of a stage computes alike.
    """

    graph: Graph
    layers: tuple[Layer, ...]
    cuts: tuple[Cut, ...]
    floating: frozenset[str]
    weight_terms: frozenset[str]

    def cut(self, position: int) -> Cut:
        """The cut before layer ``position`` (from 1)."""
        return self.cuts[position - 1]

    def positions(self) -> tuple[int, ...]:
        """Positions where the graph can be cut."""
        return tuple(cut.position for cut in self.cuts if not cut.problem)

    def find(self, name: str) -> int:
        """The first layer of the one called ``name``: a layer's name, or a part of its path.

        Raises PartitionError for a name that is unknown (naming the nearest) or ambiguous (naming all).
        """
        return self.find_all(name)[0]

    def find_all(self, name: str) -> tuple[int, ...]:
        """All layers that ``name`` stands for (see ``find``): one, or those whose paths have it as a part."""
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
    """The axis that carries the batch: the only one that may be of its length (None when that cannot be told)."""
    unknown = [axis for axis, dim in enumerate(kind.shape.dims or ()) if dim is None]
    return unknown[0] if len(unknown) == 1 else None


def written_variables(graph: Graph) -> dict[str, list[Node]]:
    """Variables that forward writes, each with the nodes that write it."""
    written: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.effect == Effect.WRITE:
            for variable in node.strings("writes"):
                written.setdefault(variable, []).append(node)
    return written


def variables_of(graph: Graph, node: Node) -> tuple[str, ...]:
    """Names of the variables that a node takes as resources."""
    return tuple(v.node for v in node.inputs if graph.node(v.node).op == "variable")


def find_floating(graph: Graph) -> frozenset[str]:
    """Names of the nodes that every stage may repeat for itself (inputs included), terms among them."""
    written = written_variables(graph)
    floating = {node.name for node in graph.nodes if node.op in INPUT_OPS}
    args = {node.name for node in graph.nodes if node.op == "arg"}
    for node in graph.nodes:
        if node.op in INPUT_OPS or node.effect not in (Effect.PURE, Effect.READ):
            continue
        sources = set(node.predecessors())
        if sources & args and (node.op not in SHAPE_OPS or not sources <= args):
            continue
        if sources <= floating and not any(name in written for name in variables_of(graph, node)):
            floating.add(node.name)
    return frozenset(floating)


def live_nodes(graph: Graph) -> set[str]:
    """Nodes that the outputs need, or that act on something."""
    acting = [node.name for node in graph.nodes if node.effect in (Effect.WRITE, Effect.SIDE)]
    return ancestors(graph, [*(value.node for value in graph.outputs), *acting])


def find_layers(graph: Graph) -> Layers:
    """Group the forward ops of a captured graph into layers and examine every cut."""
    floating, live = find_floating(graph), live_nodes(graph)
    anchored = [node for node in graph.nodes if node.name in live and node.name not in floating]
    if not anchored:
        raise PartitionError(f"the function {graph.name!r} computes nothing from its arguments")
    layers = _group(anchored)
    terms = find_weight_terms(graph, floating, live, _homes(layers))
    layers = _add_terms(layers, terms)
    return Layers(graph, layers, _examine(graph, layers, terms.keys()), floating - terms.keys(), frozenset(terms))


def _homes(layers: Sequence[Layer]) -> dict[str, int]:
    return {name: index for index, layer in enumerate(layers) for name in layer.nodes}


def _add_terms(layers: Sequence[Layer], terms: Mapping[str, int]) -> tuple[Layer, ...]:
    added: dict[int, list[str]] = {}
    for name, index in terms.items():
        added.setdefault(index, []).append(name)
    return tuple(Layer(layer.name, (*layer.nodes, *added.get(i, ()))) for i, layer in enumerate(layers))


def _group(nodes: Sequence[Node]) -> tuple[Layer, ...]:
    runs: list[tuple[str, bool, list[str]]] = []  # name, whether a leaf layer, ops
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


def _examine(graph: Graph, layers: Sequence[Layer], terms: Set[str]) -> tuple[Cut, ...]:
    home = _homes(layers)
    last_use: dict[Value, int] = {}
    for node in graph.nodes:
        if node.name in home:
            for value in node.inputs:
                if value.node in home:
                    last_use[value] = max(last_use.get(value, 0), home[node.name])
    spans = _state_spans(graph, home)
    cuts = []
    for position in range(1, len(layers)):
        crossing = tuple(v for v, last in last_use.items() if home[v.node] < position <= last)
        batched = tuple(value for value in crossing if value.node not in terms)
        splittable = all(batch_axis(graph.type_of(value)) is not None for value in batched)
        cuts.append(Cut(position, crossing, splittable, _problem(graph, position, batched, spans)))
    return tuple(cuts)


def _state_spans(graph: Graph, home: dict[str, int]) -> dict[str, tuple[int, int]]:
    """For each variable that forward writes, the first and the last layer that touch it."""
    spans: dict[str, tuple[int, int]] = {}
    written = written_variables(graph)
    for node in graph.nodes:
        if node.name not in home:
            continue
        for variable in variables_of(graph, node):
            if variable in written:
                first, last = spans.get(variable, (home[node.name], home[node.name]))
                spans[variable] = (min(first, home[node.name]), max(last, home[node.name]))
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
