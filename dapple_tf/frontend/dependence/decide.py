"""Decide from the kinds of a loss's tensors how micro-batches compute it: what runs once, weights, draws, merges."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from dapple_tf.exactness import BatchLoss, Exactness, Inexactness, Tried
from dapple_tf.frontend.additions import ADDITION_OPS
from dapple_tf.frontend.captured import Captured, CapturedTensors
from dapple_tf.frontend.dependence.analyse import BATCH_NORM, Analysis
from dapple_tf.frontend.dependence.elementwise import SCALING, whole_size
from dapple_tf.frontend.dependence.kinds import Form, Kind, rows
from dapple_tf.frontend.dependence.random import is_stateless_draw
from dapple_tf.frontend.dependence.result import BatchDependence, LossHead, WholeSize
from dapple_tf.frontend.dependence.scope import Scope
from dapple_tf.frontend.dependence.undecided import Experiments
from dapple_tf.frontend.inference import Shapes
from dapple_tf.frontend.row_draws import RowDraw
from dapple_tf.frontend.shapes import infer_shapes, probe_shapes
from dapple_tf.graph_passes.analysis.layers import (
    CAPTURED_INPUTS,
    SHAPE_OPS,
    dependents,
    layer_of,
    live_nodes,
    written_variables,
)
from dapple_tf.graph_passes.analysis.loss_head import LossHeadInput
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value, ancestors, search_back
from dapple_tf.graph_passes.passes.microbatch import MergeKind

_NO_SUM = (
    "compute it per sample and reduce it by a sum or mean; or pass {batch_loss}micro_batches=1 (with one replica of "
    "each stage), or inexact='allow'"
)
_WRITE = (
    "write it outside of the loss, write a value that does not depend on samples, or add (assign_add) a sum or mean "
    "over samples to it; or pass {batch_loss}micro_batches=1 (with one replica of each stage), or inexact='allow'"
)
_BATCH_NORM_REMEDY = (
    "this exception is documented; batch_norm='deferred' keeps moving statistics of the whole batch, batch_norm='sync' "
    "takes statistics over replicas; layer norm and group norm normalise each sample by itself"
)
_DEFERRED = f"{BATCH_NORM}; its moving statistics are those of the whole batch"
_JOINED = f"{BATCH_NORM}; it takes them over all replicas"
_REMEDY = "this exception is documented; layer norm and group norm normalise each sample by itself"
_LOSSES = (Form.SUM, Form.MEAN, Form.SHARED)
_GIVES = {Form.ROWS: "a row for each sample", Form.SUM: "a sum over samples", Form.MEAN: "a mean over samples"}
_DRAW = "give the draw a seed (keras.random with a SeedGenerator, tf.random.stateless_*)"


def find_dependence(
    captured: Captured, batch_size: int, experiments: Experiments, batch_loss: BatchLoss = False
) -> BatchDependence:
    """Return how the micro-batches of ``captured`` make up the whole batch.

    ``batch_size``: any number of samples that the model accepts. ``experiments``: of this trace.
    """
    probed = probe_shapes(captured, batch_size)
    found = _decide(captured, probed, experiments, batch_loss, waits=False).result()
    if not found.exactness.undocumented or not any(kind.undecided for kind in found.kinds.values()):
        return found
    other = _decide(captured, probed, experiments, batch_loss, waits=True).result()
    return found if other.exactness.undocumented else other


def find_uncut_dependence(captured: Captured, batch_size: int) -> BatchDependence:
    """Return the decisions for one micro-batch on one replica that is the whole batch: nothing is rewritten.

    ``batch_size``: any number of samples that the model accepts.
    """
    return _decide(captured, probe_shapes(captured, batch_size), None, False, waits=False).uncut()


def _decide(
    captured: Captured,
    probed: tuple[int, Shapes],
    experiments: Experiments | None,
    batch_loss: BatchLoss,
    *,
    waits: bool,
) -> _Decision:
    """Analyse the loss with the shapes that were inferred for a number of samples; ``probed``: see ``probe_shapes``."""
    graph, live, (batch, shapes) = captured.graph, live_nodes(captured.graph), probed
    shapes_at = functools.cache(functools.partial(infer_shapes, captured))
    writes = [node for node in graph.nodes if node.effect is Effect.WRITE and node.name in live]
    written = written_variables(graph).keys()
    once_written, whole, divided, blocks = set(written), frozenset[Value](), frozenset[int](), frozenset[str]()
    while True:
        analysis = Analysis(
            captured.func_graph,
            CapturedTensors(captured).value,
            frozenset(captured.trainable),
            written,
            once_written,
            batch,
            shapes_at,
            experiments,
            waits,
            divided,
            blocks,
            live,
        )
        scope = analysis.run(graph, shapes, whole)
        per_micro_batch = {v for node in writes if not _writes_once(scope, node) for v in node.strings("writes")}
        both = scope.mean_sizes & _of_whole_sizes(graph, scope)
        settled = analysis.mixed_norms <= divided and not analysis.disordered
        if not per_micro_batch & once_written and not both and settled:
            break
        once_written -= per_micro_batch
        whole |= both
        divided |= analysis.mixed_norms
        blocks |= analysis.disordered
    return _Decision(captured, analysis, scope, live, writes, once_written, batch_loss)


def _of_whole_sizes(graph: Graph, scope: Scope) -> set[Value]:
    """Return the sizes that are the whole batch's for all their users, and the sizes that are computed from these."""
    found = {value for value in scope.sizes.values() if graph.type_of(value).dtype.differentiable} | scope.once_sizes
    for node in graph.nodes:
        if not found.isdisjoint((*node.inputs, *node.values())):
            found |= {value for value in node.values() if scope.kinds[value].form is Form.SIZE}
    return found


