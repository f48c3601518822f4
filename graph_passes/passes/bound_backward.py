"""Let a backward function add the gradients of a layer's weights before it goes on to the layer after the next.

TensorFlow's executor goes on with an op on the thread that made its inputs, and puts the other ops that are ready into
a queue, from which this thread takes the newest first. So a thread may compute the gradients of all activations of a
stage while a small op of each layer, such as the sum for a bias, waits in the queue. Each waiting op keeps a gradient
alive, up to those of all layers, depending on what else the processors do. Control edges limit them to those of two
layers. An edge only makes ops wait, so all values stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from dapple_tf.graph_passes.analysis.op_costs import VIEW_OPS
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node

_AFTER = "memory: the gradients of weights that need the gradient before are added"
_NO_WRITE = ("an output", "another effect")  # two users, so that what they need is of no write alone


def bound_backward(graph: Graph, writes: Iterable[str]) -> Graph:
    """Return the body of a backward function, whose nodes ``writes`` each add the gradient of one variable to its sum.

    The nodes that a single write needs compute it from gradients that other nodes compute. The last of these in the
    order of the graph is where the write begins. Other nodes that read it wait for the writes that begin at the one
    before, of those that it is computed from: gradients of several losses, or of branches, do not wait for each other.
    """
    own = _find_own(graph, frozenset(writes))
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    needs: dict[str, set[str]] = {}
    for name, write in own.items():
        needs.setdefault(write, set()).update(source for source in graph.node(name).predecessors() if source not in own)
    begins: dict[str, list[str]] = {}
    for write, sources in needs.items():
        computed = [source for source in sources if _is_computed(graph.node(_memory_of(graph, source)))]
        if computed:
            begins.setdefault(_memory_of(graph, max(computed, key=place.__getitem__)), []).append(write)
    latest: dict[str, str] = {}  # for each node, the last where writes begin of those that it needs
    for node in graph.nodes:
        found = [source if source in begins else latest.get(source) for source in node.predecessors()]
        if known := [source for source in found if source is not None]:
            latest[node.name] = max(known, key=place.__getitem__)
    before = {later: begins[latest[later]] for later in begins if later in latest}
    limits = {write: max(place[source] for source in sources) for write, sources in needs.items() if sources}
    nodes = []
    for node in graph.nodes:
        if node.name not in own and node.effect == Effect.PURE and _is_computed(node):
            for write in _writes_before(graph, node, before):
                if limits[write] < place[node.name]:  # else the write might need this node
                    node = node.after(write, _AFTER)
        nodes.append(node)
    return graph.replace(nodes=tuple(nodes)).sorted()


def _find_own(graph: Graph, writes: Set[str]) -> dict[str, str]:
    """Return the nodes that one write alone needs, with the name of this write; the write itself is one of them."""
    users: dict[str, set[str]] = {node.name: set() for node in graph.nodes}  # writes, until there are two
    for value in graph.outputs:
        users[value.node].update(_NO_WRITE)
    for node in reversed(graph.nodes):
        if node.name in writes:
            users[node.name].add(node.name)
        elif not users[node.name]:
            users[node.name].update(_NO_WRITE)
        for source in node.predecessors():
            if len(users[source]) < 2:
                users[source] |= users[node.name]
    return {name: next(iter(found)) for name, found in users.items() if len(found) == 1}


def _writes_before(graph: Graph, node: Node, before: Mapping[str, Sequence[str]]) -> list[str]:
    sources = dict.fromkeys(_memory_of(graph, value.node) for value in node.inputs)
    return [write for source in sources for write in before.get(source, ())]


def _memory_of(graph: Graph, name: str) -> str:
    """Return the node whose result a node gives: itself, unless it is a view."""
    while (node := graph.node(name)).op in VIEW_OPS:
        name = node.inputs[0].node
    return name


def _is_computed(node: Node) -> bool:
    """Return whether a node computes its result from other ones."""
    return node.op[0].isupper() and bool(node.inputs) and node.op not in VIEW_OPS and node.op != "ReadVariableOp"
