"""Rules of ops that call functions: conditions, loops, nested functions, and the lists that loops fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tensorflow.core.framework import attr_value_pb2

from dapple_tf.frontend.dependence.elementwise import whole_size
from dapple_tf.frontend.dependence.kinds import SIZE, Form, Kind, coupled, shared
from dapple_tf.frontend.dependence.scope import Scope, attr, op_names
from graph_passes.ir.graph import FunctionRef, Node, Opaque

CallBody = Callable[[Scope, Node, str, Sequence[Kind]], list[Kind]]
"""Returns the kinds of the outputs of the function with this name, called with operands of these kinds."""

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
CONDITIONS = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
LOOPS = frozenset({"While", "StatelessWhile"})

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


def condition(scope: Scope, node: Node, kinds: Sequence[Kind], call_body: CallBody) -> list[Kind]:
    """Return the kinds of a condition's outputs; the condition must be the same for all micro-batches."""
    decides, operands = kinds[0], kinds[1:]
    if decides.form is Form.SIZE:
        decides = whole_size(scope, node, 0)
    if decides.coupled:
        return [decides]
    if not decides.shared:
        return [scope.couple(node, "decides by samples of the batch, so micro-batches may decide differently")]
    found: list[Kind] | None = None
    for name in _branches(node):
        branch = call_body(scope, node, name, operands)
        found = branch if found is None else [join(a, b, node.name) for a, b in zip(found, branch, strict=True)]
    if found is None:
        return [scope.couple(node, "is a condition whose branches cannot be read")]
    return [_with(kind, decides) for kind in found]


def _with(kind: Kind, decides: Kind) -> Kind:
    trained, once = kind.trained or decides.trained, kind.shared and (kind.once or decides.once)
    return dataclasses.replace(kind, trained=trained, once=once)


def _branches(node: Node) -> list[str]:
    """Return the names of the functions of a condition; the IR keeps a list of functions in serialized form."""
    listed = attr(node, "branches", ())
    if isinstance(listed, Opaque):
        return [function.name for function in attr_value_pb2.AttrValue.FromString(listed.data).list.func]
    found = [attr(node, name, ()) for name in ("then_branch", "else_branch")]
    return [ref.name for ref in found if isinstance(ref, FunctionRef)]


def loop(scope: Scope, node: Node, kinds: Sequence[Kind], call_body: CallBody) -> list[Kind]:
    """Return the kinds of a loop's variables at its end; the number of rounds must not depend on samples."""
    cond, body = attr(node, "cond", ()), attr(node, "body", ())
    found = list(kinds)
    if not isinstance(cond, FunctionRef) or not isinstance(body, FunctionRef):
        return [scope.couple(node, "is a loop whose body cannot be read")]
    for _ in range(_MOST_ROUNDS):
        after = [join(a, b, node.name) for a, b in zip(found, call_body(scope, node, body.name, found), strict=True)]
        if after == found:
            break
        found = after
    else:
        return [scope.couple(node, "is a loop whose variables change how they depend on the batch")]
    (goes_on,) = call_body(scope, node, cond.name, found)
    if not goes_on.shared:
        return [scope.couple(node, "loops until samples of the batch meet a condition: for each micro-batch by itself")]
    return found


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


TENSOR_LISTS = op_names(
    "TensorListReserve EmptyTensorList TensorListFromTensor TensorListSetItem TensorListPushBack "
    "TensorListGetItem TensorListPopBack TensorListStack TensorListConcatV2 TensorListConcat TensorListGather "
    "TensorListLength TensorListElementShape TensorListResize"
)
