"""Rules for ops that move, repeat or join entries: tell data operands from sizes and axes, and combine their kinds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from dapple_tf.frontend.dependence.elementwise import add_totals
from dapple_tf.frontend.dependence.kinds import SIZE, Form, Kind, rows, shared
from dapple_tf.frontend.dependence.scope import Scope
from graph_passes.ir.graph import Node, Value

Rule = Callable[[Scope, Node, Sequence[Kind]], Kind | list[Kind]]


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
            if any(kind.rows for kind in kinds[len(data) :]):
                return scope.couple(node, f"chooses entries by data of the batch ({node.op})")
            if any(kind.rows for kind in data):
                if any(kind.total for kind in kinds):
                    return scope.couple(node, f"combines samples with a sum or mean over the batch ({node.op})")
                return rule(scope, node, kinds)
            if any(kind.total or kind.form is Form.SHARE for kind in data):
                return add_totals(scope, node, data) if len(data) > 1 else data[0]
            if any(kind.form is Form.SIZE for kind in kinds):
                return equal_rows(scope, node) if all(kind.shared for kind in data) else SIZE
            return shared()

        return full

    return wrap


def equal_rows(scope: Scope, node: Node) -> Kind:
    """Return the kind of equal rows, made of shared values and a size."""
    lengths = scope.number(node.inputs[0 if node.op == "Fill" else 1])
    if node.op in ("Fill", "BroadcastTo", "Reshape") and lengths is not None:
        axes = [(i, int(n) // scope.batch) for i, n in enumerate(lengths) if n > 0 and n % scope.batch == 0]
    else:
        axes = scope.batch_axes(Value(node.name))
    if len(axes) != 1:
        return scope.couple(node, f"makes a tensor whose batch axis cannot be inferred ({node.op})")
    return rows(axes[0][0], CONSTANT_ROWS, axes[0][1])


def only_rows(kinds: Sequence[Kind]) -> list[Kind]:
    """Return the kinds that are rows."""
    return [kind for kind in kinds if kind.rows]
