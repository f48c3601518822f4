"""The order in a backward function: the gradients of weights are added before the chain of gradients goes far ahead."""

from __future__ import annotations

import itertools
from dataclasses import replace

from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value, ancestors, tensor
from dapple_tf.graph_passes.passes.add_in_place import bound_backward

VECTOR = tensor("float32", 10)


def op(name: str, kind: str, *inputs: str, effect: Effect = Effect.PURE) -> Node:
    outputs = () if effect == Effect.WRITE else (VECTOR,)
    return Node(name, kind, tuple(map(Value, inputs)), outputs, effect=effect)


def layer(number: int, gradient: str) -> list[Node]:
    """Return the ops that add the gradients of a kernel and a bias, and give the layer's input gradient, ``x0``."""
    return [
        op(f"db{number}", "BiasAddGrad", gradient),
        op(f"x{number}", "MatMul", gradient, f"k{number}"),
        op(f"dk{number}", "MatMul", f"h{number}", gradient),
        op(f"add_k{number}", "AssignAddVariableOp", f"sum_k{number}", f"dk{number}", effect=Effect.WRITE),
        op(f"add_b{number}", "AssignAddVariableOp", f"sum_b{number}", f"db{number}", effect=Effect.WRITE),
    ]


def backward(layers: int) -> tuple[Graph, list[str]]:
    """Return a backward through ``layers`` dense layers, the last of which is number 0, and its writes."""
    inputs = [f"{kind}{i}" for kind in ("k", "h", "sum_k", "sum_b") for i in range(layers)]
    nodes = [op(name, "arg") for name in ("dy", *inputs)]
    gradient = "dy"
    for number in reversed(range(layers)):
        nodes += [op(f"d{number}", "ReluGrad", gradient, f"h{number}"), *layer(number, f"d{number}")]
        gradient = f"x{number}"
    adds = [node.name for node in nodes if node.effect == Effect.WRITE]
    return Graph("f", tuple(nodes), ("dy", *inputs), (Value("x0"),)), adds


def waits(graph: Graph) -> dict[str, set[str]]:
    return {node.name: {control.source for control in node.controls} for node in graph.nodes if node.controls}


def test_the_chain_of_gradients_is_at_most_one_layer_ahead() -> None:
    """The op that reads a layer's gradient and is not of one weight alone waits for the weights of the layer before."""
    found = bound_backward(*backward(4))
    assert waits(found) == {
        "x2": {"add_k3", "add_b3"},
        "x1": {"add_k2", "add_b2"},
        "x0": {"add_k1", "add_b1"},
    }
    for number in (3, 2):  # so whatever the executor does, three layers' gradients are never there at once
        assert {f"add_k{number}", f"add_b{number}"} <= ancestors(found, [f"d{number - 2}"])


def test_all_nodes_stay_and_only_edges_are_added() -> None:
    graph, adds = backward(3)
    found = bound_backward(graph, adds)
    assert {(n.name, n.op, n.inputs) for n in found.nodes} == {(n.name, n.op, n.inputs) for n in graph.nodes}
    assert (found.inputs, found.outputs) == (graph.inputs, graph.outputs)


def test_one_layer_or_no_write_adds_no_edge() -> None:
    assert waits(bound_backward(*backward(1))) == {}
    graph, _ = backward(3)
    assert waits(bound_backward(graph, [])) == {}


def test_weights_wait_for_no_other_weights() -> None:
    """Backward as half of a split one (W) takes the gradients: none is computed here."""
    names = ["d0", "d1", "h0", "h1", "s0", "s1"]
    nodes = [op(name, "arg") for name in names]
    for i in range(2):
        nodes += [op(f"dk{i}", "MatMul", f"h{i}", f"d{i}")]
        nodes += [op(f"add{i}", "AssignAddVariableOp", f"s{i}", f"dk{i}", effect=Effect.WRITE)]
    found = bound_backward(Graph("f", tuple(nodes), tuple(names), ()), ["add0", "add1"])
    assert waits(found) == {}


def test_a_view_of_a_gradient_counts_as_the_gradient() -> None:
    graph, adds = backward(3)
    flat = op("flat1", "Reshape", "d1", "k0")
    nodes = [flat if node.name == "db1" else node for node in graph.nodes]
    nodes = [op("db1", "BiasAddGrad", "flat1") if node.name == "x1" else node for node in nodes]
    nodes.insert(nodes.index(flat) + 2, op("x1", "MatMul", "flat1", "k1"))
    found = bound_backward(graph.replace(nodes=tuple(nodes)), adds)
    assert waits(found) == {"x1": {"add_k2", "add_b2"}, "x0": {"add_k1", "add_b1"}}


def test_what_is_computed_for_a_weight_before_its_gradient_is_there_delays_nothing() -> None:
    """A transposed activation, made early in a backward that re-computes activations, would stay until it is used."""
    graph, adds = backward(2)
    nodes = [op("a1", "Relu", "h1"), op("t1", "Transpose", "a1"), op("a0", "Relu", "a1"), op("t0", "Transpose", "a0")]
    more = [op("r0", "Tanh", "a0"), op("out", "Tanh", "r0")]
    place = next(i for i, node in enumerate(graph.nodes) if node.op != "arg")
    body = [
        op(node.name, "MatMul", f"t{node.name[-1]}", f"d{node.name[-1]}") if node.name.startswith("dk") else node
        for node in graph.nodes
    ]
    body[place:place] = [*nodes, *more]
    found = bound_backward(graph.replace(nodes=tuple(body), outputs=(Value("x0"), Value("out"))), adds)
    assert waits(found) == {"x0": {"add_k1", "add_b1"}}


def test_a_node_that_a_write_needs_does_not_wait_for_it() -> None:
    """The write of the first layer takes a shape from the end of the chain: an edge to the chain would make a cycle."""
    nodes = [op(name, "arg") for name in ("dy", "k", "s1", "s2")]
    nodes += [op("d1", "ReluGrad", "dy", "k"), op("d2", "MatMul", "d1", "k"), op("d3", "MatMul", "d2", "k")]
    nodes += [op("r", "Reshape", "d1", "d3"), op("dw", "Sum", "r"), op("dv", "Sum", "d2")]
    nodes += [op("add1", "AssignAddVariableOp", "s1", "dw", effect=Effect.WRITE)]
    nodes += [op("add2", "AssignAddVariableOp", "s2", "dv", effect=Effect.WRITE)]
    graph = Graph("f", tuple(nodes), ("dy", "k", "s1", "s2"), (Value("d3"), Value("r")))
    assert waits(bound_backward(graph, ["add1", "add2"])) == {}


def test_chains_of_two_losses_do_not_wait_for_each_other() -> None:
    one, adds = backward(3)
    other = [
        replace(node, name=f"other_{node.name}", inputs=tuple(Value(f"other_{value.node}") for value in node.inputs))
        for node in one.nodes
    ]
    both = Graph(
        "backward",
        tuple(itertools.chain.from_iterable(zip(one.nodes, other, strict=True))),
        (*one.inputs, *(f"other_{name}" for name in one.inputs)),
        (*one.outputs, *(Value(f"other_{value.node}") for value in one.outputs)),
    )
    found = waits(bound_backward(both, [*adds, *(f"other_{name}" for name in adds)]))
    alone = waits(bound_backward(one, adds))
    assert alone
    assert found == {**alone, **{f"other_{name}": {f"other_{add}" for add in of} for name, of in alone.items()}}