def _writes_once(scope: Scope, node: Node) -> bool:
    """Return whether a node that writes can run once, on the whole batch.

    It can if all micro-batches share its inputs. An input may also be rows, or combine samples, if it depends on no
    trained variable, and if the node has no outputs: it then only changes the variable.
    """
    for i, value in enumerate(node.inputs):
        kind = scope.kinds[value]
        if kind.form is Form.SIZE:
            kind = whole_size(scope, node, i)
        of_batch = (kind.rows or kind.coupled) and not (kind.trained or kind.documented or node.outputs)
        if not (kind.shared or of_batch):
            return False
    return True


@dataclass(eq=False)
class _Decision:
    """Collects the parts of a ``BatchDependence``."""

    captured: Captured
    analysis: Analysis
    scope: Scope
    live: set[str]
    writes: Sequence[Node]
    once_written: set[str]
    batch_loss: BatchLoss

    def __post_init__(self) -> None:
        self.graph: Graph = self.captured.graph
        self.reasons: list[Inexactness] = []
        self.adds: set[str] = set()
        self.mean_adds: set[str] = set()
        with_head = "" if self.batch_loss else "batch_loss=True (with mode='sync'), or "
        self.no_sum, self.write_remedy = _NO_SUM.format(batch_loss=with_head), _WRITE.format(batch_loss=with_head)
        self.scope.once_sizes |= {value for value in self.graph.outputs[1:] if self._is_only_returned(value)}
        self.whole_sizes = _of_whole_sizes(self.graph, self.scope)
        self.once = self._once()
        kinds = [self.scope.kinds[value] for value in self.graph.outputs]
        couples = any(kind.coupled and not kind.documented for kind in kinds)
        needs_head = self.batch_loss and (couples or any(map(self._differs, self.writes)))
        self.loss_head: LossHead | None = None
        if self.batch_loss is True or needs_head:
            writes = [node.name for node in self.writes if node.name not in self.once and not node.has("batch_norm")]
            self.loss_head = _cut_loss_head(self.graph, self.scope.kinds, self.once, writes)

    def result(self) -> BatchDependence:
        loss, *aux = self.graph.outputs
        kind = self.scope.kinds[loss]
        if kind.coupled and not kind.documented and not self.loss_head:
            self._couple(kind, "the loss", self.no_sum)
        if kind.form not in _LOSSES and not kind.coupled:
            why = "the loss depends on the size of the micro-batch"
            self._add(Inexactness(loss.node, why, self.no_sum))
        why, remedy = BATCH_NORM, _BATCH_NORM_REMEDY
        if self.captured.batch_norms:  # recorded, to write moving statistics of the whole batch
            why, remedy = _DEFERRED, _REMEDY
        if self.captured.joined:
            why, remedy = _JOINED, _REMEDY
        for name in self.analysis.batch_norms:
            self._add(Inexactness(name, why, remedy, documented=True))
        for node in self.analysis.hidden_draws:
            nested = self.graph.by_name.get(node.name) is not node  # in a custom gradient or a loop
            if nested or node.name in self.live:
                why = f"draws from a generator's hidden state ({node.op}), so not the numbers that one device draws"
                # A draw that runs once a step runs in each stage that uses it, and each stage draws other numbers.
                own = node.name in self.once
                self._add(Inexactness(_layer(node), why, _DRAW, documented=True, uncut=own, node=node.name))
        merges = tuple(self._aux(i, value) for i, value in enumerate(aux))
        self._check_writes()
        self._check_reads()
        self._check_combined()
        return BatchDependence(
            loss="sum" if kind.form is Form.SUM else "mean",
            mixed=kind.form is Form.SUM and kind.mixed and not self.loss_head,
            grows=self._grows(),
            aux=merges,
            adds=frozenset(self.adds | self.mean_adds),
            mean_adds=frozenset(self.mean_adds),
            once=self.once,
            draws=self._draws(),
            sizes=self._sizes(),
            shapes=self._shapes(self.once),
            sliced=tuple(sorted(value for value in self.scope.sliced if value.node in self.live)),
            squeezed=MappingProxyType(self.scope.squeezed),
            exactness=Exactness(tuple(self.reasons), tried=self._tried()),
            kinds=self.scope.kinds,
            loss_head=self.loss_head,
            partials=self._partials(),
            captured_lists=MappingProxyType(self.scope.captured_lists),
        )

    def _tried(self) -> tuple[Tried, ...]:
        """Return the ops that were tried and that the loss uses, each layer's once."""
        found = []
        for node, forms in self.analysis.decided.values():
            nested = self.graph.by_name.get(node.name) is not node
            if (nested or node.name in self.live) and node.name not in self.once:
                found.append(Tried(_layer(node), node.op, " and ".join(_GIVES[form] for form in forms)))
        return tuple(dict.fromkeys(found))

    def uncut(self) -> BatchDependence:
        """Return the decisions for one micro-batch on one replica that is the whole batch.

        What runs once a step still does, so that the model can be cut between its users (seeds that several layers
        draw from). But what must keep its place in the program, or would need a rewritten size, stays in the stages.
        """
        return BatchDependence(
            loss="mean",
            grows=self._grows(),
            aux=tuple("first" for _ in self.graph.outputs[1:]),
            once=self._once_uncut(),
            uncut=True,
            captured_lists=MappingProxyType(self.scope.captured_lists),
        )

    def _once_uncut(self) -> frozenset[str]:
        """Return the nodes of ``once`` that may run before the stages without changing a result."""
        once = self.once
        while True:
            fixed = {node.name for node in self.graph.nodes if node.effect in (Effect.SIDE, Effect.RANDOM)}
            fixed |= {size.node for size in self._shapes(once)}
            fixed |= {write.name for write, _, _ in self._read_too_early(once)}
            fixed = dependents(self.graph, fixed, by_controls=True)
            if once.isdisjoint(fixed):
                return once
            once -= fixed

    def _grows(self) -> bool:
        """Return whether the loss is a sum over the batch that nothing divides."""
        loss = self.graph.outputs[0]
        return self.scope.kinds[loss].form is Form.SUM and not self._divided(loss)

    def _partials(self) -> Mapping[str, str]:
        """Return the nodes that can be combined from parts, and by which operation.

        Left out are those that something else enters which needs the whole batch (another statistic, the batch's size):
        a replica computes them from its own rows only.
        """
        whole = self.once | {value.node for value in self.analysis.combined} | {name for name, _ in self.scope.sizes}
        found = {}
        for name, how in self.analysis.partials.items():
            if name in self.once and not whole & (set(ancestors(self.graph, [name])) - {name}):
                found[name] = how
        return MappingProxyType(found)

    def _divided(self, loss: Value) -> bool:
        """Return whether the loss, a sum over the batch, was multiplied or divided by anything after the sum."""
        names, _ = search_back(self.graph, [loss], lambda value: self.scope.kinds[value].form is not Form.SUM)
        return any(self.graph.node(name).op in SCALING for name in names)

    def _sizes(self) -> tuple[WholeSize, ...]:
        """Return the sizes to replace by the whole batch's: floats for all their users, integers for one operand."""
        found: dict[tuple[str, int | None], WholeSize] = {}
        for (name, operand), value in self.scope.sizes.items():
            coefficients = self.scope.affine(value)
            if name not in self.live or coefficients is None:
                continue
            scale, offset = coefficients
            key: tuple[str, int | None]
            number = self.graph.type_of(value).dtype.differentiable
            key = (value.node, None) if number else (name, operand)
            found[key] = WholeSize(key[0], key[1], scale, offset)
        return tuple(found.values())

    def _shapes(self, once: Set[str]) -> tuple[WholeSize, ...]:
        """Return the shapes of activations that nodes which run once need, as functions of the batch size."""
        scope, found = self.scope, []
        activations = {
            node.name
            for node in self.graph.nodes
            if node.op in SHAPE_OPS and any(scope.kinds[value].trained for value in node.inputs)
        }
        for name in sorted(ancestors(self.graph, once) & activations):
            for value in self.graph.node(name).values():
                if (coefficients := scope.affine(value)) is not None:
                    found.append(WholeSize(name, value.index, *coefficients))
        return tuple(found)

    def _add(self, reason: Inexactness) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _couple(self, kind: Kind, what: str, remedy: str) -> None:
        node = self.graph.by_name.get(kind.node)
        layer = _layer(node) if node is not None else kind.node
        op = f" ({kind.node!r}, {node.op})" if node is not None and layer != kind.node else ""
        why = f"{what} is no sum or mean over samples: this op{op} {kind.why}"
        self._add(Inexactness(layer, why, remedy, kind.documented, node=kind.node))

    def _aux(self, index: int, value: Value) -> MergeKind | None:
        """Return how to merge an aux output; None for its type to decide."""
        kind = self.scope.kinds[value]
        if self.loss_head and value.node in self.loss_head.own:
            return "first"
        match kind.form:
            case Form.SHARED:
                return "first"
            case Form.SUM if not kind.mixed:
                return "sum"
            case Form.MEAN:
                return "mean"
            case Form.ROWS if kind.axis == 0 and kind.outer == 1 and not kind.slope:
                return "concat"
            case Form.SIZE if value in self.whole_sizes and self._make_whole(value):
                return "first"
            case Form.SIZE if value not in self.whole_sizes and self._is_proportional(value):
                return "sum"
        if kind.coupled and not kind.documented:
            self._couple(kind, f"aux output {index}", "return it per sample, or compute it from outputs of the step")
        elif kind.form is Form.SIZE:
            why = f"aux output {index} is a size of the micro-batch"
            self._add(Inexactness(value.node, why, "compute it from the batch outside of the loss"))
        elif not kind.coupled:
            why = f"aux output {index} does not have the batch on axis 0, so that it could be concatenated"
            self._add(Inexactness(value.node, why, "return it per sample, with the batch on axis 0"))
        return None

    def _make_whole(self, value: Value) -> bool:
        """Return whether a size computed from sizes of the whole batch is one too, and note to replace it by it."""
        if value in self.scope.once_sizes:
            return True
        if self.scope.affine(value) is None:
            return False
        self.scope.sizes[value.node, 0] = value
        return True

    def _is_only_returned(self, value: Value) -> bool:
        """Return whether an aux output is a size that nothing else uses and that does not add up over micro-batches."""
        alone = len(self.graph.node(value.node).outputs) == 1 and value not in self._taken(self.live)
        size = self.scope.kinds[value].form is Form.SIZE and not self._is_proportional(value)
        return size and alone and self.scope.knows_shapes(value)

    def _is_proportional(self, value: Value) -> bool:
        """Return whether a size is proportional to the number of samples, so that those of micro-batches add up."""
        coefficients = self.scope.affine(value)
        return coefficients is not None and not coefficients[1].any()

    def _check_writes(self) -> None:
        for node in self.writes:
            if self.loss_head and node.name in self.loss_head.own:
                continue
            kinds = [self.scope.kinds[value] for value in node.inputs]
            if self._is_added(node):
                (self.mean_adds if kinds[1].form is Form.MEAN else self.adds).add(node.name)
            if not self._differs(node):
                continue
            layer, names = _layer(node), ", ".join(node.strings("writes"))
            why = f"writes {names} once for each micro-batch, with a value that depends on its samples"
            documented = any(kind.documented for kind in kinds)
            self._add(Inexactness(layer, why, self.write_remedy, documented, node=node.name))

    def _differs(self, node: Node) -> bool:
        """Return whether the writes of micro-batches would not give what one write of the whole batch does."""
        return not (self._is_once(node) or node.has("batch_norm") or self._is_added(node))

    def _is_once(self, node: Node) -> bool:
        return all(name in self.once_written for name in node.strings("writes"))

    def _is_added(self, node: Node) -> bool:
        """Return whether each micro-batch adds its part to what a node writes."""
        if self._is_once(node) or node.has("batch_norm") or node.op not in ADDITION_OPS:
            return False
        return self._adds_up(node.inputs[1]) and not self._is_read(node.strings("writes"))

    def _adds_up(self, value: Value) -> bool:
        """Return whether the micro-batches' values, means weighted by their shares of the samples, add up.

        A share is rounded to the type: it is 0 as an integer, and a variable of 16 bits would not change by it.
        """
        kind, dtype = self.scope.kinds[value], self.graph.type_of(value).dtype
        has_shares = dtype.differentiable and dtype.size >= 4
        return not kind.mixed and (kind.form is Form.SUM or (kind.form is Form.MEAN and has_shares))

    def _is_read(self, names: Sequence[str]) -> bool:
        reads = [n for n in self.graph.nodes if n.effect is Effect.READ and n.name in self.live]
        return any(value.node in names for node in reads for value in node.inputs)

    def _once(self) -> frozenset[str]:
        """Return the nodes that run once a step, on the whole batch."""
        found = {node.name for node in self.writes if self._is_once(node)}
        for node in self.graph.nodes:  # prints, checks, Python code
            if node.effect is not Effect.SIDE or node.name not in self.live:
                continue
            kinds_of = [self.scope.kinds[value] for value in node.inputs]
            shared = all(kind.shared or (kind.form is Form.SIZE and not kind.trained) for kind in kinds_of)
            if shared and all(map(self.scope.knows_shapes, node.inputs)):
                found.add(node.name)
        whole = self.scope.once_sizes | self.scope.sliced
        found |= {value.node for value in whole if value.node in self.live}
        wanted = self._used(self.live)
        for node in self.graph.nodes:
            used = [value for value in node.values() if value in wanted] or node.values()
            kinds = [self.scope.kinds.get(value) for value in used]
            if node.name in self.live and kinds and all(k and k.shared and k.once and not k.trained for k in kinds):
                found.add(node.name)
        for _, read, _ in self._read_too_early(found):  # the value is kept from before the write
            kinds = [self.scope.kinds[value] for value in read.values()]
            if kinds == [rows()] and self.scope.has_a_row_a_sample(Value(read.name)):
                self.scope.sliced.add(Value(read.name))
                found.add(read.name)
            elif all(kind and kind.shared for kind in kinds):
                found.add(read.name)
        return frozenset(found)

    def _used(self, nodes: Set[str]) -> set[Value]:
        """Return the values that these nodes take, and the loss and aux outputs."""
        return self._taken(nodes) | {*self.graph.outputs}

    def _taken(self, nodes: Set[str]) -> set[Value]:
        return {value for node in self.graph.nodes if node.name in nodes for value in node.inputs}

    def _check_combined(self) -> None:
        """Add a reason for each op that computes values of samples and a statistic of the whole batch."""
        for value in sorted(self.analysis.combined & self._used(self.live - self.once)):
            if value.node in self.live and value.node not in self.once:
                node = self.graph.node(value.node)
                why = f"computes a statistic of the whole batch ({value}) and values of samples in one op ({node.op})"
                remedy = "compute the statistic by an op of its own, or pass inexact='allow'"
                self._add(Inexactness(_layer(node), why, remedy, node=node.name))

    def _check_reads(self) -> None:
        """Add a reason for each read before a write that runs once a step: micro-batches would read the new value."""
        for _, node, name in self._read_too_early(self.once):
            why = f"reads {name} before the loss writes it; micro-batches run after that write"
            remedy = f"read {name} after it is written, or write it outside of the loss"
            self._add(Inexactness(_layer(node), why, remedy, uncut=True, node=node.name))

    def _read_too_early(self, once: Set[str]) -> list[tuple[Node, Node, str]]:
        """Return each write of ``once`` before which stages read its variable, with the read and the variable."""
        found = []
        acting = [n.name for n in self.graph.nodes if n.effect in (Effect.WRITE, Effect.SIDE)]
        used = ancestors(self.graph, [*(v.node for v in self.graph.outputs), *acting], stop=once)
        reads = [node for node in self.graph.nodes if node.effect is Effect.READ and node.name in used]
        for write in self.writes:
            written = set(write.strings("writes")) if write.name in once else set()
            for node in reads:
                direct = written.intersection(value.node for value in node.inputs)
                if direct and write.name not in ancestors(self.graph, [node.name]):
                    found.append((write, node, ", ".join(sorted(direct))))
        return found

    def _draws(self) -> tuple[RowDraw, ...]:
        found = []
        for node in self.graph.nodes:
            value = Value(node.name)
            kind = self.scope.kinds.get(value)
            draws = node.name in self.live and is_stateless_draw(node.op) and value not in self.scope.sliced
            if draws and kind is not None and kind.rows:
                found.append(RowDraw(node.name, kind.axis, kind.outer, kind.inner))
        return tuple(found)


