"""The intermediate representation: graphs of immutable nodes, which keep data edges and control edges apart.

Two levels share these types. At the *op level* a node is a TensorFlow operation (``MatMul``) or an input, whose op is
lower-case (``ops.INPUT_OPS``). At the *call level*, the pipelined graph, a node calls a stage function or connects such
calls (``forward``, ``split`` ...; see ``ops.OPS``), and its name says where it runs: ``stage1/replica0/mb3/forward``.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, get_args

from dapple_tf.errors import GraphError
from dapple_tf.wording import format_count


class StrEnum(str, Enum):
    """An enumeration whose members compare, hash and print as their values (``enum.StrEnum`` needs Python 3.11)."""

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class DType:
    """An element type, with TensorFlow's name for it, such as ``float32``."""

    name: str

    @property
    def differentiable(self) -> bool:
        """Whether tensors of this type have gradients."""
        return self.name in {"bfloat16", "half", "float16", "float32", "float64", "complex64", "complex128"}

    @property
    def handle(self) -> bool:
        """Whether a tensor of this type is a handle, which refers to a variable, a table or a list."""
        return self.name in {"resource", "variant"}

    @property
    def transferable(self) -> bool:
        """Whether a tensor of this type can be sent to another device (handles and strings cannot)."""
        return not self.handle and self.name != "string"

    @property
    def size(self) -> int:
        """Bytes of one element; 8 for a handle and a string."""
        digits = re.search(r"\d+", self.name)  # the first: float8_e5m2
        return max(1, int(digits[0]) // 8) if digits else {"half": 2, "bool": 1}.get(self.name, 8)


OTHER = -1
"""A dimension of unknown size that is not the batch axis, such as the number of rows that a mask selects."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a tensor; ``dims`` is None where the rank is unknown.

    A dimension of None is unknown, and may be the batch axis. ``OTHER`` is unknown too, but not the batch axis.
    """

    dims: tuple[int | None, ...] | None

    def elements(self, unknown: int = 1) -> int:
        """Return the number of elements, if each unknown dimension is ``unknown``; 1 where the rank is unknown."""
        total = 1
        for dim in self.dims or ():
            total *= unknown if dim in (None, OTHER) else int(dim or 0)
        return total


@dataclass(frozen=True)
class TensorType:
    """The element type and the shape of a tensor."""

    dtype: DType
    shape: Shape

    def bytes(self, unknown: int = 1) -> int:
        """Return the bytes of a tensor of this type, if each unknown dimension is ``unknown``."""
        return self.dtype.size * self.shape.elements(unknown)


def tensor(dtype: str, *dims: int | None) -> TensorType:
    """Return a tensor type, as in ``tensor("float32", None, 8)``."""
    return TensorType(DType(dtype), Shape(tuple(dims)))


@dataclass(frozen=True)
class FunctionRef:
    """An attribute that names a function of ``Graph.library``, such as the body of a While."""

    name: str


@dataclass(frozen=True)
class Opaque:
    """An attribute that only TensorFlow reads, such as the tensor of a constant, as serialised bytes."""

    data: bytes


Attr = bool | int | float | str | bytes | DType | Shape | FunctionRef | Opaque | tuple["Attr", ...]


@dataclass(frozen=True, order=True)
class Value:
    """One output of a node; prints as ``%node:index``."""

    node: str
    index: int = 0

    def __str__(self) -> str:
        return f"%{self.node}:{self.index}"


@dataclass(frozen=True)
class Control:
    """A control edge of a node: it runs after the node ``source``. Texts and messages print the ``reason``."""

    source: str
    reason: str


class Effect(StrEnum):
    """The effect of a node besides computing its outputs."""

    PURE = "pure"
    """Nothing: the node may run several times or not at all."""
    READ = "read"
    """It reads variables."""
    WRITE = "write"
    """It writes variables."""
    RANDOM = "random"
    """It draws random numbers from a generator that has a state: it must run exactly once."""
    SIDE = "side"
    """It acts on the outside world (print, assert, Python code): it must run exactly once."""
    JOIN = "join"
    """It combines its input with those of the other replicas of its stage: it must run exactly once on each replica."""


@dataclass(frozen=True)
class Node:
    """An operation. ``inputs``: its data edges; ``controls``: its control edges; ``attrs``: sorted by name."""

    name: str
    op: str
    inputs: tuple[Value, ...] = ()
    outputs: tuple[TensorType, ...] = ()
    attrs: tuple[tuple[str, Attr], ...] = ()
    controls: tuple[Control, ...] = ()
    effect: Effect = Effect.PURE
    device: str = ""

    def attr(self, key: str) -> Attr:
        """Return the attribute ``key``. Raises GraphError if the node has no such attribute."""
        for name, value in self.attrs:
            if name == key:
                return value
        raise GraphError(f"node {self.name!r} ({self.op}) has no attribute {key!r}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the attribute ``key``, or ``default`` where the node has none of that name."""
        return dict(self.attrs).get(key, default)

    def integer(self, key: str) -> int:
        """Return the attribute ``key``. Raises GraphError if it is missing or not an integer."""
        value = self.attr(key)
        if not isinstance(value, int):
            raise GraphError(f"attribute {key!r} of {self.name!r} is {value!r}, not an integer")
        return value

    def string(self, key: str) -> str:
        """Return the attribute ``key``. Raises GraphError if it is missing or not a string."""
        value = self.attr(key)
        if not isinstance(value, str):
            raise GraphError(f"attribute {key!r} of {self.name!r} is {value!r}, not a string")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """Return the attribute ``key``. Raises GraphError if it is missing or not a tuple of strings."""
        value = self.attr(key)
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise GraphError(f"attribute {key!r} of {self.name!r} is {value!r}, not a tuple of strings")
        return tuple(item for item in value if isinstance(item, str))

    def integers(self, key: str) -> tuple[int, ...]:
        """Return the attribute ``key``. Raises GraphError if it is missing or not a tuple of integers."""
        value = self.attr(key)
        if not isinstance(value, tuple) or not all(isinstance(item, int) for item in value):
            raise GraphError(f"attribute {key!r} of {self.name!r} is {value!r}, not a tuple of integers")
        return tuple(item for item in value if isinstance(item, int))

    def has(self, key: str) -> bool:
        """Return whether the node has the attribute ``key``."""
        return key in dict(self.attrs)

    @property
    def written(self) -> tuple[str, ...]:
        """The variables that the node writes."""
        return self.strings("writes") if self.effect is Effect.WRITE else ()

    def with_attrs(self, **attrs: Attr) -> Node:
        """Return this node with these attributes added or replaced."""
        return dataclasses.replace(self, attrs=attributes({**dict(self.attrs), **attrs}))

    def without(self, key: str) -> Node:
        """Return this node without the attribute ``key``."""
        return dataclasses.replace(self, attrs=tuple(item for item in self.attrs if item[0] != key))

    def after(self, source: str, reason: str) -> Node:
        """Return this node with a control edge from ``source``, unless it has one already."""
        if any(control.source == source for control in self.controls):
            return self
        return dataclasses.replace(self, controls=(*self.controls, Control(source, reason)))

    def replace_controls(self, moved: Mapping[str, str]) -> Node:
        """Return this node with the sources of control edges replaced as ``moved`` says; other sources stay.

        Duplicate control edges and those from the node itself are removed.
        """
        controls: dict[str, Control] = {}
        for control in self.controls:
            source = moved.get(control.source, control.source)
            if source != self.name:
                controls.setdefault(source, Control(source, control.reason))
        return dataclasses.replace(self, controls=tuple(controls.values()))

    def values(self) -> tuple[Value, ...]:
        """Return the node's outputs, in order."""
        return tuple(Value(self.name, i) for i in range(len(self.outputs)))

    def replace_inputs(self, moved: Mapping[Value, Value]) -> Node:
        """Return this node with its inputs replaced as ``moved`` says; other inputs stay."""
        return dataclasses.replace(self, inputs=tuple(moved.get(value, value) for value in self.inputs))

    def predecessors(self) -> Iterator[str]:
        """Yield the names of the nodes at the other end of its data edges, then of its control edges."""
        for value in self.inputs:
            yield value.node
        for control in self.controls:
            yield control.source


def attributes(attrs: Mapping[str, Attr]) -> tuple[tuple[str, Attr], ...]:
    """Return attributes sorted by name, as ``Node`` holds them."""
    return tuple(sorted(attrs.items()))


def make_node(
    name: str,
    op: str,
    inputs: Iterable[Value] = (),
    outputs: Iterable[TensorType] = (),
    controls: Iterable[Control] = (),
    /,
    **attrs: Attr,
) -> Node:
    """Return a pure node; ``attrs`` may be in any order."""
    return Node(name, op, tuple(inputs), tuple(outputs), attributes(attrs), tuple(controls))


Role = Literal[
    "arg",
    "rows",
    "once",
    "boundary",
    "gradient",
    "seed",
    "stash",
    "carry",
    "variable",
    "sum",
    "slices",
    "indices",
    "partial",
    "combined",
    "whole",
    "statistic",
    "loss",
    "aux",
]
"""The role of an input or output of a stage function; inputs are sorted in this order.

* ``arg``: a tensor of the batch.
* ``rows``: an int64 vector of the micro-batch's first row, its end (exclusive) and the batch size.
* ``once``: a value that the stage computes once a step, from the whole batch.
* ``boundary``: a tensor from the stage before, or to the next stage.
* ``gradient``: the gradient of a boundary tensor.
* ``seed``: the gradient of the loss. It is the micro-batch's share of the samples, or 1, times the loss scale, if any.
* ``stash``: a tensor that forward keeps for backward.
* ``carry``: a tensor from a split backward's first function to that of the weight gradients, or from one part of a
  function to a later one (see ``function_parts``).
* ``variable``: as an input the resource of a variable, as an output the variable's dense gradient.
* ``sum``: the resource of the sum of a variable's gradients, to which backward adds.
* ``slices``, ``indices``: the values and the row numbers of a variable's sparse gradient. There is one port of each
  role for each use of the variable, in the same order.
* ``partial``: a term that an optimizer computes from the gradients of one stage for the updates of all stages.
* ``combined``: a value that it computes from such terms (see ``update_terms``).
* ``whole``: an output of the step, computed on the whole batch, for an update that uses it. The port's name is the
  number of the output.
* ``statistic``: a tensor of forward that is summed over micro-batches and replicas, or the sum.
* ``loss``, ``aux``: outputs of the model.
"""

ROLES: tuple[Role, ...] = get_args(Role)

ROLE_OF_NAME: Mapping[str, Role] = MappingProxyType({role: role for role in ROLES})
"""The role for each name, as it stands in the text of a graph or in an attribute."""

BOUND_ROLES: frozenset[Role] = frozenset({"variable", "sum"})
"""The roles of inputs that are resources. A call does not pass them: they are found by the name of the port."""


@dataclass(frozen=True)
class Port:
    """An input or output of a stage function: its role, a name that is unique in that role, and its type."""

    role: Role
    name: str
    type: TensorType

    def node(self, name: str) -> Node:
        """Return the node called ``name`` that stands for this input in the graph of its function."""
        return make_node(name, self.role, (), (self.type,), port=self.name)


@dataclass(frozen=True)
class Function:
    """A stage function: an op-level graph, with a port for each of its inputs and outputs."""

    name: str
    graph: Graph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @cached_property
    def _ports(self) -> Mapping[str, Port]:
        return dict(zip(self.graph.inputs, self.inputs, strict=True))

    @property
    def results(self) -> tuple[tuple[Port, Value], ...]:
        """The outputs, each with the value of the graph that it gives."""
        return tuple(zip(self.outputs, self.graph.outputs, strict=True))

    @cached_property
    def passed(self) -> tuple[Port, ...]:
        """The inputs for which a call passes a value: all except resources (``BOUND_ROLES``)."""
        return tuple(port for port in self.inputs if port.role not in BOUND_ROLES)

    def input_key(self, value: Value) -> tuple[Role, str] | None:
        """Return the role and the name of the input ``value``; None if the function computes this value."""
        port = self._ports.get(value.node)
        return None if port is None else (port.role, port.name)

    def passed_by(self, call: Node) -> dict[tuple[Role, str], Value]:
        """Return the values that the node ``call`` passes to this function, by the role and the name of the input."""
        return {(port.role, port.name): value for port, value in zip(self.passed, call.inputs, strict=True)}

    def call(self, name: str, op: str, inputs: Iterable[Value], **attrs: Attr) -> Node:
        """Return the node called ``name`` that calls this function."""
        return make_node(name, op, inputs, (port.type for port in self.outputs), **attrs | {"function": self.name})

    def input_ports(self, *roles: Role) -> tuple[tuple[int, Port], ...]:
        """Return the inputs that have one of these roles, each with its position."""
        return tuple((i, port) for i, port in enumerate(self.inputs) if port.role in roles)

    def output_ports(self, *roles: Role) -> tuple[tuple[int, Port], ...]:
        """Return the outputs that have one of these roles, each with its position."""
        return tuple((i, port) for i, port in enumerate(self.outputs) if port.role in roles)


@dataclass(frozen=True)
class Graph:
    """Nodes in a topological order, and the graph's outputs.

    ``inputs``: the names of the input nodes, in the order of the arguments. ``functions``: the stage functions that
    nodes of the call level call. ``library``: TensorFlow's own functions that ops call, such as loop bodies: the name
    and the serialised function of each.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[Value, ...] = ()
    functions: tuple[Function, ...] = ()
    library: tuple[tuple[str, bytes], ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def function_by_name(self) -> Mapping[str, Function]:
        """The stage functions by name."""
        return {function.name: function for function in self.functions}

    def node(self, name: str) -> Node:
        """Return the node called ``name``. Raises GraphError if there is none."""
        try:
            return self.by_name[name]
        except KeyError:
            raise GraphError(f"graph {self.name!r} has no node {name!r}") from None

    def type_of(self, value: Value) -> TensorType:
        """Return the type of ``value``. Raises GraphError if there is no such output."""
        node = self.node(value.node)
        if value.index >= len(node.outputs):
            raise GraphError(f"{value} does not exist: {node.op} has {format_count(len(node.outputs), 'output')}")
        return node.outputs[value.index]

    def function(self, name: str) -> Function:
        """Return the stage function called ``name``. Raises GraphError if there is none."""
        try:
            return self.function_by_name[name]
        except KeyError:
            raise GraphError(f"graph {self.name!r} has no function {name!r}") from None

    def in_order(self, values: Iterable[Value]) -> list[Value]:
        """Return ``values`` sorted by the position of their nodes in the graph, then by the index of the output."""
        position = {node.name: i for i, node in enumerate(self.nodes)}
        return sorted(values, key=lambda value: (position[value.node], value.index))

    def consumers(self) -> dict[str, list[Node]]:
        """Return, for the name of each node, the nodes that use one of its outputs, in order."""
        users: dict[str, list[Node]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for source in dict.fromkeys(value.node for value in node.inputs):
                users[source].append(node)
        return users

    def sorted(self) -> Graph:
        """Return this graph with its nodes in a topological order, which added edges may have broken.

        Raises GraphError for a cycle.
        """
        return self.replace(nodes=topological(self.nodes))

    def replace(self, **changes: object) -> Graph:
        """Return a copy of this graph with these fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # the fields are checked by name


def topological(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return ``nodes`` in a topological order. A node is moved only if a node before it depends on it.

    Edges from nodes that are not in ``nodes`` are ignored. Raises GraphError for a cycle, whose nodes the message
    names, and for two nodes of the same name.
    """
    unsorted = list(nodes)
    by_name = {node.name: node for node in unsorted}
    if len(by_name) < len(unsorted):
        counts = Counter(node.name for node in unsorted)
        raise GraphError(f"two nodes are called {counts.most_common(1)[0][0]!r}")
    state: dict[str, bool] = {}  # absent: not visited; False: being visited; True: in the result
    result: list[Node] = []
    for root in unsorted:
        stack: list[tuple[Node, Iterator[str]]] = []
        if root.name not in state:
            state[root.name] = False
            stack.append((root, root.predecessors()))
        while stack:
            node, pending = stack[-1]
            for source in pending:
                if source not in by_name or state.get(source):
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
                result.append(node)
                stack.pop()
    return tuple(result)


def ancestors(
    graph: Graph,
    roots: Iterable[str],
    stop: Iterable[str] = (),
    *,
    by_controls: bool = True,
    used: Mapping[str, Sequence[Value]] = MappingProxyType({}),
) -> set[str]:
    """Return the names of ``roots`` and of all nodes that they depend on; do not search through the nodes ``stop``.

    ``by_controls``: whether control edges count as dependencies. ``used``: further values on which nodes depend, by the
    node's name. Raises GraphError for a name that is no node.
    """
    barred = set(stop)
    found: set[str] = set()
    stack = [name for name in roots if name not in barred]
    while stack:
        name = stack.pop()
        if name in found:
            continue
        found.add(name)
        node = graph.node(name)
        sources = node.predecessors() if by_controls else (value.node for value in node.inputs)
        further = (value.node for value in used.get(name, ()))
        stack.extend(source for source in (*sources, *further) if source not in barred)
    return found


def search_back(graph: Graph, values: Iterable[Value], ends: Callable[[Value], bool]) -> tuple[set[str], set[Value]]:
    """Search back from ``values`` along data edges; return the names of the nodes passed, and the values where it ends.

    ``ends``: returns whether the search ends at a value, whose node then is not among the nodes.
    """
    nodes, ended = set[str](), set[Value]()
    pending = list(values)
    while pending:
        value = pending.pop()
        if ends(value):
            ended.add(value)
        elif value.node not in nodes:
            nodes.add(value.node)
            pending += graph.node(value.node).inputs
    return nodes, ended
