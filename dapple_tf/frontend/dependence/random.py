"""Rules of random draws: a stateless draw with a batch axis gives rows of the whole batch's draw."""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf.frontend.dependence.elementwise import PAIRS_SHARED
from dapple_tf.frontend.dependence.kinds import Form, Kind, rows, shared
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.frontend.draw_layouts import DRAW_INPUTS, ROW_PARAMETERS
from dapple_tf.graph_passes.ir.graph import Node, Value

_PREFIX = "Stateless"
_DISTRIBUTIONS = ("Random", "Truncated", "Parameterized", "Multinomial", "Binomial", "Gamma", "Poisson", "Shuffle")
SEED_OPS = frozenset({"StatelessRandomGetKeyCounter", "StatelessRandomGetAlg", "StatelessRandomGetKeyCounterAlg"})


def is_stateless_draw(op: str) -> bool:
    """Return whether the op draws numbers from the seed, or the key and counter, that it is given."""
    return op.startswith(_PREFIX) and op not in SEED_OPS and any(word in op for word in _DISTRIBUTIONS)


def rows_of_draw(scope: Scope, node: Node, axis: int, factor: int) -> tuple[int, int]:
    """Return the ``outer`` and ``inner`` of a draw of ``factor`` numbers for each sample along ``axis``.

    They are those of the shape that was drawn for. Where that is a number of rows (``[2 * n, 3]``), any order is as
    good as another, as long as all uses keep to it: the rows of a sample are drawn one after the other, or in blocks of
    the batch for the draws in ``scope.blocks``.
    """
    known = scope.layouts.get(node.inputs[0])
    layout = known[axis] if known is not None and axis < len(known) else None
    if layout is not None and layout[0] * layout[1] == factor:
        return layout
    if factor != 1:
        scope.open_draws[node.name] = factor
    return (factor, 1) if node.name in scope.blocks else (1, factor)


def stateless_draw(scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a stateless draw: rows where its shape has the batch's size."""
    shape, seeds = kinds[0], kinds[1:]
    if any(not kind.shared for kind in seeds):
        return scope.couple(node, "draws random numbers from a seed or with parameters that depend on samples")
    if shape.shared:
        return shared()
    if shape.form is not Form.SIZE:
        return scope.couple(node, "draws random numbers for the samples by an op that micro-batches cannot repeat")
    axes = scope.batch_axes(Value(node.name))
    if (lengths := scope.lengths(node.inputs[0])) is not None:  # known also where TensorFlow does not infer the shape
        axes = [(axis, int(lengths[0][axis]) // scope.batch) for axis, varies in enumerate(lengths[1]) if varies]
    if len(axes) != 1 or (node.inputs[0] in scope.numbers and lengths is None):
        return scope.couple(node, "draws random numbers in a shape that cannot be inferred")
    axis, factor = axes[0]
    outer, inner = rows_of_draw(scope, node, axis, factor)
    parameters = zip(DRAW_INPUTS.get(node.op, ()), node.inputs, strict=False)
    behind = axis - (scope.rank(Value(node.name)) or 0)
    if not all(scope.repeats(value, behind) for name, value in parameters if name in ROW_PARAMETERS):
        return scope.couple(node, PAIRS_SHARED)
    return rows(axis, outer, inner)
