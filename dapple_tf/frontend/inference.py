"""Import a graph so that TensorFlow infers its shapes, also those of what functions, conditions and loops return.

TensorFlow gives an op that calls a function the shapes that were known when it was traced, and forgets the shapes of
the elements of lists. So the graph is imported in parts, each of which ends with such an op. The function is imported
for the shapes of the op's operands, and its outputs tell the shapes of the op's, before the next part is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from dapple_tf import internals
from dapple_tf.frontend.read_graph import read_graph, read_shape, read_value, skip_identities
from dapple_tf.graph_passes.ir.graph import Graph, Node, Shape

LARGEST = 256
"""The number of elements above which the value of an integer tensor is not evaluated."""

_SCOPE = "inferred"
_MOST_ROUNDS = 8  # the shape of a loop variable changes a few times at most
_TAKES_ELEMENTS = frozenset({"TensorListGetItem", "TensorListPopBack", "TensorListStack", "TensorListGather"})


@dataclass(frozen=True, eq=False)
class Shapes(Mapping[str, tuple[Shape, ...]]):
    """The shapes of the outputs of the nodes of a graph, by the node's name, as far as they are known.

    ``bodies``: of the functions that nodes call, by the names of the node and the function.
    """

    outputs: Mapping[str, tuple[Shape, ...]] = field(default_factory=dict)
    bodies: Mapping[tuple[str, str], Body] = field(default_factory=dict)

    def __getitem__(self, name: str) -> tuple[Shape, ...]:
        return self.outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def of_body(self, node: str, function: str) -> Shapes:
        """Return the shapes in a function that a node calls; none where the node was not imported."""
        found = self.bodies.get((node, function))
        return Shapes() if found is None else found.shapes


@dataclass(frozen=True)
class Elements:
    """The elements of a TensorList: the ``shape`` of all, None where it has none yet, and how many there are."""

    shape: Shape | None = None
    length: int | None = None


@dataclass(frozen=True, eq=False)
class Known:
    """A tensor as far as it is known: its shape, the elements of a list, and the NumPy value of a few integers."""

    shape: Shape
    elements: Elements | None = None
    value: Any = None


@dataclass(frozen=True, eq=False)
class Body:
    """A function's FuncGraph, and the ``shapes`` of all its values for the operands of one call of it, as far as known.

    ``kept``: the positions of arguments that have the same value in all calls that the op makes: all of them, but for a
    loop.
    """

    func_graph: Any
    shapes: Shapes
    kept: frozenset[int]

    @cached_property
    def graph(self) -> Graph:
        """The function in the IR; its inputs are ``arg`` nodes."""
        inputs = {t.op.name: Node(_argument_name(i), "arg") for i, t in enumerate(self.func_graph.inputs)}
        return read_graph(self.func_graph, inputs, self.func_graph.name).replace(
            inputs=tuple(node.name for node in inputs.values()),
            outputs=tuple(read_value(tensor, inputs) for tensor in self.func_graph.outputs),
        )


def _argument_name(position: int) -> str:
    """Return the name of the node of a function's argument."""
    return f"input/{position}"


@dataclass(frozen=True, eq=False)
class Imported:
    """An imported graph: the tensors of its nodes' outputs, and what is known of lists, by node; see ``Shapes``.

    ``functions``: the names of those that the TensorFlow graph under construction has.
    """

    functions: set[str]
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    elements: dict[tuple[str, int], Elements] = field(default_factory=dict)
    bodies: dict[tuple[str, str], Body] = field(default_factory=dict)

    @property
    def shapes(self) -> Shapes:
        found = {name: tuple(map(read_shape, outputs)) for name, outputs in self.tensors.items()}
        return Shapes(found, self.bodies)

    def tensor(self, reference: str) -> Any:
        """Return the tensor that ``reference``, the input of a node of a GraphDef, names."""
        name, index = _source(reference)
        return self.tensors[name][index]

    def known(self, reference: str) -> Known:
        """Return what is known of the tensor that the input of a node names."""
        tensor, elements = self.tensor(reference), self.elements.get(_source(reference))
        return Known(read_shape(tensor), elements, _small_value(tensor))


def import_for_shapes(definition: graph_pb2.GraphDef, inputs: Mapping[str, Any], owner: Any) -> Imported:
    """Import a graph into the TensorFlow graph under construction, with all the shapes that can be inferred.

    ``inputs``: tensors that replace nodes, by their name. ``owner``: a FuncGraph that has the functions which are
    called. Control edges are left out: nothing is to run. Raises ValueError where TensorFlow refuses the shapes.
    """
    return _import(definition, Imported(set(), {name: [tensor] for name, tensor in inputs.items()}), owner)


def infer_body(body: Any, shapes: Sequence[Shape], *, kept: bool = True) -> Body:
    """Return the shapes of the values of the FuncGraph ``body`` for arguments of these shapes.

    ``kept``: whether the arguments have the same values in all calls.
    """
    with tf.Graph().as_default():
        known = [Known(shape) for shape in shapes]
        return _import_body(body, list(body.inputs), known, frozenset(range(len(shapes) if kept else 0)), set())[0]


