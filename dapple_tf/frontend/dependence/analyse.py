"""Find the kind of every tensor of a captured loss; see ``kinds``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from dapple_tf import internals
from dapple_tf.frontend.dependence import contract, control_flow, elementwise, layout, pick, random, slicing
from dapple_tf.frontend.dependence.custom_gradients import check_gradient, has_custom_gradient
from dapple_tf.frontend.dependence.kinds import CONSTANT, SIZE, Form, Kind, coupled, rows, shared
from dapple_tf.frontend.dependence.numbers import varies
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.frontend.dependence.size_numbers import evaluate_sizes
from dapple_tf.frontend.dependence.undecided import Experiments
from dapple_tf.frontend.inference import Body, Shapes, infer_body
from dapple_tf.frontend.names import name_set
from dapple_tf.graph_passes.analysis.layers import SHAPE_OPS
from dapple_tf.graph_passes.ir.graph import Effect, FunctionRef, Graph, Node, Shape, Value, ancestors

_RULES = {
    **layout.RULES,
    **slicing.RULES,
    **contract.RULES,
    **pick.RULES,
    **dict.fromkeys(elementwise.ELEMENTWISE, elementwise.elementwise),
}
# Ops whose rules say what an operand made of sizes of the micro-batch means; most ops combine sizes to a size.
_TAKE_SIZES = (
    elementwise.ELEMENTWISE
    | {*layout.RULES, *slicing.RULES}
    | name_set(
        "GatherV2 Gather GatherNd ScatterNd OneHot Sum Prod Max Min Mean All Any Conv2DBackpropInput "
        "Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput AvgPoolGrad AvgPool3DGrad UnsortedSegmentSum "
        "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd RaggedTensorToTensor SparseToDense "
        "SparseTensorDenseMatMul"
    )
)
_READS = frozenset({"ReadVariableOp", "VariableShape", "VarIsInitializedOp"})
RULED = frozenset(
    {*_RULES, *_READS, *SHAPE_OPS, "Const", "IdentityN", *internals.CALLING_OPS, *control_flow.TENSOR_LISTS}
)
"""Ops that have a rule. Draws have rules too: see ``random.is_stateless_draw``."""

BATCH_NORM = "normalises by the mean and variance of its micro-batch, as batch norm in training mode does"


# Ops that are not tried, since their rules say all, except where they give integers: these may be indices that a later
# op turns into rows.
_DECIDED = internals.CONDITION_OPS | name_set(
    "All Any ArgMax ArgMin BatchMatMul BatchMatMulV2 BatchMatMulV3 Cumprod Cumsum CumulativeLogsumexp Einsum "
    "EuclideanNorm L2Loss LogSoftmax MatMul Max Mean Min Prod Softmax Sum"
)


ShapesAt = Callable[[int], Shapes]
"""A function of a batch size: returns the shapes of the outputs of all nodes at that size."""


@dataclass
class Analysis:
    """The kinds of all values of a graph, and what was found on the way.

    ``value_of``: returns the value of a tensor of ``func_graph``. ``trainable``: names of the trained variables.
    ``once_written``: variables of which every write is known not to depend on the batch. ``written``: all variables
    that forward writes. ``batch``: the batch size for which shapes were inferred; ``shapes_at`` infers them for
    another. ``divided``: calls of batch norm layers of which every statistic is the micro-batch's, also the count of a
    mask, which does not depend on trained variables. ``blocks``: see ``Scope``; ``disordered``: draws whose order was
    found not to fit, and that may be in blocks. ``live``: the nodes that forward runs. ``batch_norms``: layers that
    normalise by the micro-batch, which is a documented exception. ``hidden_draws``: nodes that draw from a generator's
    hidden state. ``combined``: values in which samples are combined, and which must be computed from the whole batch.
    ``partials``: the nodes of those whose values on disjoint rows can be combined, and the operation that does it (see
    ``COMBINES``). ``experiments``: decide what no rule does, if there are any; ``decided``: the nodes, by name, and the
    forms that were found. ``waits``: what is computed from undecided tensors is not taken for a statistic of the whole
    batch, since an op that uses it may be decided.
    """

    func_graph: Any
    value_of: Callable[[Any], Value]
    trainable: Collection[str]
    written: Collection[str]
    once_written: Collection[str]
    batch: int
    shapes_at: ShapesAt
    experiments: Experiments | None
    waits: bool = False
    divided: frozenset[int] = frozenset()
    blocks: frozenset[str] = frozenset()
    live: Set[str] = frozenset()
    batch_norms: list[str] = field(default_factory=list)
    hidden_draws: list[Node] = field(default_factory=list)
    combined: set[Value] = field(default_factory=set)
    partials: dict[str, str] = field(default_factory=dict)
    decided: dict[str, tuple[Node, tuple[Form, ...]]] = field(default_factory=dict)
    disordered: set[str] = field(default_factory=set)
    _trained_norms: set[int] = field(default_factory=set)
    _whole_norms: set[int] = field(default_factory=set)
    _reductions: int = 0  # of floats over the batch, in bodies
    _couples_unused: bool = False  # samples were combined in a tensor that only a gradient may use
    _owner: Any = None  # the FuncGraph of the body that is being looked at

    def run(self, graph: Graph, shapes: Shapes, whole: frozenset[Value]) -> Scope:
        """Return the kinds of all values of ``graph``; ``whole``: see ``Scope``."""
        scope = Scope(graph, shapes, self.batch, whole=whole, blocks=self.blocks, shapes_at=self.shapes_at)
        for node in graph.nodes:
            self._visit(scope, node)
        return scope

    @property
    def mixed_norms(self) -> frozenset[int]:
        """The batch norm calls that have statistics of the micro-batch, and others of the whole batch."""
        return frozenset(self._trained_norms & self._whole_norms)

    def _visit(self, scope: Scope, node: Node) -> None:
        if node.op in ("arg", "variable", "capture", "rows") and not scope.nested:
            for value in node.values():
                scope.kinds[value] = self._input_kind(node)
            return
        if node.op == "arg":  # an argument of a function: its kind was set by _call_body
            return
        kinds = [scope.kinds.get(value, CONSTANT) for value in node.inputs]
        evaluate_sizes(scope, node)
        _note_positional(scope, node, kinds)
        found = self._find(scope, node, kinds)
        first = found if isinstance(found, list) else [found]  # the last one stands for all further outputs
        results = [*first, *(first[-1:] or [CONSTANT]) * len(node.outputs)][: len(node.outputs)]
        if any(kind.coupled and kind.node == node.name for kind in results):
            self.disordered |= _disordered_draws(scope, node, kinds)
        results = self._try_undecided(scope, node, kinds, results)
        for value, kind in zip(node.values(), results, strict=False):
            scope.kinds[value] = self._complete(scope, node, value, kind, kinds)
            self._couples_unused |= kind.coupled and not scope.nested and node.name not in self.live
        if not scope.nested and any(map(_of_whole_batch, map(scope.kinds.__getitem__, node.values()))):
            self._take_rows(scope, node, kinds)

    def _input_kind(self, node: Node) -> Kind:
        match node.op:
            case "arg":
                return rows()
            case "rows":
                return Kind(Form.ROW_BOUNDS)
            case "variable":
                return shared(trained=node.name in self.trainable)
        return CONSTANT

    def _find(self, scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
        """Return the kinds of a node's outputs, before ``_complete``."""
        if node.op == "Const" or not node.outputs:
            return CONSTANT
        if node.op == "IdentityN":
            return self._identity(scope, node, kinds)
        if node.op in _READS:
            return self._read(node, kinds)
        if node.effect is Effect.RANDOM:
            return self._hidden_draw(scope, node, kinds)
        if node.op in internals.CALLING_OPS or not internals.is_op(node.op):
            return self._call(scope, node, kinds)
        if node.op in control_flow.TENSOR_LISTS:
            return control_flow.tensor_list(scope, node, kinds)
        # What is computed from a coupled tensor is coupled too, except its shape.
        stopped = next((kind for kind in kinds if kind.coupled or kind.form is Form.LIST), None)
        if stopped is not None and node.op not in SHAPE_OPS:
            return stopped
        if random.is_stateless_draw(node.op):
            found = random.stateless_draw(scope, node, kinds)
            if scope.nested and found.rows:
                why = "draws random numbers for samples inside a nested function or loop: draw before it, or unroll it"
                return scope.couple(node, why)
            return found
        rule = _RULES.get(node.op)
        if any(kind.form is Form.SIZE for kind in kinds) and node.op not in _TAKE_SIZES:
            if all(kind.form is Form.SIZE or kind.shared for kind in kinds) and all(map(scope.fixed, node.values())):
                return SIZE
            return scope.couple(node, f"takes the size of the micro-batch as an argument of {node.op}")
        if rule is not None:
            return rule(scope, node, kinds)
        if all(kind.shared for kind in kinds):
            return shared()
        return scope.couple(node, f"applies {node.op}, which is not known to treat samples one by one")

    def _try_undecided(self, scope: Scope, node: Node, kinds: Sequence[Kind], found: Sequence[Kind]) -> list[Kind]:
        """Return the kinds ``found`` of a node's outputs, with the result of an experiment for those undecided."""
        if _may_be_undecided(scope, node, kinds):
            found = [dataclasses.replace(k, undecided=True) if k.coupled and k.node == node.name else k for k in found]
        undecided = [value for value, kind in zip(node.values(), found, strict=True) if kind.undecided]
        once = bool(undecided) and not scope.nested and self._runs_once(scope, node, kinds, undecided)
        if self.experiments is None or not undecided or once:
            return list(found)
        tried = self.experiments.decide(scope, node)
        scope.tried |= {value for value, kind in zip(node.values(), tried, strict=True) if kind}
        if any(tried):
            self.decided[node.name] = (node, tuple(dict.fromkeys(kind.form for kind in tried if kind)))
        return [new if new and old.undecided else old for old, new in zip(found, tried, strict=True)]

    def _identity(self, scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind | list[Kind]:
        own = has_custom_gradient(node) and not scope.nested
        of_trace = self.func_graph, self.value_of, self._kinds_of_body
        if own and not check_gradient(scope, node, kinds, *of_trace, unused=self._couples_unused):
            return scope.couple(node, "has a custom gradient that combines samples, or is not linear in a sum")
        return list(kinds)

    def _read(self, node: Node, kinds: Sequence[Kind]) -> Kind:
        name = node.inputs[0].node
        if node.op == "ReadVariableOp" and name in self.written:
            if name in self.once_written:
                return dataclasses.replace(kinds[0], once=True)
            return coupled(node.name, f"reads {name}, which each micro-batch writes", trained=True)
        return kinds[0] if node.op == "ReadVariableOp" else CONSTANT

    def _hidden_draw(self, scope: Scope, node: Node, kinds: Sequence[Kind]) -> Kind:
        self.hidden_draws.append(node)
        axes = scope.batch_axes(Value(node.name))
        if node.op == "RandomShuffle" or any(not kind.shared and kind.form is not Form.SIZE for kind in kinds):
            why = "draws random numbers with parameters that depend on samples"
            return dataclasses.replace(scope.couple(node, why), trained=True)  # no two stages draw the same
        if not axes:
            return shared(once=True)
        axis, factor = axes[0]
        return rows(axis, *random.rows_of_draw(scope, node, axis, factor), trained=True)

    def _call(self, scope: Scope, node: Node, kinds: Sequence[Kind]) -> list[Kind]:
        """Return the kinds of the outputs of an op that calls functions, and note their numbers and layouts."""
        if node.op in internals.CONDITION_OPS:
            results = control_flow.condition(scope, node, kinds, self._call_body)
        elif node.op in internals.LOOP_OPS:
            reductions = self._reductions
            results = control_flow.loop(scope, node, kinds, self._call_body)
            if self._reductions > reductions:
                scope.reducing.add(node.name)
        else:  # an old-style call has the name of the function
            function = dict(node.attrs)["f"] if node.op in internals.CALL_OPS else FunctionRef(node.op)
            results = self._call_body(scope, node, function.name, kinds)  # type: ignore[union-attr]
        for value, result in zip(node.values(), results, strict=False):
            if result.numbers is not None:
                scope.numbers[value] = result.numbers
            if result.layout is not None:
                scope.layouts[value] = result.layout
        return [result.kind for result in results]

    def _call_body(self, scope: Scope, node: Node, name: str, operands: Sequence[Kind]) -> list[control_flow.Output]:
        """Return the outputs of the function ``name``; ``operands``: the kinds of the last inputs of ``node``."""
        values = node.inputs[len(node.inputs) - len(operands) :]
        body = scope.shapes.bodies.get((node.name, name))
        if body is None:  # the op was refused in shape inference
            owner = self._owner if scope.nested else self.func_graph
            dims = [Shape(scope.dims(value)) for value in values]
            kept = node.op not in internals.LOOP_OPS
            body = infer_body(internals.function_graph(owner, name), dims, kept=kept)
        inner = Scope(body.graph, body.shapes, self.batch, nested=True)
        inner.shapes_at = lambda samples: scope.shapes_at(samples).of_body(node.name, name)
        for i, (argument, value) in enumerate(zip(body.graph.inputs, values, strict=True)):
            if i in body.kept and value in scope.numbers:
                inner.numbers[Value(argument)] = scope.numbers[value]
            if i in body.kept and value in scope.layouts:
                inner.layouts[Value(argument)] = scope.layouts[value]
        self._visit_body(inner, body, operands)
        kinds = [_kind_in_caller(inner, node, value) for value in body.graph.outputs]
        if not scope.nested and self._repeatable(node, [scope.kinds[value] for value in node.inputs]):
            kinds = [dataclasses.replace(kind, trained=False) if kind.coupled else kind for kind in kinds]
        return [
            control_flow.Output(kind, inner.numbers.get(value), inner.layouts.get(value))
            for kind, value in zip(kinds, body.graph.outputs, strict=True)
        ]

    def _take_rows(self, scope: Scope, node: Node, kinds: Sequence[Kind]) -> None:
        """Let micro-batches take their rows of results that combine samples, and depend on no trained variable.

        The node then runs once, on the whole batch: all its results that have a row for each sample are sliced.
        """
        if not self._repeatable(node, kinds):
            return
        own = [value for value in node.values() if _has_own_rows(scope, value)]
        others = [scope.kinds[value] for value in node.values() if value not in own]
        if any(_of_whole_batch(scope.kinds[value]) for value in own) and not any(kind.rows for kind in others):
            scope.sliced.update(own)
            scope.kinds.update(dict.fromkeys(own, rows()))
            self.combined.difference_update(own)

    def _runs_once(self, scope: Scope, node: Node, kinds: Sequence[Kind], values: Sequence[Value]) -> bool:
        """Return whether these results of a node can be computed once, on the whole batch: no experiment is needed."""
        known = (scope.fixed(value) or _has_own_rows(scope, value) for value in values)
        return self._repeatable(node, kinds) and all(known)

    def _repeatable(self, node: Node, kinds: Sequence[Kind]) -> bool:
        """Return whether a node can run once on the whole batch, in each stage that uses it, with equal results."""
        reads = node.effect is Effect.PURE or (node.effect is Effect.READ and node.op != "ReadVariableOp")
        inputs = all(not kind.trained and kind.form is not Form.ROW_BOUNDS for kind in kinds)
        return reads and inputs and not self._takes_changing(node)

    def _takes_changing(self, node: Node) -> bool:
        """Return whether a node takes a variable that is written otherwise than once a step."""
        return any(value.node in self.written and value.node not in self.once_written for value in node.inputs)

    def _kinds_of_body(self, body: Body, operands: Sequence[Kind]) -> list[Kind]:
        inner = Scope(body.graph, body.shapes, self.batch, nested=True)
        self._visit_body(inner, body, operands)
        return [inner.kinds.get(value, CONSTANT) for value in body.graph.outputs]

    def _visit_body(self, inner: Scope, body: Body, operands: Sequence[Kind]) -> None:
        """Find the kinds of the values of a function's body, whose scope is ``inner``."""
        for argument, kind in zip(body.graph.inputs, operands, strict=True):
            inner.kinds[Value(argument)] = kind
        before, self._owner = self._owner, body.func_graph
        for inside in body.graph.nodes:
            self._visit(inner, inside)
            if inside.op in contract.REDUCTIONS and inside.outputs[0].dtype.differentiable:
                self._reductions += contract.reduces_batch_axis(inner, inside, inner.kinds[inside.inputs[0]])
        self._owner = before

    def _complete(self, scope: Scope, node: Node, value: Value, kind: Kind, kinds: Sequence[Kind]) -> Kind:
        """Return ``kind`` with what follows from the operands: ``trained``, ``once``, or that it is batch norm's."""
        if node.op in SHAPE_OPS:
            return kind
        changing = node.effect is Effect.READ and not scope.nested and self._takes_changing(node)
        trained = kind.trained or changing or any(operand.trained for operand in kinds)
        if kind.form is Form.SIZE and value in scope.numbers:
            return dataclasses.replace(kind, trained=False) if varies(scope.numbers[value]) else CONSTANT
        if node.has("batch_norm") and any(operand.coupled and not operand.documented for operand in kinds):
            return dataclasses.replace(kind, trained=trained)  # what comes before batch norm combined samples
        if node.has("batch_norm") and (kind.coupled or kind.total):
            call = node.integer("batch_norm")
            if trained or call in self.divided:
                self._trained_norms.add(call)
                return self._batch_norm(scope, node, value)
            self._whole_norms.add(call)
        if kind.coupled and kind.documented:
            return kind
        weighted = any(operand.form is Form.ROW_BOUNDS for operand in kinds)  # a weighted term: one in each micro-batch
        # Another output may hold rows of samples, and a later op may make rows of both.
        waits = self.waits and kind.undecided and (len(node.outputs) > 1 or kind.node != node.name)
        fixed = kind.coupled and not waits and scope.fixed(value) and not scope.graph.type_of(value).dtype.handle
        if (kind.total or fixed) and not trained and not weighted and scope.knows_shapes(value):
            if scope.nested:
                return coupled(node.name, "reduces the batch inside a nested function or loop", trained=True)
            self.combined.add(value)
            self._note_partial(scope, node, kind, kinds)
            return shared(once=True)
        if kind.shared:
            once = kind.once or any(operand.once for operand in kinds if operand.shared)
            return dataclasses.replace(kind, trained=trained, once=once)
        return dataclasses.replace(kind, trained=trained)

    def _note_partial(self, scope: Scope, node: Node, kind: Kind, kinds: Sequence[Kind]) -> None:
        """Note the operation that combines the node's values on disjoint rows, if there is one."""
        if len(node.outputs) > 1:
            return
        if kind.form is Form.SUM and not kind.mixed:
            self.partials[node.name] = "sum"
        elif node.op in contract.COMBINED_BY and contract.reduces_batch_axis(scope, node, kinds[0]):
            self.partials[node.name] = contract.COMBINED_BY[node.op]

    def _batch_norm(self, scope: Scope, node: Node, value: Value) -> Kind:
        """Return the kind of a value of batch norm in training mode; that it combines samples is documented."""
        layer = node.get("layer", node.name)
        if layer not in self.batch_norms:
            self.batch_norms.append(layer)
        axes = scope.batch_axes(value)
        if axes:
            return rows(axes[0][0], 1, axes[0][1], trained=True)
        return coupled(node.name, BATCH_NORM, trained=True, documented=True)


def _may_be_undecided(scope: Scope, node: Node, kinds: Sequence[Kind]) -> bool:
    """Return whether the node may treat samples one by one although its rule says that it combines them."""
    if node.effect not in (Effect.PURE, Effect.READ) or any(kind.total for kind in kinds) or has_custom_gradient(node):
        return False
    # A number of samples that is compared or computed with may change results at numbers that no experiment has.
    # So may a reduction over the batch in each round of a loop, at values that no experiment has.
    takes_size = any(kind.form is Form.SIZE for kind in kinds) and node.op in elementwise.ELEMENTWISE
    if node.name in scope.reducing or (takes_size and (scope.nested or not elementwise.is_integer(node.outputs[0]))):
        return False
    return node.op not in _DECIDED or any(elementwise.is_integer(output) for output in node.outputs)


def _disordered_draws(scope: Scope, node: Node, kinds: Sequence[Kind]) -> set[str]:
    """Return the draws that a node may take together with other rows if they are drawn in blocks of the batch."""
    found: set[str] = set()
    for value, kind in zip(node.inputs, kinds, strict=True):
        if kind.rows and kind.outer == 1 and kind.inner > 1 and scope.open_draws:
            before = scope.open_draws.keys() & ancestors(scope.graph, [value.node])
            found |= {name for name in before if scope.open_draws[name] == kind.inner}
    return found - scope.blocks


def _of_whole_batch(kind: Kind) -> bool:
    """Return whether it is, or could be, computed once on the whole batch."""
    return not kind.trained and ((kind.coupled and not kind.documented) or (kind.shared and kind.once))


def _has_own_rows(scope: Scope, value: Value) -> bool:
    """Return whether micro-batches may take their rows of ``value``: not of positions, which index the micro-batch."""
    index = elementwise.is_integer(scope.graph.type_of(value)) and value in scope.positional
    if index or scope.graph.type_of(value).dtype.handle:
        return False
    return scope.has_a_row_a_sample(value)


def _note_positional(scope: Scope, node: Node, kinds: Sequence[Kind]) -> None:
    """Note results that are computed of positions of samples: as integers they may be indices into the micro-batch."""
    makes = node.op == "Range" and any(kind.form is Form.SIZE for kind in kinds)
    if makes or any(kind.slope for kind in kinds) or any(value in scope.positional for value in node.inputs):
        scope.positional.update(node.values())


def _kind_in_caller(inner: Scope, node: Node, value: Value) -> Kind:
    """Return the kind that an output of a nested function has in its caller: its terms cannot be weighted."""
    kind = inner.kinds.get(value, CONSTANT)
    if kind.form is Form.SUM and kind.mixed:
        return coupled(node.name, "adds sums and means inside a nested function or loop", trained=kind.trained)
    return kind
