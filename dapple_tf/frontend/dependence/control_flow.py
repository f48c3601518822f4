"""Rules of ops that call functions: conditions, loops, nested functions, and the lists that loops fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tensorflow.core.framework import attr_value_pb2

from dapple_tf.frontend.dependence.elementwise import whole_size
from dapple_tf.frontend.dependence.kinds import SIZE, Form, Kind, coupled, shared
from dapple_tf.frontend.dependence.numbers import Numbers
from dapple_tf.frontend.dependence.scope import Layout, Scope
from dapple_tf.frontend.inference import chosen_branch
from dapple_tf.frontend.names import name_set
from dapple_tf.graph_passes.ir.graph import FunctionRef, Node, Opaque, Value


@dataclass(frozen=True)
class Output:
    """The kind of an output of a function, and its numbers and layout where these are known (see ``Scope``)."""

    kind: Kind
    numbers: Numbers | None = None
    layout: Layout | None = None

    def has_numbers(self, numbers: Numbers | None) -> bool:
        """Return whether the numbers are known and equal to these."""
        if self.numbers is None or numbers is None:
            return False
        return all(map(np.array_equal, self.numbers, numbers))


CallBody = Callable[[Scope, Node, str, Sequence[Kind]], list[Output]]
"""Returns the outputs of the function with this name, called with operands of these kinds."""

_MOST_ROUNDS = 8  # a loop variable's kind changes a few times at most


def join(first: Kind, second: Kind, node: str) -> Kind:
    """Return the kind of a value that is of either kind: in two branches, or before and after a round of a loop."""
    if first == second:
        return first
    trained, once = first.trained or second.trained, first.once or second.once
    if first.coupled or second.coupled:
        return first if first.coupled else second
    if first.form is Form.LIST and second.form is Form.LIST:
        if first.element is None or second.element is None:
            return first if second.element is None else second
        return dataclasses.replace(first, element=join(first.element, second.element, node), trained=trained)
    if first.shared and second.shared:
        return shared(trained=trained, once=once)
    aligned = first.rows and second.rows and first.axis == second.axis and first.slope == second.slope
    if aligned and (first.layout == second.layout or 0 in (first.outer, second.outer)):
        return dataclasses.replace(first if first.outer else second, trained=trained)
    if {first.form, second.form} == {Form.MEAN, Form.SHARED} or (first.form is second.form is Form.MEAN):
        return Kind(Form.MEAN, trained=trained)
    if first.form is second.form is Form.SUM:
        return Kind(Form.SUM, trained=trained, mixed=first.mixed or second.mixed)
    if {first.form, second.form} <= {Form.SIZE, Form.SHARED}:
        return dataclasses.replace(SIZE, trained=trained)
    return coupled(node, "gives samples in one case and something else in another", trained=trained)


def condition(scope: Scope, node: Node, kinds: Sequence[Kind], call_body: CallBody) -> list[Output]:
    """Return the outputs of a condition, which must be the same for all micro-batches."""
    decides, operands = kinds[0], kinds[1:]
    if decides.form is Form.SIZE:
        decides = whole_size(scope, node, 0)
    if decides.coupled:
        return [Output(decides)]
    if not decides.shared:
        return [Output(scope.couple(node, "decides by samples of the batch, so micro-batches may decide differently"))]
    branches = _branches(node)
    if not branches:
        return [Output(scope.couple(node, "is a condition whose branches cannot be read"))]
    decided = scope.number(node.inputs[0])
    if decided is not None:
        branches = [branches[chosen_branch(node.op, decided, len(branches))]]
    found, *others = (call_body(scope, node, name, operands) for name in branches)
    for other in others:
        found = [_join_outputs(one, another, node.name) for one, another in zip(found, other, strict=True)]
    return [dataclasses.replace(output, kind=_with(output.kind, decides)) for output in found]


def _join_outputs(one: Output, other: Output, node: str) -> Output:
    kind = join(one.kind, other.kind, node)
    same = one.has_numbers(other.numbers)
    return Output(kind, one.numbers if same else None, one.layout if one.layout == other.layout else None)


def _with(kind: Kind, decides: Kind) -> Kind:
    trained, once = kind.trained or decides.trained, kind.shared and (kind.once or decides.once)
    return dataclasses.replace(kind, trained=trained, once=once)


def _branches(node: Node) -> list[str]:
    """Return the names of the functions of a condition; the IR keeps a list of functions in serialized form."""
    listed = node.get("branches", ())
    if isinstance(listed, Opaque):
        return [function.name for function in attr_value_pb2.AttrValue.FromString(listed.data).list.func]
    found = [node.get(name, ()) for name in ("then_branch", "else_branch")]
    return [ref.name for ref in found if isinstance(ref, FunctionRef)]


def loop(scope: Scope, node: Node, kinds: Sequence[Kind], call_body: CallBody) -> list[Output]:
    """Return a loop's variables at its end; the number of rounds must not depend on samples."""
    cond, body = node.get("cond", ()), node.get("body", ())
    found = list(kinds)
    if not isinstance(cond, FunctionRef) or not isinstance(body, FunctionRef):
        return [Output(scope.couple(node, "is a loop whose body cannot be read"))]
    for _ in range(_MOST_ROUNDS):
        results = call_body(scope, node, body.name, found)
        after = [join(kind, result.kind, node.name) for kind, result in zip(found, results, strict=True)]
        if after == found:
            break
        found = after
    else:
        return [Output(scope.couple(node, "is a loop whose variables change how they depend on the batch"))]
    (goes_on,) = call_body(scope, node, cond.name, found)
    if not goes_on.kind.shared:
        why = "loops until samples of the batch meet a condition: for each micro-batch by itself"
        return [Output(scope.couple(node, why))]
    return [
        _end_of_loop(scope, value, kind, result)
        for value, kind, result in zip(node.inputs, found, results, strict=True)
    ]