def _import(definition: graph_pb2.GraphDef, found: Imported, owner: Any) -> Imported:
    functions = {function.signature.name for function in definition.library.function}
    for part in _parts([node for node in definition.node if node.name not in found.tensors], functions):
        _import_part(definition, part, found)
        for node in part:
            _follow_list(node, found)
        last = part[-1]
        called = _called_functions(last, functions)
        if called:
            results = _infer_call(last, called, found, owner)
        elif last.op in _TAKES_ELEMENTS:
            results = _taken_elements(last, found)
        else:
            continue
        for i, known in enumerate(results):
            _set_known(found, last.name, i, known)
    return found


def _parts(nodes: Sequence[Any], functions: set[str]) -> Iterator[list[Any]]:
    """Yield the nodes in parts that end with an op whose outputs' shapes TensorFlow does not infer."""
    part: list[Any] = []
    for node in nodes:
        part.append(node)
        if node.op in internals.CALLING_OPS or node.op in _TAKES_ELEMENTS or node.op in functions:
            yield part
            part = []
    if part:
        yield part


def _import_part(definition: graph_pb2.GraphDef, nodes: Sequence[Any], found: Imported) -> None:
    part = graph_pb2.GraphDef(node=nodes, versions=definition.versions)
    part.library.function.extend(f for f in definition.library.function if f.signature.name not in found.functions)
    found.functions.update(function.signature.name for function in part.library.function)
    own, outside = {node.name for node in nodes}, set[str]()
    for node in part.node:
        data = [reference for reference in node.input if not reference.startswith("^")]
        del node.input[len(data) :]
        outside |= {reference for reference in data if _source(reference)[0] not in own}
    graph = tf.compat.v1.get_default_graph()
    scope = graph.unique_name(_SCOPE, mark_as_used=False)
    fed = {"{}:{}".format(*_source(reference)): found.tensor(reference) for reference in outside}
    tf.graph_util.import_graph_def(part, input_map=fed, name=scope)
    for node in nodes:
        found.tensors[node.name] = list(graph.get_operation_by_name(f"{scope}/{node.name}").outputs)


def _source(reference: str) -> tuple[str, int]:
    name, _, index = reference.partition(":")
    return name, int(index or 0)


def _set_known(found: Imported, name: str, index: int, known: Known) -> None:
    tensor = found.tensors[name][index]
    if known.elements is not None:
        found.elements[name, index] = known.elements
    if known.value is not None:
        found.tensors[name][index] = tf.constant(known.value, tensor.dtype)
    elif known.shape.dims is not None and tensor.shape.is_compatible_with(known.shape.dims):
        tensor.set_shape(known.shape.dims)


def _small_value(tensor: Any) -> Any:
    """Return the NumPy value of an integer or boolean tensor of few elements, where it is known, else None."""
    if not (tensor.dtype.is_integer or tensor.dtype.is_bool) or not tensor.shape.is_fully_defined():
        return None
    return internals.constant_value(tensor) if tensor.shape.num_elements() <= LARGEST else None


def _called_functions(node: Any, functions: set[str]) -> list[str]:
    """Return the names of the functions that a node calls; the body of a loop before its condition."""
    if node.op in functions:
        return [node.op]
    if node.op not in internals.CALLING_OPS:
        return []
    attributes = [node.attr[key].func.name for key in ("f", "then_branch", "else_branch", "body", "cond")]
    return [name for name in attributes if name] + [function.name for function in node.attr["branches"].list.func]


def _infer_call(node: Any, called: Sequence[str], found: Imported, owner: Any) -> list[Known]:
    """Return what is known of the outputs of a node that calls functions, and note the shapes in their bodies."""
    references = [reference for reference in node.input if not reference.startswith("^")]
    operands = references[node.op in internals.CONDITION_OPS :]
    tensors, known = [found.tensor(reference) for reference in operands], [found.known(r) for r in operands]
    every = frozenset(range(len(operands)))

    def infer(name: str, known: Sequence[Known], kept: frozenset[int]) -> list[Known]:
        body = internals.function_graph(owner, name)
        found.bodies[node.name, name], results = _import_body(body, tensors, known, kept, found.functions)
        return results

    if node.op in internals.LOOP_OPS:
        return _infer_loop(internals.function_graph(owner, called[0]), called, known, infer)
    results = [infer(name, known, every) for name in called]
    if node.op in internals.CONDITION_OPS and (decided := found.known(references[0]).value) is not None:
        return results[chosen_branch(node.op, decided, len(called))]
    first, *others = results
    for other in others:
        first = [_join(one, another) for one, another in zip(first, other, strict=True)]
    return first


def chosen_branch(op: str, decided: Any, count: int) -> int:
    """Return which of the ``count`` branches a condition takes, where its first operand has the value ``decided``."""
    if op in ("If", "StatelessIf"):
        return int(not decided)
    return int(decided) if 0 <= decided < count else count - 1