def _layer(node: Node) -> str:
    return layer_of(node) or node.name


# --- Cut a loss that combines samples after the last tensors whose row i depends on sample i alone
# The search goes from the loss towards the inputs and ends at rows that depend on variables: the *inputs of the loss
# head*, which micro-batches compute. Rows that depend on the arguments alone (labels, masks) are computed in the loss
# head, from the whole batch.


# Ops that only rearrange rows belong to the loss head, so that it does not get the same rows twice.
_REARRANGING = frozenset({"ConcatV2", "Identity", "Pack", "Transpose"})


def _cut_loss_head(
    graph: Graph, kinds: Mapping[Value, Kind], once: Collection[str], writes: Sequence[str]
) -> LossHead | None:
    """Return the loss head that computes the loss, the aux outputs that combine samples, and ``writes``.

    None if it would take no rows that depend on trained variables. ``once``: nodes that run once a step, before the
    micro-batches.
    """
    loss, *aux = graph.outputs
    whole = [value.node for value in aux if _needs_whole_batch(kinds[value])]
    roots = [loss.node, *whole, *writes]
    constant = [name for name in once if not (Value(name) in kinds and kinds[Value(name)].trained)]
    # What depends on a variable or a hidden draw, other than through sizes and what is constant.
    varying = [node.name for node in graph.nodes if node.op == "variable" or node.effect is Effect.RANDOM]
    sizes = (node.name for node in graph.nodes if node.op in SHAPE_OPS)
    computed = dependents(graph, varying, {*constant, *sizes})
    late = dependents(graph, writes, by_controls=True)  # these may read what is written

    def is_given(value: Value) -> bool:
        return graph.node(value.node).op in CAPTURED_INPUTS or value.node in once

    def crosses(value: Value) -> bool:
        of_stage = not is_given(value) and value.node in computed and value.node not in late
        return of_stage and value in kinds and _can_cross(graph, value, kinds[value])

    taken = [value for name in roots for value in graph.node(name).inputs]
    between, ended = search_back(graph, taken, lambda value: is_given(value) or crosses(value))
    nodes, crossing = between.union(roots), graph.in_order(filter(crosses, ended))
    if not any(kinds[value].trained for value in crossing):
        return None
    acting = [n.name for n in graph.nodes if n.effect in (Effect.WRITE, Effect.SIDE)]
    others = [name for name in (*acting, *(value.node for value in aux)) if name not in roots]
    outside = ancestors(graph, [*(value.node for value in crossing), *others], stop=once)
    head_inputs = tuple(LossHeadInput(value, kinds[value].axis, kinds[value].outer) for value in crossing)
    return LossHead(frozenset(nodes), frozenset(nodes - outside), head_inputs)


def _needs_whole_batch(kind: Kind) -> bool:
    """Return whether an aux output of this kind is computed from the whole batch where the model has a loss head."""
    return (kind.coupled and not kind.documented) or (kind.total and kind.trained)


def _can_cross(graph: Graph, value: Value, kind: Kind) -> bool:
    if graph.node(value.node).op in _REARRANGING or not graph.type_of(value).dtype.transferable:
        return False
    return kind.rows and not kind.slope and kind.outer > 0 and kind.inner > 0