def _end_of_loop(scope: Scope, value: Value, kind: Kind, result: Output) -> Output:
    """Return a loop variable; its numbers are known only if no round changes them. ``result``: of the last round."""
    if not result.has_numbers(scope.numbers.get(value)):
        return Output(kind)
    return Output(kind, result.numbers, scope.layouts.get(value))


def tensor_list(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
    """Return the kinds of an op on a TensorList."""
    if any(kind.coupled for kind in kinds):
        return next(kind for kind in kinds if kind.coupled)
    empty = Kind(Form.LIST)
    match node.op:
        case "TensorListReserve" | "EmptyTensorList":
            return empty
        case "TensorListFromTensor":
            if kinds[0].rows and kinds[0].axis == 0:
                return scope.couple(node, "makes a list of samples (a TensorArray or tf.map_fn over the batch)")
            element = kinds[0].at(kinds[0].axis - 1) if kinds[0].rows else kinds[0]
            return dataclasses.replace(empty, element=element)
        case "TensorListSetItem" | "TensorListPushBack":
            item = kinds[2] if node.op == "TensorListSetItem" else kinds[1]
            return join(kinds[0], dataclasses.replace(empty, element=item), node.name)
        case "TensorListGetItem":
            return kinds[0].element or shared()
        case "TensorListPopBack":
            return [kinds[0], kinds[0].element or shared()]
        case "TensorListStack":
            element = kinds[0].element or shared()
            return element.at(element.axis + 1) if element.rows else element
        case "TensorListConcatV2" | "TensorListConcat" | "TensorListGather":
            return scope.couple(node, "concatenates the elements of a TensorArray")
    return shared()  # lengths and element shapes


TENSOR_LISTS = name_set(
    "TensorListReserve EmptyTensorList TensorListFromTensor TensorListSetItem TensorListPushBack "
    "TensorListGetItem TensorListPopBack TensorListStack TensorListConcatV2 TensorListConcat TensorListGather "
    "TensorListLength TensorListElementShape TensorListResize"
)