def _infer_loop(body: Any, called: Sequence[str], known: Sequence[Known], infer: Any) -> list[Known]:
    kept = frozenset(i for i, tensor in enumerate(body.outputs) if skip_identities(tensor) is body.inputs[i])
    found = [one if i in kept else replace(one, value=None) for i, one in enumerate(known)]
    for _ in range(_MOST_ROUNDS):
        after = infer(called[0], found, kept)
        joined = [one if i in kept else _join(one, new) for i, (one, new) in enumerate(zip(found, after, strict=True))]
        if all(map(_is_same, found, joined)):
            break
        found = joined
    else:
        found = [one if i in kept else Known(Shape(None)) for i, one in enumerate(known)]
        infer(called[0], found, kept)
    infer(called[1], found, kept)
    return found


def _is_same(one: Known, other: Known) -> bool:
    return (one.shape, one.elements) == (other.shape, other.elements) and np.array_equal(one.value, other.value)


def _import_body(
    body: Any, tensors: Sequence[Any], known: Sequence[Known], kept: frozenset[int], functions: set[str]
) -> tuple[Body, list[Known]]:
    """Return the shapes of a function's values, and what is known of its outputs; none where it refuses the operands.

    ``tensors``: the operands, or others with their dtypes and handle data. ``functions``: see ``Imported``.
    """
    arguments = {_argument_name(i): (one.shape,) for i, one in enumerate(known)}
    start = Imported(functions)
    for parameter, tensor, one in zip(body.inputs, tensors, known, strict=True):
        dims = None if one.shape.dims is None else list(one.shape.dims)
        value = internals.placeholder_like(tensor, dims) if one.value is None else tf.constant(one.value, tensor.dtype)
        start.tensors[parameter.op.name] = [value]
        if one.elements is not None:
            start.elements[parameter.op.name, 0] = one.elements
    try:
        found = _import(body.as_graph_def(add_shapes=True), start, body)
    except ValueError:  # unknown shapes are always correct
        return Body(body, Shapes(arguments), kept), [Known(Shape(None)) for _ in body.outputs]
    shapes = Shapes({**found.shapes, **arguments}, found.bodies)
    return Body(body, shapes, kept), [found.known(tensor.name) for tensor in body.outputs]


def _join(one: Known, other: Known) -> Known:
    """Return what is known of a tensor that is one of two: in two branches, or before and after a round of a loop."""
    same = one.value is not None and other.value is not None and np.array_equal(one.value, other.value)
    elements = None
    if one.elements is not None and other.elements is not None:
        elements = _join_elements(one.elements, other.elements)
    return Known(_join_shapes(one.shape, other.shape), elements, one.value if same else None)


def _join_elements(one: Elements, other: Elements) -> Elements:
    if one.shape is None or other.shape is None:
        shape = one.shape or other.shape
    else:
        shape = _join_shapes(one.shape, other.shape)
    return Elements(shape, one.length if one.length == other.length else None)


def _join_shapes(one: Shape, other: Shape) -> Shape:
    if one.dims is None or other.dims is None or len(one.dims) != len(other.dims):
        return Shape(None)
    return Shape(tuple(a if a == b else None for a, b in zip(one.dims, other.dims, strict=True)))


def _follow_list(node: Any, found: Imported) -> None:
    """Note the elements of a list that a node returns."""
    result: Elements | None = None
    of_first = found.elements.get(_source(node.input[0])) if node.input else None
    match node.op:
        case "Identity":
            result = of_first
        case "TensorListReserve":
            result = Elements(None, _length(found, node.input[1]))
        case "EmptyTensorList":
            result = Elements(None, 0)
        case "TensorListFromTensor" if dims := found.known(node.input[0]).shape.dims:
            result = Elements(Shape(dims[1:]), dims[0])
        case "TensorListSetItem" if of_first is not None:
            resizes = node.attr["resize_if_index_out_of_bounds"].b
            item = Elements(found.known(node.input[2]).shape, None if resizes else of_first.length)
            result = _join_elements(of_first, item)
        case "TensorListPushBack" if of_first is not None:
            length = None if of_first.length is None else of_first.length + 1
            result = replace(_join_elements(of_first, Elements(found.known(node.input[1]).shape)), length=length)
        case "TensorListPopBack" if of_first is not None:
            result = replace(of_first, length=of_first.length - 1 if of_first.length else None)
        case "TensorListResize" if of_first is not None:
            result = replace(of_first, length=_length(found, node.input[1]))
    if result is not None:
        found.elements[node.name, 0] = result


def _length(found: Imported, reference: str) -> int | None:
    value = found.known(reference).value
    return None if value is None or np.ndim(value) else int(value)


def _taken_elements(node: Any, found: Imported) -> list[Known]:
    """Return what is known of the outputs of a node that reads a list."""
    elements = found.elements.get(_source(node.input[0]))
    if elements is None or elements.shape is None or elements.shape.dims is None:
        return []
    dims = elements.shape.dims
    match node.op:
        case "TensorListPopBack":
            return [Known(Shape(()), found.elements.get((node.name, 0))), Known(elements.shape)]
        case "TensorListStack":
            return [Known(Shape((elements.length, *dims)))]
        case "TensorListGather":
            indices = found.known(node.input[1]).shape.dims
            return [Known(Shape((indices[0] if indices else None, *dims)))]
    return [Known(elements.shape)]
