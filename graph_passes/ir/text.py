"""Print a graph as text and parse it back.

One node a line::

    %stage0/forward = MatMul(%x:0, %w:0) {transpose_a=False} -> (float32[?,8]) @"/device:CPU:0" !read ^%init "order"

A graph prints to a text that parses to an equal graph, stage functions and library included.
"""

from __future__ import annotations

import ast
import base64
import itertools
import re
from collections.abc import Iterator

from graph_passes.errors import TextError
from graph_passes.ir.graph import (
    OTHER,
    Attr,
    Control,
    DType,
    Effect,
    Function,
    FunctionRef,
    Graph,
    Node,
    Opaque,
    Port,
    Shape,
    TensorType,
    Value,
)

_NAME = r"[A-Za-z0-9_.\-/>\\]+"
_NODE = re.compile(rf"%({_NAME}) = ([A-Za-z0-9_.>]+)\(([^)]*)\)")
_VALUE = re.compile(rf"%({_NAME}):(\d+)")
_CONTROL = re.compile(rf"\^%({_NAME}) ")
_TYPE = re.compile(r"([a-z_0-9]+)\[([^\]]*)\]")


# --- printing


def _print_dim(dim: int | None) -> str:
    return "?" if dim is None else "_" if dim == OTHER else str(dim)


def _parse_dim(text: str) -> int | None:
    return {"?": None, "_": OTHER}[text] if text in ("?", "_") else int(text)


def print_type(kind: TensorType) -> str:
    """``float32[?,8]``; ``_`` for a length that is not the batch's; ``float32[*]`` when the rank is unknown."""
    dims = kind.shape.dims
    inside = "*" if dims is None else ",".join(_print_dim(dim) for dim in dims)
    return f"{kind.dtype.name}[{inside}]"


def _print_attr(value: Attr) -> str:
    match value:
        case DType(name):
            return f"dtype({name!r})"
        case Shape(None):
            return "shape(None)"
        case Shape(dims):
            return f"shape({list(dims or ())!r})"
        case FunctionRef(name):
            return f"function({name!r})"
        case Opaque(data):
            return f"opaque({base64.b64encode(data).decode()!r})"
        case tuple():
            return "[" + ", ".join(_print_attr(item) for item in value) + "]"
        case float():
            return f"real({value!r})"
    return repr(value)


def print_node(node: Node) -> str:
    """The line of one node."""
    line = f"%{node.name} = {node.op}({', '.join(map(str, node.inputs))})"
    if node.attrs:
        line += " {" + ", ".join(f"{key}={_print_attr(value)}" for key, value in node.attrs) + "}"
    if node.outputs:
        line += " -> (" + ", ".join(map(print_type, node.outputs)) + ")"
    if node.device:
        line += f" @{node.device!r}"
    if node.effect != Effect.PURE:
        line += f" !{node.effect}"
    for control in node.controls:
        line += f" ^%{control.source} {control.reason!r}"
    return line


def print_graph(graph: Graph, *, functions: bool = True) -> str:
    """The text of a graph.

    ``functions=False`` leaves out stage functions and library: it reads better, and parses to the call level alone.
    """
    return "\n".join(_lines(graph, functions)) + "\n"


def _lines(graph: Graph, functions: bool) -> Iterator[str]:
    yield f"graph {graph.name}"
    if graph.inputs:
        yield "inputs " + " ".join("%" + name for name in graph.inputs)
    yield from map(print_node, graph.nodes)
    if graph.outputs:
        yield "outputs " + " ".join(map(str, graph.outputs))
    if functions:
        for name, body in graph.library:
            yield f"library {name} {base64.b64encode(body).decode()}"
        for function in graph.functions:
            yield f"function {function.name}"
            for kind, ports in (("takes", function.inputs), ("gives", function.outputs)):
                for port in ports:
                    yield f"{kind} {port.role} {print_type(port.type)} {port.name!r}"
            yield from ("  " + line for line in _lines(function.graph, functions))
    yield "end"


# --- parsing


def parse_type(text: str) -> TensorType:
    """The type that ``text`` names: ``float32[?,8]``."""
    match = _TYPE.fullmatch(text)
    if not match:
        raise TextError(f"{text!r} is not a type such as float32[?,8]")
    name, inside = match.groups()
    try:
        dims = tuple(_parse_dim(dim) for dim in inside.split(",")) if inside else ()
    except ValueError:
        if inside != "*":
            raise TextError(f"{text!r} is not a type: {inside!r} are no dimensions") from None
        return TensorType(DType(name), Shape(None))
    return TensorType(DType(name), Shape(dims))


def _parse_attr(tree: ast.expr) -> Attr:
    match tree:
        case ast.List(elts=items):
            return tuple(_parse_attr(item) for item in items)
        case ast.Call(func=ast.Name(id=kind), args=[argument]):
            if kind == "real":
                return float(ast.unparse(argument))
            value = ast.literal_eval(argument)
            match kind:
                case "dtype":
                    return DType(value)
                case "shape":
                    return Shape(None if value is None else tuple(value))
                case "function":
                    return FunctionRef(value)
                case "opaque":
                    return Opaque(base64.b64decode(value))
        case _:
            literal = ast.literal_eval(tree)
            if isinstance(literal, bool | int | str | bytes):
                return literal
    raise TextError(f"{ast.unparse(tree)!r} is not an attribute")


