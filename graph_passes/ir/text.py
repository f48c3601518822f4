"""Print a graph as text and parse it back.

Each node is one line::

    %stage0/forward = MatMul(%x:0, %w:0) {transpose_a=False} -> (float32[?,8]) @'/device:CPU:0' !read ^%init 'order'

The parts are the name, the op, the inputs, the attributes, the types of the outputs, the device, the effect, and the
control edges with their reasons.

A printed graph parses to an equal graph, stage functions and library included.
"""

from __future__ import annotations

import ast
import base64
import itertools
import re
from collections.abc import Iterator

from dapple_tf.errors import TextError
from dapple_tf.graph_passes.ir.graph import (
    OTHER,
    ROLE_OF_NAME,
    ROLES,
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
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_LITERAL = re.compile(_QUOTED)
_BRACES = re.compile(rf"((?:{_QUOTED}|[^'\"}}])*)\}}")
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
    """Return a type as text: ``float32[?,8]``, with ``_`` for ``OTHER``, or ``float32[*]`` for an unknown rank."""
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
    """Return the line of one node."""
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
    """Return the text of a graph.

    ``functions=False`` leaves out the stage functions and the library: the text is short, and has the call level only.
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
    """Return the type that a text such as ``float32[?,8]`` describes. Raises TextError for any other text."""
    match = _TYPE.fullmatch(text)
    if not match:
        raise TextError(f"{text!r} is not a type such as float32[?,8]")
    name, inside = match.groups()
    try:
        dims = tuple(_parse_dim(dim) for dim in inside.split(",")) if inside else ()
    except ValueError:
        if inside != "*":
            raise TextError(f"{text!r} is not a type: {inside!r} is not a list of dimensions") from None
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
    """The part of a line that has not been parsed."""

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
        """Take a Python string literal."""
        match = _LITERAL.match(self.rest)
        if not match:
            raise TextError(f"expected a quoted string at {self.rest[:40]!r}")
        self.rest = self.rest[match.end() :]
        return str(ast.literal_eval(match.group()))

    def braces(self) -> str:
        """Take the text up to the closing brace; the opening one has been taken."""
        match = _BRACES.match(self.rest)
        if not match:
            raise TextError("a closing brace is missing")
        self.rest = self.rest[match.end() :]
        return match[1]


def _parse_value(text: str) -> Value:
    match = _VALUE.fullmatch(text)
    if not match:
        raise TextError(f"expected a value such as %node:0, not {text[:60]!r}")
    return Value(match[1], int(match[2]))


def _parse_effect(text: str) -> Effect:
    try:
        return Effect(text)
    except ValueError:
        raise TextError(f"unknown effect {text!r}; the effects are {', '.join(Effect)}") from None


def _parse_port(role: str, name: str, kind: str) -> Port:
    if role not in ROLE_OF_NAME:
        raise TextError(f"unknown role {role!r}; the roles are {', '.join(ROLES)}")
    return Port(ROLE_OF_NAME[role], name, parse_type(kind))


def parse_node(line: str) -> Node:
    """Return the node that a line describes. Raises TextError saying what is wrong with the line."""
    head = _NODE.match(line)
    if not head:
        raise TextError(f"expected a node such as %name = Op(), not {line[:60]!r}")
    name, op, inputs = head.groups()
    cursor = _Cursor(line[head.end() :])
    attrs: tuple[tuple[str, Attr], ...] = ()
    outputs: tuple[TensorType, ...] = ()
    device, effect = "", Effect.PURE
    if cursor.take(" {"):
        call = ast.parse(f"f({cursor.braces()})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise TextError("expected attributes as in {key=value, ...}")
        attrs = tuple((str(word.arg), _parse_attr(word.value)) for word in call.keywords)
    if cursor.take(" -> ("):
        inside, _, cursor.rest = cursor.rest.partition(")")
        outputs = tuple(parse_type(text) for text in inside.split(", "))
    if cursor.take(" @"):
        device = cursor.literal()
    if cursor.take(" !"):
        effect = _parse_effect(cursor.word())
    controls = []
    while match := _CONTROL.match(cursor.rest.lstrip()):
        cursor.rest = cursor.rest.lstrip()[match.end() :]
        controls.append(Control(match.group(1), cursor.literal()))
    if cursor.rest.strip():
        raise TextError(f"unexpected text after the node: {cursor.rest[:60]!r}")
    values = tuple(map(_parse_value, inputs.split(", "))) if inputs else ()
    return Node(name, op, values, outputs, attrs, tuple(controls), effect, device)


def parse_graph(text: str) -> Graph:
    """Return the graph that ``text`` describes. Raises TextError with the number of the line and what is wrong."""
    lines = iter([(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()])
    graph = _parse(lines)
    for number, line in lines:
        raise TextError(f"line {number}: expected nothing after the end of the graph, not {line[:60]!r}")
    return graph


def _parse(lines: Iterator[tuple[int, str]]) -> Graph:
    number, line = next(lines, (0, ""))
    if not line.startswith("graph "):
        raise TextError(f"line {number}: expected 'graph NAME', not {line[:60]!r}")
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
        except (TextError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            if str(error).startswith("line "):
                raise
            raise TextError(f"line {number}: {error}") from error
    raise TextError(f"line {number}: graph {graph.name!r} has no line 'end'")


def _parse_function(name: str, lines: Iterator[tuple[int, str]]) -> Function:
    ports: dict[str, list[Port]] = {"takes": [], "gives": []}
    for number, line in lines:
        keyword, _, rest = line.partition(" ")
        if keyword not in ports:
            graph = _parse(itertools.chain([(number, line)], lines))
            return Function(name, graph, tuple(ports["takes"]), tuple(ports["gives"]))
        try:
            role, kind, port = rest.split(" ", 2)
            ports[keyword].append(_parse_port(role, str(ast.literal_eval(port)), kind))
        except (ValueError, SyntaxError) as error:
            raise TextError(f"line {number}: {error}") from error
    raise TextError(f"function {name!r} has no graph")
