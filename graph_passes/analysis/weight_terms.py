"""Terms of the weights alone, such as regularizers: each is computed where its weight is, and only numbers cross.

``loss + 0.01 * tf.nn.l2_loss(w)`` reads ``w`` at the end of the model. What reads variables only floats (see
``layers``), so the stage of the loss would repeat the term, and be sent all of ``w`` each step. A *reduction* makes one
number of one variable; a *term* is a reduction that belongs to the layer which uses its variable first, or what is
computed from such. A term does not depend on the batch: it is the same on every replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from graph_passes.ir.graph import Graph, Node, TensorType


@dataclass
class _Found:
    """What is known of the floating nodes that are alive.

    ``variables``: those that each depends on. ``reductions``: the variable of each that may become a term.
    ``combined``: what is computed from these, from numbers and from constants.
    """

    variables: dict[str, frozenset[str]] = field(default_factory=dict)
    reductions: dict[str, str] = field(default_factory=dict)
    combined: set[str] = field(default_factory=set)

    def movable(self, name: str) -> bool:
        return name in self.reductions or name in self.combined

    def dependent(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that depend on a variable."""
        return [name for name in names if self.variables.get(name)]


@dataclass(frozen=True)
class _Reach:
    """The first and the last layer that take a node, be it through others that are movable.

    ``barred``: what floats and is not movable takes it too, so it has to float itself.
    """

    first: int
    last: int
    barred: bool = False


def find_weight_terms(graph: Graph, floating: Set[str], live: Set[str], homes: Mapping[str, int]) -> dict[str, int]:
    """The terms among the ``floating`` nodes, each with the layer that it belongs to; those that are not ``live`` stay.

    ``homes``: the layer of each node that does not float. A reduction is a term where no layer takes it (or what is
    computed from it) before its variable is used, and some layer does later. It is none where a part of a weight
    or of the batch's shape is computed from it (weight normalization): that floats, and whatever it takes.
    """
    found = _find_reductions(graph, floating, live)
    reach = _find_reach(graph, found, live, homes)
    uses = _first_uses(graph, found, live, homes)
    terms: dict[str, int] = {}
    for node in graph.nodes:
        if node.name in found.reductions:
            use, taken = uses.get(found.reductions[node.name]), reach[node.name]
            if use is not None and not taken.barred and use <= taken.first and use < taken.last:
                terms[node.name] = use
        elif node.name in found.combined:
            sources = found.dependent(node.predecessors())
            before = [terms[name] for name in sources if name in terms]
            if before:
                # What it reads beside terms would be needed by one stage more if it were not where it is taken.
                terms[node.name] = max(before) if len(before) == len(sources) else reach[node.name].first
    return terms


def _find_reductions(graph: Graph, floating: Set[str], live: Set[str]) -> _Found:
    found = _Found()
    sized = {node.name for node in graph.nodes if node.op == "arg"}  # and what depends on the batch's shape
    for node in graph.nodes:
        if node.name not in floating or node.name not in live:
            continue
        own = {node.name} if node.op == "variable" else set()
        sources = list(dict.fromkeys(node.predecessors()))
        found.variables[node.name] = frozenset(own.union(*(found.variables[name] for name in sources)))
        if not sized.isdisjoint(sources):
            sized.add(node.name)
        elif all(_known(kind) for kind in node.outputs):
            _classify(graph, node, found)
    return found


def _classify(graph: Graph, node: Node, found: _Found) -> None:
    sources = found.dependent(dict.fromkeys(node.predecessors()))
    others = [name for name in sources if not found.movable(name)]
    if len(others) < len(sources):
        if all(_is_number(kind) for name in others for kind in graph.node(name).outputs):
            found.combined.add(node.name)
        return
    variables = found.variables[node.name]
    reads = [graph.type_of(value) for value in node.inputs if found.variables[value.node]]
    small = len(node.outputs) == 1 and _is_number(node.outputs[0]) and node.outputs[0].dtype.differentiable
    if small and len(variables) == 1 and any(kind.shape.dims != () for kind in reads):
        found.reductions[node.name] = next(iter(variables))


def _known(kind: TensorType) -> bool:
    dims = kind.shape.dims
    return kind.dtype.transferable and dims is not None and all(dim is not None and dim >= 0 for dim in dims)


def _is_number(kind: TensorType) -> bool:
    return kind.dtype.transferable and kind.shape.dims == ()


def _find_reach(graph: Graph, found: _Found, live: Set[str], homes: Mapping[str, int]) -> dict[str, _Reach]:
    """What takes each movable node."""
    end = max(homes.values())
    takers: dict[str, list[_Reach]] = {name: [] for name in (*found.reductions, *found.combined)}
    for value in graph.outputs:
        if value.node in takers:
            takers[value.node].append(_Reach(end, end))
    reach: dict[str, _Reach] = {}
    for node in reversed(graph.nodes):
        if node.name in takers:
            mine = takers[node.name]
            first, last = min(taken.first for taken in mine), max(taken.last for taken in mine)
            reach[node.name] = _Reach(first, last, any(taken.barred for taken in mine))
        elif node.name in homes:
            reach[node.name] = _Reach(homes[node.name], homes[node.name])
        elif node.name in live:
            reach[node.name] = _Reach(0, end, barred=True)
        else:
            continue
        for source in dict.fromkeys(node.predecessors()):
            if source in takers:
                takers[source].append(reach[node.name])
    return reach


def _first_uses(graph: Graph, found: _Found, live: Set[str], homes: Mapping[str, int]) -> dict[str, int]:
    """For each variable the first layer that uses more of it than a number."""
    uses: dict[str, int] = {}
    for node in graph.nodes:
        if node.name in homes:
            for source in found.dependent(node.predecessors()):
                if not found.movable(source):
                    for variable in found.variables[source]:
                        uses[variable] = min(uses.get(variable, homes[node.name]), homes[node.name])
    return uses
