"""Find how a region uses positions of samples: to choose samples, which an experiment can try, or otherwise.

An experiment tries few samples. A function of their positions may be constant for these and change later, as where a
counter becomes a float that is compared with 1000.0, a text or a key of a table. So positions may only choose samples,
and be compared with known whole numbers, which the experiment then reaches.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2

from dapple_tf import internals
from dapple_tf.frontend.names import name_set

_FLOATS = frozenset({tf.float32, tf.float64})
_NARROW = frozenset({tf.int8, tf.uint8, tf.int16, tf.uint16, tf.float16, tf.bfloat16})
_ROUNDING = name_set("AsString Bitcast UnicodeEncode")
_KEEPING = name_set(
    "Identity IdentityN StopGradient EnsureShape Squeeze ExpandDims Pack Unpack ConcatV2 Split SplitV Transpose Range "
    "Add AddV2 Sub Neg Reverse ReverseV2 Shape ShapeN Size Prod Sum Max Min ZerosLike OnesLike BroadcastArgs "
    "LogicalAnd LogicalOr LogicalNot All Any Cast"
)
_COMPARING = name_set("Less LessEqual Greater GreaterEqual Equal NotEqual Maximum Minimum")
_SCALING = name_set("Mul FloorDiv FloorMod TruncateDiv TruncateMod Div Mod")
_CHOOSING = name_set("Select SelectV2")
_SIZES = name_set("Shape ShapeN Size TensorListLength")
_NUMBERING = name_set("Where Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 Cumsum TopKV2")  # samples, by data

# The operands that may be positions or lengths: they choose entries of the others, or give the result its shape.
_PLACES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("StridedSlice",), (1, 2, 3)),
    **dict.fromkeys(("Slice",), (1, 2)),
    **dict.fromkeys(("Gather", "GatherV2", "GatherNd", "TensorListGetItem"), (1,)),
    **dict.fromkeys(("TensorListSetItem", "TensorScatterUpdate", "TensorScatterAdd"), (1,)),
    **dict.fromkeys(("SegmentSum", "SegmentMax", "SegmentMin", "SegmentMean", "SegmentProd"), (1,)),
    **dict.fromkeys(("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"), (1, 2)),
    "ScatterNd": (0, 2),
    "CropAndResize": (2,),
    "Fill": (0,),
    **dict.fromkeys(("Reshape", "BroadcastTo", "Tile", "Pad", "PadV2"), (1,)),
    **dict.fromkeys(("TensorListReserve", "TensorListStack", "TensorListFromTensor", "TensorListResize"), (1,)),
    "EmptyTensorList": (0, 1),
}
_REPEATING = name_set("Fill Reshape BroadcastTo Tile")
_PICKING = name_set("StridedSlice Slice Gather GatherV2 GatherNd TensorListGetItem")


@dataclass(frozen=True)
class Flow:
    """Describe what a value is computed from.

    ``position``: it is computed of positions or numbers of samples. ``divisor``: it is a float of these, by which only
    samples may be divided. ``long``: its length depends on the number of samples. ``given``: it depends on other values
    than constants. ``largest``: the largest magnitude of its numbers, if these are constants; flows that differ in it
    alone are equal.
    """

    position: bool = False
    divisor: bool = False
    long: bool = False
    given: bool = False
    largest: int | None = field(default=None, compare=False)

    def __or__(self, other: Flow) -> Flow:
        """Return what flows into a value that is computed of both."""
        return Flow(
            self.position or other.position,
            self.divisor or other.divisor,
            self.long or other.long,
            self.given or other.given,
        )


@dataclass
class PositionUses:
    """Follows positions through nodes and the ``functions`` that these call.

    ``unknown``: positions are used otherwise than the module says. ``present``: there are positions. ``factor``: the
    product of the numbers by which they are multiplied or divided. ``reach``: the largest number that they may be
    compared with, beside the whole numbers of the nodes.
    """

    functions: Mapping[str, function_pb2.FunctionDef]
    unknown: bool = False
    present: bool = False
    factor: int = 1
    reach: int = 0
    _factors: dict[tuple[str, ...], int] = field(default_factory=dict)  # of each node, by the calls that lead to it
    _calls: tuple[str, ...] = ()

    def follow_all(self, nodes: Iterable[node_def_pb2.NodeDef], found: dict[str, list[Flow]]) -> None:
        """Add to ``found`` what flows into the outputs of the nodes; it has what flows into the values before them."""
        pending = list(nodes)
        while pending:
            left = []
            for node in pending:
                inputs = _data_inputs(node)
                if all(_name(text) in found for text in inputs):
                    found[node.name] = self._follow(node, [_flow(found, text) for text in inputs])
                else:
                    left.append(node)
            assert len(left) < len(pending), "no node is its own ancestor"
            pending = left

    def _follow(self, node: node_def_pb2.NodeDef, inputs: Sequence[Flow]) -> list[Flow]:
        """Return a flow for each output of a node; the last one stands for all further outputs."""
        if node.op in internals.CALL_OPS:
            return self._call(node, "f", inputs)
        if node.op in internals.CONDITION_OPS:
            return self._choose(node, inputs)
        if node.op in internals.LOOP_OPS:
            return self._loop(node, inputs)
        if node.op == "Const":
            return [constant_flow(tf.make_ndarray(node.attr["value"].tensor))]
        if node.op == "IdentityN":
            return list(inputs)
        return [self._compute(node, inputs)]

    def _compute(self, node: node_def_pb2.NodeDef, inputs: Sequence[Flow]) -> Flow:
        total = _join(inputs)
        if node.op in _SIZES:
            return Flow(position=total.long or total.position)
        if node.op in _NUMBERING and total.long:
            return replace(total, position=True)
        if total.divisor:
            return self._divide(node, inputs)
        if not total.position:
            return replace(total, long=not _picks_one(node) and (total.long or node.op == "TensorListPushBack"))
        self.present = True
        if node.op in _PLACES:
            return self._place(node, inputs)
        if node.op in _CHOOSING:
            return inputs[1] | inputs[2] | Flow(long=inputs[0].long)
        if node.op == "Cast" and tf.as_dtype(node.attr["DstT"].type) in _FLOATS:
            return replace(total, position=False, divisor=True)
        if node.op in _COMPARING:
            self.unknown |= any(each.given for each in inputs)
        elif node.op in _SCALING:
            self._scale(node, inputs)
        elif node.op not in _KEEPING or rounds(node):
            self.unknown = True
        return replace(total, long=total.long or node.op == "Range")

    def _divide(self, node: node_def_pb2.NodeDef, inputs: Sequence[Flow]) -> Flow:
        total = _join(inputs)
        if node.op == "Identity":
            return total
        divides = node.op in ("RealDiv", "DivNoNan") and inputs[0].given and not inputs[0].divisor
        self.unknown |= not divides
        return Flow(long=total.long, given=total.given)

    def _place(self, node: node_def_pb2.NodeDef, inputs: Sequence[Flow]) -> Flow:
        places = _PLACES[node.op]
        placed = _join(each for i, each in enumerate(inputs) if i in places)
        total = _join(each for i, each in enumerate(inputs) if i not in places)
        if node.op in _PICKING:
            self.unknown |= placed.position and not (total.long or total.position)
            return replace(total, long=placed.long if _picks_one(node) else total.long or placed.long)
        largest = inputs[1 - places[0]].largest if node.op in _REPEATING else None
        return replace(total, long=total.long or placed.long or placed.position, largest=largest)

    def _scale(self, node: node_def_pb2.NodeDef, inputs: Sequence[Flow]) -> None:
        site = (*self._calls, node.name)
        for each in inputs:
            if not each.position and each.largest is None:
                self.unknown = True
            elif not each.position and site not in self._factors:
                self._factors[site] = max(1, each.largest or 0)
                self.factor *= self._factors[site]
        self.unknown |= all(each.position for each in inputs)

    # --- Functions

    def _call(self, node: node_def_pb2.NodeDef, attribute: str, inputs: Sequence[Flow], index: int = 0) -> list[Flow]:
        """Return what flows out of the function that an attribute of a node names, or the one with this index there."""
        value = node.attr[attribute]
        body = self.functions[value.list.func[index].name if value.list.func else value.func.name]
        found = {arg.name: [flow] for arg, flow in zip(body.signature.input_arg, inputs, strict=True)}
        calls = self._calls
        self._calls = (*calls, node.name, attribute, str(index))
        self.follow_all(body.node_def, found)
        self._calls = calls
        return [_flow(found, body.ret[output.name]) for output in body.signature.output_arg]

    def _choose(self, node: node_def_pb2.NodeDef, inputs: Sequence[Flow]) -> list[Flow]:
        branches = [("branches", index) for index in range(len(node.attr["branches"].list.func))]
        branches = branches or [("then_branch", 0), ("else_branch", 0)]
        found, *others = (self._call(node, attribute, inputs[1:], index) for attribute, index in branches)
        for other in others:
            found = [one | another for one, another in zip(found, other, strict=True)]
        return found

    def _loop(self, node: node_def_pb2.NodeDef, inputs: Sequence[Flow]) -> list[Flow]:
        kept = _kept(self.functions[node.attr["body"].func.name])
        flows = [flow if keeps else replace(flow, largest=None) for flow, keeps in zip(inputs, kept, strict=True)]
        flows, goes_on = self._rounds(node, flows)
        if goes_on.position:
            counters = [not keeps and not flow.given for flow, keeps in zip(flows, kept, strict=True)]
            flows = [
                replace(flow, position=flow.position or counts) for flow, counts in zip(flows, counters, strict=True)
            ]
            flows, _ = self._rounds(node, flows)
        return flows

    def _rounds(self, node: node_def_pb2.NodeDef, flows: list[Flow]) -> tuple[list[Flow], Flow]:
        """Return what flows into the variables of a loop after any number of rounds, and into its condition."""
        while True:
            (goes_on,) = self._call(node, "cond", flows)
            after = [one | other for one, other in zip(flows, self._call(node, "body", flows), strict=True)]
            if after == flows:
                return flows, goes_on
            flows = [
                replace(now, largest=before.largest) if now == before else now
                for before, now in zip(flows, after, strict=True)
            ]


def _flow(found: Mapping[str, Sequence[Flow]], text: str) -> Flow:
    """Return what flows into the value that an input names: ``node``, ``node:index`` or ``node:output:index``."""
    node, _, place = text.partition(":")
    return found[node][min(int(place.rpartition(":")[2] or 0), len(found[node]) - 1)]


def _join(flows: Iterable[Flow]) -> Flow:
    """Return what flows into a value that is computed of all these."""
    return functools.reduce(operator.or_, flows, Flow())


def rounds(node: node_def_pb2.NodeDef) -> bool:
    """Return whether a node makes texts or narrow numbers of integers: what holds for few positions need not later."""
    if node.op != "Cast":
        return node.op in _ROUNDING
    taken, made = (tf.as_dtype(node.attr[name].type) for name in ("SrcT", "DstT"))
    return taken.is_integer and taken not in _NARROW and made in _NARROW


def constant_flow(value: Any) -> Flow:
    """Return what flows into a constant with this NumPy value."""
    largest = int(np.max(np.abs(value.astype(np.float64)), initial=0.0)) if value.dtype.kind in "iu" else None
    return Flow(largest=largest)


def _picks_one(node: node_def_pb2.NodeDef) -> bool:
    """Return whether the result is of one sample: its length is not that of the samples."""
    if node.op == "StridedSlice":
        return bool(node.attr["shrink_axis_mask"].i & 1)
    return node.op in ("TensorListGetItem", "Gather", "GatherV2", "GatherNd")


def _kept(body: function_pb2.FunctionDef) -> list[bool]:
    """Return for each variable of a loop whether all rounds leave it as it is."""
    sources = {node.name: _name(node.input[0]) for node in body.node_def if node.op == "Identity"}
    found = []
    for arg, output in zip(body.signature.input_arg, body.signature.output_arg, strict=True):
        name = _name(body.ret[output.name])
        while name in sources:
            name = sources[name]
        found.append(name == arg.name)
    return found


def _data_inputs(node: node_def_pb2.NodeDef) -> list[str]:
    return [text for text in node.input if not text.startswith("^")]


def _name(text: str) -> str:
    return text.partition(":")[0]
