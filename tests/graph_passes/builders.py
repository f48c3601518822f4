"""Build the small graphs that tests of passes rewrite, from text in a short notation; compare graphs and errors."""

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
    """Parse the graph called ``f`` whose nodes and functions these lines describe.

    The lines are those of ``parse_graph``, with these abbreviations:

    * A line that begins with ``|`` continues the line before it.
    * In a function, ``takes arg float32[?] 'x' as %x`` declares an input port and its input node, and
      ``gives loss float32[] 'loss' from %l:0`` declares an output port and the value that it gives. Such a function has
      no lines ``graph``, ``inputs`` and ``outputs``: after its ports come the nodes in between.
    * ``place`` as the first attribute of a node stands for the attributes stage, replica and micro_batch from its
      name, such as ``%stage1/replica0/mb3/forward``. If the name has no replica, the attribute is 0.
    * ``call`` as the first attribute stands for these and for ``function='stage1/forward'``: the stage, and the op.
    """
    whole = re.sub(r"\n *\| *", " ", text)
    whole = _PLACED.sub(_write_place, whole)
    whole = _BOUND_FUNCTION.sub(_write_bound_ports, whole)
    found = parse_graph(f"graph f\n{whole}\nend")
    return found.replace(nodes=tuple(replace(node, attrs=attributes(dict(node.attrs))) for node in found.nodes))


def _write_place(node: re.Match[str]) -> str:
    """Return the begin of a node's line, with the attributes that ``place`` or ``call`` stands for."""
    begin, stage, replica, micro_batch, op, word = node.groups()
    function = f"function='stage{stage}/{op}', " if word == "call" else ""
    of_micro_batch = f"micro_batch={micro_batch}, " if micro_batch else ""
    return f"{begin}{function}{of_micro_batch}replica={replica or 0}, stage={stage}"


def _write_bound_ports(function: re.Match[str]) -> str:
    """Return a function with abbreviated ports in the notation of ``parse_graph``."""
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


def call_graph(text: str, *functions: Function) -> Graph:
    """Return the call-level graph of these lines (see ``graph``), whose nodes call ``functions``."""
    return graph(text).replace(functions=functions)


def functions_of(text: str) -> tuple[Function, ...]:
    """Return the functions that ``text`` describes (see ``graph``)."""
    return graph(text).functions


def ports(text: str, *, gives: bool = False) -> tuple[Port, ...]:
    """Return the ports of a text such as ``arg x int32[?], boundary h``: a role, a name and perhaps a type.

    Without a type an activation is float32[?,4]. ``gives``: the ports are outputs.
    """
    found = []
    for words in (entry.split(" ") for entry in text.split(", ") if entry):
        role, name, *kind = words
        default = "float32[4]" if gives and role == "variable" else _TYPES.get(role, "float32[?,4]")
        found.append(Port(role, name, parse_type(kind[0] if kind else default)))
    return tuple(found)


def function(name: str, takes: str = "", gives: str = "", writes: Iterable[str] = (), adds: bool = False) -> Function:
    """Return a stage function for tests in which only its ports and the variables that it writes matter.

    A single op computes all outputs. ``adds``: what it writes are sums over samples, added to the variables.
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


def with_join(function: Function) -> Function:
    """Return a forward, backward or inputs function with a join, where replicas combine statistics.

    Return other functions unchanged.
    """
    if not function.name.endswith(("/forward", "/backward", "/inputs")):
        return function
    *others, compute = (node for node in function.graph.nodes if node.op != "AssignVariableOp")
    writes = [node for node in function.graph.nodes if node.op == "AssignVariableOp"]
    sums = parse_type("float64[3,4]")
    own = Node("own", "Moments", compute.inputs, (sums,))
    joined = Node("joined", "Identity", (Value("own"),), (sums,), attributes({"join": "moments"}), effect=Effect.JOIN)
    compute = replace(compute, inputs=(*compute.inputs, Value("joined")))
    return replace(function, graph=function.graph.replace(nodes=(*others, own, joined, compute, *writes)))


def two_stages() -> tuple[Function, ...]:
    """Return the functions of two stages: stage 0 computes h from x and w, stage 1 the loss from h and v.

    Each backward takes its forward's stash and gives the gradient of its variable.
    """
    return (
        function("stage0/forward", "arg x, variable w", "boundary h, stash a"),
        function("stage0/backward", "gradient h, stash a", "variable w"),
        function("stage1/forward", "boundary h, variable v", "loss loss, stash b"),
        function("stage1/backward", "boundary h, seed loss, stash b", "gradient h, variable v"),
    )


def assert_graph(result: Graph, text: str) -> None:
    """Check that ``result`` is the graph of these lines (see ``graph``); its functions are not compared."""
    expected, bare = graph(text), result.replace(functions=(), library=())
    assert print_graph(bare) == print_graph(expected)  # fails with a difference that can be read
    assert bare == expected


def value(text: str) -> Value:
    """Return the value of a text such as ``h:0``; ``h`` stands for the first output."""
    node, _, index = text.removeprefix("%").partition(":")
    return Value(node, int(index or 0))


@contextmanager
def refused(error: type[Exception], *parts: str) -> Iterator[None]:
    """Check that the block raises ``error``, with a message that contains each of ``parts``."""
    with pytest.raises(error) as caught:
        yield
    for part in parts:
        assert part in str(caught.value)