class _Cursor:
    """The rest of one line."""

    def __init__(self, line: str) -> None:
        self.rest = line

    def take(self, prefix: str) -> bool:
        if self.rest.startswith(prefix):
            self.rest = self.rest[len(prefix) :]
            return True
        return False

    def word(self) -> str:
        word, _, rest = self.rest.partition(" ")
        self.rest = rest and " " + rest
        return word

    def literal(self) -> str:
        """A python string literal at the head of the line."""
        match = re.match(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", self.rest)
        if not match:
            raise TextError(f"a quoted string is wanted at {self.rest[:40]!r}")
        self.rest = self.rest[match.end() :]
        return str(ast.literal_eval(match.group()))

    def braces(self) -> str:
        """What stands between the opening brace, already taken, and its closing one."""
        position, quote = 0, ""
        while position < len(self.rest):
            char = self.rest[position]
            if quote:
                if char == "\\":
                    position += 1
                elif char == quote:
                    quote = ""
            elif char in "'\"":
                quote = char
            elif char == "}":
                inside, self.rest = self.rest[:position], self.rest[position + 1 :]
                return inside
            position += 1
        raise TextError("a brace is not closed")


def _parse_value(text: str) -> Value:
    match = _VALUE.fullmatch(text)
    if not match:
        raise TextError(f"not a value such as %node:0: {text[:60]!r}")
    return Value(match[1], int(match[2]))


def parse_node(line: str) -> Node:
    """The node that one line describes."""
    head = _NODE.match(line)
    if not head:
        raise TextError(f"not a node: {line[:60]!r}")
    name, op, inputs = head.groups()
    cursor = _Cursor(line[head.end() :])
    attrs: tuple[tuple[str, Attr], ...] = ()
    outputs: tuple[TensorType, ...] = ()
    device, effect = "", Effect.PURE
    if cursor.take(" {"):
        call = ast.parse(f"f({cursor.braces()})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise TextError("attributes are written {key=value, ...}")
        attrs = tuple((str(word.arg), _parse_attr(word.value)) for word in call.keywords)
    if cursor.take(" -> ("):
        inside, _, cursor.rest = cursor.rest.partition(")")
        outputs = tuple(parse_type(text) for text in inside.split(", "))
    if cursor.take(" @"):
        device = cursor.literal()
    if cursor.take(" !"):
        effect = cursor.word()
    controls = []
    while match := _CONTROL.match(cursor.rest.lstrip()):
        cursor.rest = cursor.rest.lstrip()[match.end() :]
        controls.append(Control(match.group(1), cursor.literal()))
    if cursor.rest.strip():
        raise TextError(f"what is this? {cursor.rest[:60]!r}")
    values = tuple(map(_parse_value, inputs.split(", "))) if inputs else ()
    return Node(name, op, values, outputs, attrs, tuple(controls), effect, device)


def parse_graph(text: str) -> Graph:
    """The graph that ``text`` describes.

    Raises TextError naming the line and what is wrong with it.
    """
    lines = iter([(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()])
    graph = _parse(lines)
    for number, line in lines:
        raise TextError(f"line {number}: nothing may follow the graph's end, but {line[:60]!r} does")
    return graph


def _parse(lines: Iterator[tuple[int, str]]) -> Graph:
    number, line = next(lines, (0, ""))
    if not line.startswith("graph "):
        raise TextError(f"line {number}: a graph starts with 'graph NAME', not {line[:60]!r}")
    graph = Graph(line.removeprefix("graph "), ())
    nodes: list[Node] = []
    library: list[tuple[str, bytes]] = []
    functions: list[Function] = []
    for number, line in lines:
        keyword, _, rest = line.partition(" ")
        try:
            if line == "end":
                return graph.replace(nodes=tuple(nodes), library=tuple(library), functions=tuple(functions))
            if keyword == "inputs":
                graph = graph.replace(inputs=tuple(name.removeprefix("%") for name in rest.split()))
            elif keyword == "outputs":
                graph = graph.replace(outputs=tuple(map(_parse_value, rest.split())))
            elif keyword == "library":
                name, _, body = rest.partition(" ")
                library.append((name, base64.b64decode(body, validate=True)))
            elif keyword == "function":
                functions.append(_parse_function(rest, lines))
            else:
                nodes.append(parse_node(line))
        except (TextError, ValueError, SyntaxError) as error:
            if str(error).startswith("line "):
                raise
            raise TextError(f"line {number}: {error}") from error
    raise TextError(f"line {number}: the graph {graph.name!r} has no end")


def _parse_function(name: str, lines: Iterator[tuple[int, str]]) -> Function:
    ports: dict[str, list[Port]] = {"takes": [], "gives": []}
    for number, line in lines:
        keyword, _, rest = line.partition(" ")
        if keyword not in ports:
            graph = _parse(itertools.chain([(number, line)], lines))
            return Function(name, graph, tuple(ports["takes"]), tuple(ports["gives"]))
        try:
            role, kind, port = rest.split(" ", 2)
            ports[keyword].append(Port(role, str(ast.literal_eval(port)), parse_type(kind)))
        except (ValueError, SyntaxError) as error:
            raise TextError(f"line {number}: {error}") from error
    raise TextError(f"function {name!r} has no graph")
