"""Weight terms: parts of the loss that depend on weights alone, such as regularizers.

``loss + 0.01 * tf.nn.l2_loss(w)`` reads ``w`` at the end of the model. A node that depends on variables only is
repeated in each stage that uses it (it *floats*, see ``layers``), so the stage of the loss would compute the term, and
would be sent all of ``w`` each step. Instead the term is computed where its weight is, and only a number crosses to the
stage of the loss. A *reduction* is a scalar computed from one variable. A *weight term* is a reduction that belongs to
the first layer that uses its variable, or a value computed from such reductions. It does not depend on the batch: it is
equal on all replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from dapple_tf.graph_passes.ir.graph import Graph, Node, TensorType


@dataclass
class _Candidates:
    """The live floating nodes that may be weight terms.

    ``variables``: the variables that each live floating node depends on. ``reductions``: the reductions, with the
    variable of each. ``combined``: the nodes computed from reductions, scalars and constants.
    """

    variables: dict[str, frozenset[str]] = field(default_factory=dict)
    reductions: dict[str, str] = field(default_factory=dict)
    combined: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return name in self.reductions or name in self.combined

    def dependent(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that depend on a variable."""
        return [name for name in names if self.variables.get(name)]


@dataclass(frozen=True)
class _Users:
    """The first and the last layer that use a candidate, directly or through other candidates.

    ``must_float``: a floating node that is no candidate uses it too, so it has to float itself.
    """

    first: int
    last: int
    must_float: bool = False


def find_weight_terms(graph: Graph, floating: Set[str], live: Set[str], layer_of: Mapping[str, int]) -> dict[str, int]:
    """Return the weight terms among the ``floating`` nodes that are ``live``, each with the layer that it belongs to.

    ``layer_of``: the layer of each node that does not float. A reduction is a term if no layer uses it (or what is
    computed from it) before its variable is used, and some layer uses it later. It is not a term if a weight or the
    batch's shape is computed from it (weight normalization): that floats, with all that it depends on.
    """
    candidates = _find_candidates(graph, floating, live)
    users = _find_users(graph, candidates, live, layer_of)
    variable_uses = _first_uses(graph, candidates, layer_of)
    terms: dict[str, int] = {}
    for node in graph.nodes:
        if node.name in candidates.reductions:
            use, used = variable_uses.get(candidates.reductions[node.name]), users[node.name]
            if use is not None and not used.must_float and use <= used.first and use < used.last:
                terms[node.name] = use
        elif node.name in candidates.combined:
            sources = candidates.dependent(node.predecessors())
            before = [terms[name] for name in sources if name in terms]
            if before:
                # If a source is no term, the node belongs to the layer that uses it, whose stage repeats that source.
                terms[node.name] = max(before) if len(before) == len(sources) else users[node.name].first
    return terms


def _find_candidates(graph: Graph, floating: Set[str], live: Set[str]) -> _Candidates:
    candidates = _Candidates()
    # The batch, what was computed from it once, and all that depends on these.
    from_batch = {node.name for node in graph.nodes if node.op in ("arg", "rows") or node.has("once")}
    for node in graph.nodes:
        if node.name not in floating or node.name not in live:
            continue
        own = {node.name} if node.op == "variable" else set()
        sources = list(dict.fromkeys(node.predecessors()))
        candidates.variables[node.name] = frozenset(
            own.union(*(candidates.variables.get(name, frozenset()) for name in sources))
        )
        if not from_batch.isdisjoint(sources):
            from_batch.add(node.name)
        elif all(_is_sendable(kind) for kind in node.outputs):
            _classify(graph, node, candidates)
    return candidates


def _classify(graph: Graph, node: Node, candidates: _Candidates) -> None:
    """Add the node to the reductions or the combined nodes of ``candidates``, if it is one."""
    sources = candidates.dependent(dict.fromkeys(node.predecessors()))
    others = [name for name in sources if not candidates.has(name)]
    if len(others) < len(sources):
        if all(_is_scalar(kind) for name in others for kind in graph.node(name).outputs):
            candidates.combined.add(node.name)
        return
    variables = candidates.variables[node.name]
    reads = [graph.type_of(value) for value in node.inputs if candidates.variables[value.node]]
    gives_scalar = len(node.outputs) == 1 and _is_scalar(node.outputs[0]) and node.outputs[0].dtype.differentiable
    if gives_scalar and len(variables) == 1 and any(kind.shape.dims != () for kind in reads):
        candidates.reductions[node.name] = next(iter(variables))


def _is_sendable(kind: TensorType) -> bool:
    dims = kind.shape.dims
    return kind.dtype.transferable and dims is not None and all(dim is not None and dim >= 0 for dim in dims)


def _is_scalar(kind: TensorType) -> bool:
    return kind.dtype.transferable and kind.shape.dims == ()


def _find_users(
    graph: Graph, candidates: _Candidates, live: Set[str], layer_of: Mapping[str, int]
) -> dict[str, _Users]:
    """Return the users of each candidate."""
    end = max(layer_of.values())
    found: dict[str, list[_Users]] = {name: [] for name in (*candidates.reductions, *candidates.combined)}
    for value in graph.outputs:
        if value.node in found:
            found[value.node].append(_Users(end, end))
    users: dict[str, _Users] = {}
    for node in reversed(graph.nodes):
        if node.name in found:
            own = found[node.name]
            first, last = min(used.first for used in own), max(used.last for used in own)
            users[node.name] = _Users(first, last, any(used.must_float for used in own))
        elif node.name in layer_of:
            users[node.name] = _Users(layer_of[node.name], layer_of[node.name])
        elif node.name in live:
            users[node.name] = _Users(0, end, must_float=True)
        else:
            continue
        for source in dict.fromkeys(node.predecessors()):
            if source in found:
                found[source].append(users[node.name])
    return users


def _first_uses(graph: Graph, candidates: _Candidates, layer_of: Mapping[str, int]) -> dict[str, int]:
    """Return, for each variable, the first layer that uses it other than through candidates."""
    uses: dict[str, int] = {}
    for node in graph.nodes:
        if node.name in layer_of:
            for source in candidates.dependent(node.predecessors()):
                if not candidates.has(source):
                    for variable in candidates.variables[source]:
                        uses[variable] = min(uses.get(variable, layer_of[node.name]), layer_of[node.name])
    return uses
