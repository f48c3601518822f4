"""Cut a loss that combines samples after the last tensors whose row i depends on sample i alone.

The search goes from the loss towards the inputs and ends at rows that depend on variables: the *frontier*, which
micro-batches compute. Rows that depend on the arguments alone (labels, masks) are computed in the tail, from the whole
batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dapple_tf.frontend.dependence.kinds import Kind
from dapple_tf.frontend.dependence.result import Tail
from graph_passes.analysis.layers import CAPTURED_INPUTS, SHAPE_OPS
from graph_passes.analysis.tail import TailInput
from graph_passes.ir.graph import Effect, Graph, Value, ancestors

# Ops that only rearrange rows belong to the tail, so that it does not get the same rows twice.
_REARRANGING = frozenset({"ConcatV2", "Identity", "Pack", "Transpose"})


def cut_tail(graph: Graph, kinds: Mapping[Value, Kind], once: Collection[str], writes: Sequence[str]) -> Tail | None:
    """Return the tail that computes the loss, the aux outputs that combine samples, and ``writes``.

    None if it would take no rows that depend on trained variables. ``once``: nodes that run once a step, before the
    micro-batches.
    """
    loss, *aux = graph.outputs
    whole = [value.node for value in aux if _needs_whole_batch(kinds[value])]
    roots = [loss.node, *whole, *writes]
    computed = _from_variables(graph, once)
    nodes: set[str] = set()
    frontier: dict[Value, TailInput] = {}
    pending = [value for name in roots for value in graph.node(name).inputs]
    nodes.update(roots)
    while pending:
        value = pending.pop()
        node, kind = graph.node(value.node), kinds.get(value)
        if node.op in CAPTURED_INPUTS or node.name in once or value in frontier:
            continue
        if kind is not None and _can_cross(graph, value, kind) and node.name in computed:
            frontier[value] = TailInput(value, kind.axis, kind.outer)
        elif node.name not in nodes:
            nodes.add(node.name)
            pending += node.inputs
    if not any(kinds[value].trained for value in frontier):
        return None
    acting = [n.name for n in graph.nodes if n.effect in (Effect.WRITE, Effect.SIDE)]
    others = [name for name in (*acting, *(value.node for value in aux)) if name not in roots]
    outside = ancestors(graph, [*(value.node for value in frontier), *others], stop=once)
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    ordered = sorted(frontier.values(), key=lambda entry: (order[entry.value.node], entry.value.index))
    return Tail(frozenset(nodes), frozenset(nodes - outside), tuple(ordered))


def _needs_whole_batch(kind: Kind) -> bool:
    """Return whether an aux output of this kind is computed from the whole batch where the model has a tail."""
    return (kind.coupled and not kind.documented) or (kind.total and kind.trained)


def _can_cross(graph: Graph, value: Value, kind: Kind) -> bool:
    if graph.node(value.node).op in _REARRANGING or not graph.type_of(value).dtype.transferable:
        return False
    return kind.rows and not kind.slope and kind.outer > 0 and kind.inner > 0


def _from_variables(graph: Graph, once: Collection[str]) -> set[str]:
    """Return the nodes that depend on a variable or a hidden draw, other than through what runs once."""
    found = {node.name for node in graph.nodes if node.op == "variable" or node.effect is Effect.RANDOM}
    for node in graph.nodes:
        if node.name in once or node.op in SHAPE_OPS:
            continue
        if any(value.node in found and value.node not in once for value in node.inputs):
            found.add(node.name)
    return found
