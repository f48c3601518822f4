"""Let backward add its gradients to the sums itself, so that the gradients of a micro-batch never exist all at once.

A call returns all its results at its end. So where backward returns the gradients of all variables of its stage, they
take as much memory as the weights, beside their sums. A function that takes the sums adds each gradient as soon as it
is computed, and then TensorFlow frees the gradient.

It also adds the gradients of a layer's weights before it goes on to the layer after the next. TensorFlow's executor
goes on with an op on the thread that made its inputs, and puts the other ops that are ready into a queue, from which
this thread takes the newest first. So a thread may compute the gradients of all activations of a stage while a small op
of each layer, such as the sum for a bias, waits in the queue. Each waiting op keeps a gradient alive, up to those of
all layers, depending on what else the processors do. Control edges limit them to those of two layers. An edge only
makes ops wait, so all values stay the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from dapple_tf.graph_passes.analysis.op_costs import VIEW_OPS
from dapple_tf.graph_passes.ir.graph import (
    ROLES,
    Effect,
    Function,
    Graph,
    Node,
    Port,
    Role,
    TensorType,
    Value,
    attributes,
    make_node,
    tensor,
)
from dapple_tf.graph_passes.ir.names import at, nodes_of, site_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import BuiltInPass, Contract
from dapple_tf.graph_passes.schedules.schedule import FREEING, Schedule

_SUM: Role = "sum"
_RESOURCE = tensor("resource")
_ADD_OP = "AssignAddVariableOp"
_AFTER = "memory: the gradients of weights that need the gradient before are added"
_NO_WRITE = ("an output", "another effect")  # two users, so that no write alone needs what they need


@dataclass(frozen=True)
class AddInPlace(BuiltInPass):
    """Give the sums of gradients to the backward calls of the stages that run them in micro-batch order.

    Gradients that are added in buckets (see ``Overlap``: those of the last micro-batch) are still returned.
    """

    schedule: Schedule
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.FORWARD}),
        requires_if_trained=frozenset({OpName.REDUCED_GRADIENTS}),
        forbids=frozenset({OpName.CLEAR_SUMS, OpName.TIMESTAMP, OpName.PART}),
        may_produce=frozenset({OpName.CLEAR_SUMS}),
    )

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with ``clear_sums`` in place of each first ``accumulate``, and without the other ones.

        The functions of the calls take the sums (role ``sum``), and do not return the gradients any more.
        """
        freeing = [[a.micro_batch for a in actions if a.kind in FREEING] for actions in self.schedule.stages]
        in_order = [micro_batches == sorted(micro_batches) for micro_batches in freeing]  # in which they are added
        sums = [node for node in nodes_of(graph, OpName.ACCUMULATE) if in_order[node.integer("stage")]]
        call_of = {node.name: node.inputs[0].node for node in sums if not node.has("bucket")}
        adding: dict[str, _Adding] = {}
        moved: dict[Value, Value] = {}
        outputs: dict[str, tuple[TensorType, ...]] = {}
        first: dict[str, str] = {}
        for name, call in ((name, graph.node(call)) for name, call in call_of.items()):
            function = call.string("function")
            if function not in adding:
                adding[function] = _add(graph.function(function), graph.node(name))
            left = [value for value in call.values() if value.index not in adding[function].added]
            moved |= {value: Value(call.name, i) for i, value in enumerate(left)}
            outputs[call.name] = tuple(call.outputs[value.index] for value in left)
            if graph.node(name).attr("first"):
                first[call.name] = _clear(graph.node(name)).name
        nodes: list[Node] = []
        for node in graph.nodes:
            if node.name in call_of:
                nodes += [_clear(node)] if node.attr("first") else []
                continue
            if node.name in outputs or not moved.keys().isdisjoint(node.inputs):
                node = dataclasses.replace(node.replace_inputs(moved), outputs=outputs.get(node.name, node.outputs))
            if node.name in first:
                node = node.after(first[node.name], "sum: it is cleared before")
            nodes.append(node.replace_controls(call_of))
        return graph.replace(
            nodes=tuple(nodes),
            outputs=tuple(moved.get(value, value) for value in graph.outputs),
            functions=tuple(adding[f.name].function if f.name in adding else f for f in graph.functions),
        ).sorted()


@dataclass(frozen=True)
class _Adding:
    """A backward ``function`` that takes sums; ``added``: the outputs of the original that it does not return."""

    function: Function
    added: frozenset[int]


def _add(function: Function, accumulate: Node) -> _Adding:
    """Return the function that adds the gradients which ``accumulate`` takes from its calls."""
    graph = function.graph
    added = {value.index: name for value, name in zip(accumulate.inputs, accumulate.strings("variables"), strict=True)}
    entering = list(zip(function.inputs, graph.inputs, strict=True))
    adds, sums = [], []
    for i, (place, name) in enumerate(added.items()):
        port = Port(_SUM, name, _RESOURCE)
        source = port.node(f"{_SUM}/{i}")
        gradient = graph.outputs[place]
        attrs = attributes({"dtype": graph.type_of(gradient).dtype, "writes": ()})
        inputs = (Value(source.name), gradient)
        adds.append(Node(f"{source.name}/add", _ADD_OP, inputs, attrs=attrs, effect=Effect.WRITE))
        sums.append(source)
        entering.append((port, source.name))
    entering.sort(key=lambda entry: ROLES.index(entry[0].role))
    left = [i for i in range(len(function.outputs)) if i not in added]
    body = graph.replace(
        nodes=(*sums, *graph.nodes, *adds),
        inputs=tuple(name for _, name in entering),
        outputs=tuple(graph.outputs[i] for i in left),
    )
    ports = tuple(port for port, _ in entering)
    body = bound_backward(body, [add.name for add in adds])
    return _Adding(Function(function.name, body, ports, tuple(function.outputs[i] for i in left)), frozenset(added))


def _clear(accumulate: Node) -> Node:
    """Return the node that clears the sums to which ``accumulate`` would have assigned the first gradients."""
    site, op = site_of(accumulate), OpName.CLEAR_SUMS
    return make_node(at(*site, what=op), op, **site.attrs, variables=accumulate.strings("variables"))


# --- Let few gradients of activations exist at once: add the gradients of a layer's weights in time


def bound_backward(graph: Graph, writes: Iterable[str]) -> Graph:
    """Return the body of a backward function, whose nodes ``writes`` each add the gradient of one variable to its sum.

    Some nodes are needed by a single write only. They compute its value from gradients that other nodes compute. The
    last of these gradients in the order of the graph is where the write *begins*. Let g be a gradient where writes
    begin, and h the last such gradient from which g is computed. The nodes that read g, other than for a single write,
    wait for the writes that begin at h. So gradients of several losses, or of branches, do not wait for each other.
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
    latest: dict[str, str] = {}  # for each node, the last gradient at which writes begin, of those that it needs
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
    users: dict[str, set[str]] = {node.name: set() for node in graph.nodes}  # writes; none is added to two
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
