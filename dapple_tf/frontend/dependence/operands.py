"""Rules for ops that move, repeat or join entries: tell data operands from sizes and axes, and combine their kinds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from dapple_tf.frontend.dependence.elementwise import add_totals, is_integer, whole_size
from dapple_tf.frontend.dependence.kinds import SIZE, Form, Kind, rows, shared
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.graph_passes.ir.graph import Node

Rule = Callable[[Scope, Node, Sequence[Kind]], Kind | list[Kind]]


def rule_of_each(ops: Mapping[Rule, str]) -> Mapping[str, Rule]:
    """Return the rule of each op; ``ops``: the ops of each rule, separated by spaces."""
    return MappingProxyType({op: rule for rule, names in ops.items() for op in names.split()})


ALL = sys.maxsize
"""For ``data_operands``: all operands are data, none is a size or an axis. More than any op has operands."""

CONSTANT_ROWS = 0
"""``outer`` of rows that are all equal, such as zeros of the batch's size: they fit rows in any order."""


def data_operands(count: int | None = 1) -> Callable[[Rule], Rule]:
    """Turn a rule for rows into one for all kinds: the first ``count`` operands are data, the others sizes or axes.

    None: all operands but the last are data. Shared operands give a shared result; sums and means stay what they are,
    since the op is linear.
    """

    def wrap(rule: Rule) -> Rule:
        def full(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
            data = list(kinds[:count] if count is not None else kinds[:-1])
            if any(kind.rows or kind.total for kind in kinds[len(data) :]):
                return scope.couple(node, f"chooses entries by data of the batch ({node.op})")
            if any(kind.rows for kind in data):
                if any(kind.total for kind in kinds):
                    return scope.couple(node, f"combines samples with a sum or mean over the batch ({node.op})")
                return rule(scope, node, kinds)
            if any(kind.total or kind.form is Form.ROW_BOUNDS for kind in data):
                if any(kind.form is Form.SIZE for kind in kinds):
                    return scope.couple(node, f"repeats or cuts a sum or mean by the micro-batch's size ({node.op})")
                if node.op == "PadV2":
                    return scope.couple(node, "pads a sum or mean over the batch with a constant")
                return add_totals(scope, node, data) if len(data) > 1 else data[0]
            if any(kind.form is Form.SIZE for kind in kinds[len(data) :]):
                data = [whole_number(scope, node, i, kind) for i, kind in enumerate(data)]
                if (stopped := next((kind for kind in data if kind.coupled), None)) is not None:
                    return stopped
            if any(kind.form is Form.SIZE for kind in kinds):
                return equal_rows(scope, node) if all(kind.shared for kind in data) else SIZE
            return shared()

        return full

    return wrap


def whole_number(scope: Scope, node: Node, operand: int, kind: Kind) -> Kind:
    """Return the kind of an operand whose entries are repeated: of a number made of the batch's size, the whole's."""
    number = kind.form is Form.SIZE and not is_integer(scope.graph.type_of(node.inputs[operand]))
    return whole_size(scope, node, operand) if number else kind


def equal_rows(scope: Scope, node: Node) -> Kind:
    """Return the kind of equal rows, made of shared values and a size."""
    found = scope.lengths(node.inputs[0 if node.op == "Fill" else 1])
    why = f"makes a tensor whose batch axis cannot be inferred ({node.op})"
    if found is None or node.op not in ("Fill", "BroadcastTo", "Tile"):
        return scope.couple(node, why)
    lengths, varies = found
    axes = [axis for axis in range(len(lengths)) if varies[axis]]
    if len(axes) != 1:
        return scope.couple(node, why)
    if node.op != "Fill":  # an axis of several entries would repeat these in turn
        dims = scope.dims(node.inputs[0])
        axis = axes[0] - (len(lengths) - len(dims or ()))
        if dims is None or (axis >= 0 and dims[axis] != 1):
            return scope.couple(node, why)
    return rows(axes[0], CONSTANT_ROWS, int(lengths[axes[0]]) // scope.batch)
