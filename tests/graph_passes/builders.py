"""One-line builders of the small graphs that the tests rewrite, and comparisons of graphs and errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from dapple_tf.graph_passes.ir.graph import Effect, Function, Graph, Node, Port, Value, attributes
from dapple_tf.graph_passes.ir.text import parse_graph, parse_type, print_graph

_TYPES = {"seed": "float32[]", "loss": "float32[]", "variable": "resource[]"}


_PLACED = re.compile(r"(%(?:\w+/)?stage(\d+)(?:/replica(\d+))?(?:/mb(\d+))?/\S+ = (\w+)\([^)]*\) \{)(place|call)\b")
_BOUND_PORT = re.compile(r"(takes|gives) (\S+) (\S+) ('.*') (?:as|from) (\S+)")
_BOUND_FUNCTION = re.compile(
    r"function (\S+)\n((?: *(?:takes|gives) [^\n]* (?:as|from) \S+\n)+)(.*?)^ *end$", re.DOTALL | re.MULTILINE
)


def graph(text: str) -> Graph:
    """The graph ``f`` of these lines; a line that begins with ``|`` continues the one before.

    The ports of a function may name their node or value: ``takes arg float32[?] 'x' as %x`` stands for the port and the
    input node, ``gives loss float32[] 'loss' from %l:0`` for the port and the output. Then the other nodes follow at
    once, without the lines ``graph``, ``inputs`` and ``outputs``.

    The first attribute ``place`` stands for those that the node's name says: stage, replica (0 where the name has none)
    and micro-batch; ``call`` stands for these and for the stage's function of this op.
    """
    whole = re.sub(r"\n *\| *", " ", text)
    whole = _PLACED.sub(_write_place, whole)
    whole = _BOUND_FUNCTION.sub(_write_bound_ports, whole)
    found = parse_graph(f"graph f\n{whole}\nend")
    return found.replace(nodes=tuple(replace(node, attrs=attributes(dict(node.attrs))) for node in found.nodes))


def _write_place(node: re.Match[str]) -> str:
    """The begin of a node's line up to the attributes that its name says."""
    begin, stage, replica, micro_batch, op, word = node.groups()
    function = f"function='stage{stage}/{op}', " if word == "call" else ""
    of_micro_batch = f"micro_batch={micro_batch}, " if micro_batch else ""
    return f"{begin}{function}{of_micro_batch}replica={replica or 0}, stage={stage}"


def _write_bound_ports(function: re.Match[str]) -> str:
    """A function whose ports name nodes and values, as it is parsed."""
    name, ports, body = function.groups()
    bound = _BOUND_PORT.findall(ports)
    takes = [(node, role, kind, port) for keyword, role, kind, port, node in bound if keyword == "takes"]
    return "\n".join(
        [
            f"function {name}",
            *(f"{keyword} {role} {kind} {port}" for keyword, role, kind, port, _ in bound),
            f"graph {name}",
            "inputs " + " ".join(node for node, *_ in takes),
            *(f"{node} = {role}() {{port={port}}} -> ({kind})" for node, role, kind, port in takes),
            body,
            "outputs " + " ".join(value for keyword, *_, value in bound if keyword == "gives"),
            "end",
        ]
    )


def calls(text: str, *functions: Function) -> Graph:
    """The graph ``f`` of these lines, which calls ``functions``."""
    return graph(text).replace(functions=functions)


def functions_of(text: str) -> tuple[Function, ...]:
    """The functions that ``text`` describes."""
    return graph(text).functions


def ports(text: str, *, gives: bool = False) -> tuple[Port, ...]:
    """Ports such as ``arg x int32[?], boundary h``; activations are float32[?,4] unless given."""
    found = []
    for words in (entry.split(" ") for entry in text.split(", ") if entry):
        role, name, *kind = words
        default = "float32[4]" if gives and role == "variable" else _TYPES.get(role, "float32[?,4]")
        found.append(Port(role, name, parse_type(kind[0] if kind else default)))
    return tuple(found)


def function(name: str, takes: str = "", gives: str = "", writes: Iterable[str] = (), adds: bool = False) -> Function:
    """A stage function of which only the ports and the written variables matter: one op computes all outputs.

    ``adds``: it only adds sums over samples to the variables that it writes.
    """
    inputs, outputs, written = ports(takes), ports(gives, gives=True), tuple(writes)
    nodes = [
        Node(f"{port.role}/{i}", port.role, (), (port.type,), attributes({"port": port.name}))
        for i, port in enumerate(inputs)
    ]
    compute = Node("compute", "Compute", tuple(Value(node.name) for node in nodes), tuple(p.type for p in outputs))
    write = Node("write", "AssignVariableOp", attrs=attributes({"writes": written}), effect=Effect.WRITE)
    write = write.with_attrs(adds=True) if adds else write
    body = (*nodes, compute, *([write] if written else []))
    return Function(name, Graph(name, body, tuple(node.name for node in nodes), compute.values()), inputs, outputs)


def joining(whole: Function) -> Function:
    """``whole``, where replicas join something inside of a forward, a backward or its part for gradients of inputs."""
    if not whole.name.endswith(("/forward", "/backward", "/inputs")):
        return whole
    *others, compute = (node for node in whole.graph.nodes if node.op != "AssignVariableOp")
    writes = [node for node in whole.graph.nodes if node.op == "AssignVariableOp"]
    sums = parse_type("float64[3,4]")
    own = Node("own", "Moments", compute.inputs, (sums,))
    joined = Node("joined", "Identity", (Value("own"),), (sums,), attributes({"join": "moments"}), effect=Effect.JOIN)
    compute = replace(compute, inputs=(*compute.inputs, Value("joined")))
    return replace(whole, graph=whole.graph.replace(nodes=(*others, own, joined, compute, *writes)))


def two_stages() -> tuple[Function, ...]:
    """``x -> [w] -> h -> [v] -> loss``: each backward takes a stash and gives its variable's gradient."""
    return (
        function("stage0/forward", "arg x, variable w", "boundary h, stash a"),
        function("stage0/backward", "gradient h, stash a", "variable w"),
        function("stage1/forward", "boundary h, variable v", "loss loss, stash b"),
        function("stage1/backward", "boundary h, seed loss, stash b", "gradient h, variable v"),
    )


def assert_graph(result: Graph, text: str) -> None:
    """``result`` is the graph ``f`` of these lines (whatever its functions are)."""
    expected, bare = graph(text), result.replace(functions=(), library=())
    assert print_graph(bare) == print_graph(expected)  # fails with a difference that can be read
    assert bare == expected


def value(text: str) -> Value:
    """``h:0``, or ``h`` for its first output."""
    node, _, index = text.removeprefix("%").partition(":")
    return Value(node, int(index or 0))


@contextmanager
def refused(error: type[Exception], *parts: str) -> Iterator[None]:
    """The block raises ``error``, and the message says all of ``parts``."""
    with pytest.raises(error) as caught:
        yield
    for part in parts:
        assert part in str(caught.value)
