"""The IR: immutable nodes and edges, data apart from control.

Two levels share these types. At the *op level* a node is a TensorFlow operation (``MatMul``), or one of
the lower-case inputs ``arg``, ``variable``, ``capture``, ``boundary``, ``seed``, ``stash``. At the *call
level* (the pipelined graph) a node is a whole piece of a stage (``forward``, ``backward``, ``split`` ...),
named after where it lives: ``stage1/replica0/mb3/forward``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from graph_passes.errors import GraphError


@dataclass(frozen=True)
class DType:
    """The name of an element type, as TensorFlow writes it: ``float32``."""

    name: str

    @property
    def differentiable(self) -> bool:
        """Whether gradients flow through tensors of this type."""
        return self.name in {"bfloat16", "half", "float16", "float32", "float64", "complex64", "complex128"}

    @property
    def transferable(self) -> bool:
        """Whether a tensor of this type may leave its device (handles and strings may not)."""
        return self.name not in {"resource", "variant", "string"}

    @property
    def size(self) -> int:
        """Bytes of one element (booleans take one; handles count as eight)."""
        digits = re.search(r"\d+", self.name)  # the first: float8_e5m2
        return max(1, int(digits[0]) // 8) if digits else {"half": 2, "bool": 1}.get(self.name, 8)


OTHER = -1  # an unknown length that is not the batch's: rows of several samples, of a mask's choice


@dataclass(frozen=True)
class Shape:
    """Dimensions; ``dims=None`` when even the rank is unknown.

    ``None`` is an unknown length that may be the batch's, ``OTHER`` one that is known not to be.
    """

    dims: tuple[int | None, ...] | None

    def elements(self, unknown: int = 1) -> int:
        """The number of elements, with ``unknown`` standing for each unknown dimension."""
        total = 1
        for dim in self.dims or ():
            total *= unknown if dim in (None, OTHER) else int(dim or 0)
        return total


@dataclass(frozen=True)
class TensorType:
    """What an output carries: element type and shape."""

    dtype: DType
    shape: Shape

    def bytes(self, unknown: int = 1) -> int:
        """Bytes of such a tensor, ``unknown`` standing for each unknown dimension."""
        return self.dtype.size * self.shape.elements(unknown)


def tensor(dtype: str, *dims: int | None) -> TensorType:
    """Shorthand: ``tensor("float32", None, 8)``."""
    return TensorType(DType(dtype), Shape(tuple(dims)))


@dataclass(frozen=True)
class FunctionRef:
    """An attribute that names a function of the library (the body of a While, an If, a call)."""

    name: str


@dataclass(frozen=True)
class Opaque:
    """An attribute only TensorFlow understands (a constant's tensor), kept as serialised bytes."""

    data: bytes


Attr = bool | int | float | str | bytes | DType | Shape | FunctionRef | Opaque | tuple["Attr", ...]


@dataclass(frozen=True, order=True)
class Value:
    """One output of one node; prints as ``%node:index``."""

    node: str
    index: int = 0

    def __str__(self) -> str:
        return f"%{self.node}:{self.index}"


@dataclass(frozen=True)
class Control:
    """A control edge: this node runs after ``source``, for a reason that can be printed."""

    source: str
    reason: str


class Effect:
    """What running a node does besides computing its outputs."""

    PURE = "pure"  # nothing: may be repeated or left out
    READ = "read"  # reads variables
    WRITE = "write"  # writes variables
    RANDOM = "random"  # draws from a hidden generator: must run exactly once
    SIDE = "side"  # acts on the outside world (print, assert, python): must run exactly once

    ALL = (PURE, READ, WRITE, RANDOM, SIDE)


@dataclass(frozen=True)
class Node:
    """One operation. ``inputs`` are data edges, ``controls`` are control edges."""

    name: str
    op: str
    inputs: tuple[Value, ...] = ()
    outputs: tuple[TensorType, ...] = ()
    attrs: tuple[tuple[str, Attr], ...] = ()
    controls: tuple[Control, ...] = ()
    effect: str = Effect.PURE
    device: str = ""

    def attr(self, key: str) -> Attr:
        """The attribute ``key``; GraphError where the node has none."""
        for name, value in self.attrs:
            if name == key:
                return value
        raise GraphError(f"node {self.name!r} ({self.op}) has no attribute {key!r}")

    def integer(self, key: str) -> int:
        """The integer attribute ``key``."""
        value = self.attr(key)
        if not isinstance(value, int):
            raise GraphError(f"attribute {key!r} of {self.name!r} is {value!r}, not an integer")
        return value

    def string(self, key: str) -> str:
        """The string attribute ``key``."""
        value = self.attr(key)
        if not isinstance(value, str):
            raise GraphError(f"attribute {key!r} of {self.name!r} is {value!r}, not a string")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """The attribute ``key``, a tuple of strings."""
        value = self.attr(key)
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise GraphError(f"attribute {key!r} of {self.name!r} is {value!r}, not a tuple of strings")
        return tuple(item for item in value if isinstance(item, str))

    def integers(self, key: str) -> tuple[int, ...]:
        """The attribute ``key``, a tuple of integers."""
        value = self.attr(key)
        if not isinstance(value, tuple) or not all(isinstance(item, int) for item in value):
            raise GraphError(f"attribute {key!r} of {self.name!r} is {value!r}, not a tuple of integers")
        return tuple(item for item in value if isinstance(item, int))

    def has(self, key: str) -> bool:
        """Whether the node has the attribute ``key``."""
        return any(name == key for name, _ in self.attrs)

    def with_attrs(self, **attrs: Attr) -> Node:
        """This node with these attributes added or replaced."""
        return dataclasses.replace(self, attrs=attributes({**dict(self.attrs), **attrs}))

    def after(self, source: str, reason: str) -> Node:
        """This node with one more control edge (none is added twice)."""
        if any(control.source == source for control in self.controls):
            return self
        return dataclasses.replace(self, controls=(*self.controls, Control(source, reason)))

    def values(self) -> tuple[Value, ...]:
        """A reference to each of the node's outputs."""
        return tuple(Value(self.name, i) for i in range(len(self.outputs)))

    def predecessors(self) -> Iterator[str]:
        """Names of the nodes that must run before this one, data edges first."""
        for value in self.inputs:
            yield value.node
        for control in self.controls:
            yield control.source


def attributes(attrs: Mapping[str, Attr]) -> tuple[tuple[str, Attr], ...]:
    """Attributes in the canonical (sorted) order."""
    return tuple(sorted(attrs.items()))


@dataclass(frozen=True)
class Port:
    """What one input or output of a stage function is: a role and the name it has there.

    Roles: ``arg`` (a batch argument), ``boundary`` (a tensor from the stage before, or to the next),
    ``gradient`` (of a boundary tensor), ``seed`` (the weight of this slice in the loss), ``stash`` (a
    forward tensor that backward needs), ``carry`` (what backward makes and the weights' part of it needs, where
    that is a function of its own), ``variable`` (a resource, or its gradient), ``loss``, ``aux``.
    """

    role: str
    name: str
    type: TensorType


@dataclass(frozen=True)
class Function:
    """A stage function: an op-level graph whose inputs and outputs are known by ports."""

    name: str
    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def input_ports(self, *roles: str) -> tuple[tuple[int, Port], ...]:
        """Inputs with one of these roles, each with its position."""
        return tuple((i, port) for i, port in enumerate(self.inputs) if port.role in roles)

    def output_ports(self, *roles: str) -> tuple[tuple[int, Port], ...]:
        """Outputs with one of these roles, each with its position."""
        return tuple((i, port) for i, port in enumerate(self.outputs) if port.role in roles)


@dataclass(frozen=True)
class Graph:
    """Nodes in a topological order, and which values leave.

    ``inputs`` names the input nodes in the order of the call. ``functions`` are the stage functions that
    call-level nodes name; ``library`` holds TensorFlow's own function bodies, serialised and opaque.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[Value, ...] = ()
    functions: tuple[Function, ...] = ()
    library: tuple[tuple[str, bytes], ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def function_by_name(self) -> Mapping[str, Function]:
        """Stage functions by name."""
        return {function.name: function for function in self.functions}

    def node(self, name: str) -> Node:
        """The node called ``name``; GraphError where there is none."""
        try:
            return self.by_name[name]
        except KeyError:
            raise GraphError(f"graph {self.name!r} has no node {name!r}") from None

    def type_of(self, value: Value) -> TensorType:
        """The type of a value."""
        node = self.node(value.node)
        if value.index >= len(node.outputs):
            raise GraphError(f"{value} does not exist: {node.op} has {len(node.outputs)} outputs")
        return node.outputs[value.index]

    def function(self, name: str) -> Function:
        """The stage function called ``name``; GraphError where there is none."""
        try:
            return self.function_by_name[name]
        except KeyError:
            raise GraphError(f"graph {self.name!r} has no function {name!r}") from None

    def consumers(self) -> dict[str, list[Node]]:
        """For each node, the nodes that take one of its outputs, in order."""
        users: dict[str, list[Node]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for source in dict.fromkeys(value.node for value in node.inputs):
                users[source].append(node)
        return users

    def sorted(self) -> Graph:
        """The same graph with its nodes in a topological order again, after edges were added."""
        return self.replace(nodes=topological(self.nodes))

    def replace(self, **changes: object) -> Graph:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # the fields are checked by name


def topological(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes in a topological order that keeps the given order wherever it is allowed.

    Raises GraphError naming the nodes of a cycle.
    """
    given = list(nodes)
    names = {node.name for node in given}
    by_name = {node.name: node for node in given}
    state: dict[str, bool] = {}  # absent: not seen; False: being visited; True: placed
    placed: list[Node] = []
    for root in given:
        stack: list[tuple[Node, Iterator[str]]] = []
        if root.name not in state:
            state[root.name] = False
            stack.append((root, root.predecessors()))
        while stack:
            node, pending = stack[-1]
            for source in pending:
                if source not in names or state.get(source):
                    continue
                if source in state:
                    path = [entry.name for entry, _ in stack]
                    cycle = [*path[path.index(source) :], source]
                    raise GraphError("the graph has a cycle: " + " <- ".join(cycle))
                state[source] = False
                stack.append((by_name[source], by_name[source].predecessors()))
                break
            else:
                state[node.name] = True
                placed.append(node)
                stack.pop()
    return tuple(placed)


def ancestors(graph: Graph, roots: Iterable[str], stop: Iterable[str] = ()) -> set[str]:
    """``roots`` and all nodes they need, not going past (nor into) the nodes in ``stop``."""
    barred = set(stop)
    found: set[str] = set()
    stack = [name for name in roots if name not in barred]
    while stack:
        name = stack.pop()
        if name in found:
            continue
        found.add(name)
        stack.extend(source for source in graph.node(name).predecessors() if source not in barred)
    return found
