"""Find the gradients that a training step takes with tf.GradientTape, while the step is traced.

Each gradient of a variable is replaced by a placeholder. So the nodes that depend on the placeholder run after the
gradients, and the nodes that the target needs are the loss. Whether there is a gradient, and whether it is sparse, is
predicted from the ops between the variable and the target, and checked when the stages are differentiated. If the
prediction was wrong, the step is traced again. TensorFlow then adds the ops of its own gradient, which takes longer;
these ops are left out when the trace is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError


@dataclass(frozen=True, eq=False)
class TapeGradient:
    """The gradient of ``variable``: placeholders of a dense tensor, or of slices and their indices, by role."""

    variable: tf.Variable
    placeholders: tuple[tuple[Literal["gradient", "slices", "indices"], Any], ...]


@dataclass(frozen=True, eq=False)
class TapeCall:
    """A call of ``tape.gradient`` for variables.

    ``graph``: the trace that it is part of. ``number``: counts the calls of the trace. ``target``: the scalar whose
    gradients it takes. ``place``: file and line.
    ``first_op``: the number of ops in the trace before the call. ``left_out``: names of the ops that TensorFlow added
    for the gradients. ``unrecorded``: names of the ops before the call through which no gradient passes, since the tape
    did not record them.
    """

    graph: Any
    number: int
    target: Any
    gradients: tuple[TapeGradient, ...]
    place: str
    first_op: int
    left_out: frozenset[str]
    unrecorded: frozenset[str]


@dataclass(eq=False)
class _Recorded:
    """The ops that a tape has recorded, from a first to an end number (exclusive), each with its trace."""

    tape: tf.GradientTape
    ops: list[tuple[Any, int, int]] = field(default_factory=list)
    begin: int | None = None


class TapeCalls:
    """A ``internals.TapeListener`` that collects the ``calls`` of a trace.

    ``certain``: let TensorFlow compute every gradient, and predict none. ``rowless``: the numbers of the calls whose
    gradients are not replaced by placeholders. ``refused``: the error that this listener has raised, since AutoGraph
    replaces it by an error of its own; ``nested``: whether it was raised for a gradient in a function that the step
    calls.
    """

    def __init__(self, *, certain: bool, rowless: Set[int]) -> None:
        self._certain = certain
        self._rowless = rowless
        self._count = 0
        self.calls: list[TapeCall] = []
        self.refused: CaptureError | None = None
        self.nested = False
        self._tapes: dict[int, _Recorded] = {}
        self._made: set[tuple[int, str]] = set()

    def recording_changed(self, tape: tf.GradientTape, *, records: bool, restarts: bool) -> None:
        if restarts or id(tape) not in self._tapes:
            self._tapes[id(tape)] = _Recorded(tape)
        known, graph = self._tapes[id(tape)], tf.compat.v1.get_default_graph()
        count = len(graph.get_operations())
        if records:
            known.begin = count
        elif known.begin is not None:
            known.ops.append((graph, known.begin, count))
            known.begin = None

    def gradient(
        self, tape: tf.GradientTape, compute: Callable[..., Any], target: Any, sources: Any, options: dict[str, Any]
    ) -> Any:
        flat = tf.nest.flatten(sources)
        graph = tf.compat.v1.get_default_graph()
        others = [known for known in self._tapes.values() if known.begin is not None and known.tape is not tape]
        if others or not graph.building_function or not any(hasattr(source, "handle") for source in flat):
            return compute(target, sources, **options)
        place = _place(graph)
        known = self._tapes.get(id(tape))
        if known is not None and known.begin is not None and internals.is_persistent(tape):
            raise self._refuse(
                f"{place}: tape.gradient is called while the tape still records: call it after the tape's `with`"
            )
        if graph.outer_graph is not None and graph.outer_graph.building_function:
            self.nested = True
            raise self._refuse(
                f"{place}: tape.gradient is called in a part of the step that TensorFlow traces by itself (the body of "
                "a tf.cond, of tf.map_fn or of a loop over tensors): call it outside of it; for a gradient that is not "
                "always used, take it always, and let a condition decide on the update"
            )
        targets = [item for item in tf.nest.flatten(target) if isinstance(item, tf.Tensor)]
        # The number of the round, in the body of tf.vectorized_map, is such an op.
        if any(op.type == "PlaceholderWithDefault" for op in ops_before(targets).values()):
            raise self._refuse(
                f"{place}: tape.gradient is called for each sample by itself (tf.vectorized_map), and such gradients "
                "are no sum over micro-batches: take the gradient of a loss over the batch; or train on one device, "
                "by a call of the function itself"
            )
        self._count += 1
        if self._count - 1 in self._rowless:
            return compute(target, sources, **options)
        return self._replace(tape, compute, target, sources, dict(options), place)

    def jacobian(self, tape: tf.GradientTape, method: str) -> None:
        graph = tf.compat.v1.get_default_graph()
        others = [known for known in self._tapes.values() if known.begin is not None and known.tape is not tape]
        if graph.building_function and not others:
            raise self._refuse(
                f"{_place(graph)}: tape.{method} is no sum over micro-batches: take tape.gradient of a scalar, or "
                "compute the derivatives of each sample with a tape inside of the tape whose gradient trains"
            )

    def _refuse(self, message: str) -> CaptureError:
        self.refused = CaptureError(message)
        return self.refused

    def _replace(
        self,
        tape: tf.GradientTape,
        compute: Callable[..., Any],
        target: Any,
        sources: Any,
        options: dict[str, Any],
        place: str,
    ) -> Any:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        zeros = tf.UnconnectedGradients(options.pop("unconnected_gradients", "none")) is tf.UnconnectedGradients.ZERO
        scalar = self._total(target, options.get("output_gradients"), place)
        start = len(graph.get_operations())
        self._made.update((id(graph), op.name) for op in graph.get_operations()[before:start])
        flat = tf.nest.flatten(sources)
        expected = None
        if not self._certain and all(hasattr(source, "handle") for source in flat):
            tape.__exit__(None, None, None)  # TensorFlow ends the recording of a tape that is asked for its gradient
            recorded = self._recorded(tape, graph, graph.get_operations()[:start])
            expected = expect_gradients(graph, scalar, [internals.as_tf_variable(v) for v in flat], recorded, tape)
        found = tf.nest.flatten(compute(target, sources, **options)) if expected is None else expected
        end = len(graph.get_operations())
        results: list[Any] = []
        gradients: list[TapeGradient] = []
        kept: list[Any] = []
        for source, gradient in zip(flat, found, strict=True):
            if gradient is None:
                results.append(tf.zeros_like(source) if zeros else None)
            elif hasattr(source, "handle"):
                variable = internals.as_tf_variable(source)
                result, placeholders = _placeholders(variable, gradient)
                results.append(result)
                gradients.append(TapeGradient(variable, placeholders))
            else:
                results.append(gradient)
                kept.append(gradient)
        if gradients:
            operations = graph.get_operations()
            added = {op.name for op in operations[start:end]}
            kept += (t for op in operations[:start] for t in op.inputs if t.op.name in added)  # loops keep lists for it
            needed = ops_before(tf.nest.flatten(kept, expand_composites=True), added)
            self.calls.append(
                TapeCall(
                    graph,
                    self._count - 1,
                    scalar,
                    tuple(gradients),
                    place,
                    before,
                    frozenset(added - needed.keys()),
                    frozenset(op.name for op in operations[:start]) - self._recorded(tape, graph, operations[:start]),
                )
            )
        return tf.nest.pack_sequence_as(sources, results)

    def _total(self, target: Any, weights: Any, place: str) -> Any:
        """Return the scalar whose gradients are those that ``tape.gradient`` takes of one or several targets."""
        targets = tf.nest.flatten(target)
        if not all(isinstance(item, tf.Tensor) for item in targets):
            kinds = ", ".join(sorted({type(item).__name__ for item in targets if not isinstance(item, tf.Tensor)}))
            raise self._refuse(f"{place}: tape.gradient takes the gradient of a {kinds}: give it a tensor")
        of_targets = [None] * len(targets) if weights is None else tf.nest.flatten(weights)
        terms = []
        for item, weight in zip(targets, of_targets, strict=True):
            if not item.dtype.is_floating:
                continue
            term = item if weight is None else item * tf.stop_gradient(tf.cast(weight, item.dtype))
            terms.append(term if term.shape.rank == 0 else tf.reduce_sum(term))
        if not terms:
            raise self._refuse(f"{place}: tape.gradient takes the gradient of no floating-point tensor")
        if len({term.dtype for term in terms}) > 1:
            raise self._refuse(
                f"{place}: tape.gradient takes the gradient of targets of several dtypes: cast them to one"
            )
        return terms[0] if len(terms) == 1 else tf.add_n(terms)

    def _recorded(self, tape: tf.GradientTape, graph: Any, operations: Sequence[Any]) -> set[str]:
        """Return the names of those of ``operations`` through which gradients pass, and of those made here."""
        known = self._tapes[id(tape)]
        recorded = {op.name for of, first, end in known.ops if of is graph for op in operations[first:end]}
        return recorded | {op.name for op in operations if (id(graph), op.name) in self._made}


@dataclass(frozen=True)
class Expected:
    """A gradient that a variable is expected to have; ``indices``: the dtype of its indices where it is sparse."""

    indices: str | None = None


_GATHERS = frozenset({"ResourceGather", "Gather", "GatherV2"})
"""Ops whose gradient for their first input is sparse."""


def expect_gradients(
    graph: Any, target: Any, variables: Sequence[tf.Variable], recorded: Set[str], tape: tf.GradientTape
) -> list[Expected | None] | None:
    """Return for each variable the gradient of ``target`` that it probably has, or None where it certainly has none.

    None in place of the list where only TensorFlow can tell. ``recorded``: names of the ops that ``tape`` recorded.
    """
    handles = {id(outside): inside.op.name for outside, inside in graph.captures}
    passed: dict[str, list[tuple[Any, int]]] = {}  # the ops that gradients reach, and their inputs that take them on
    pending = [target.op]
    while pending:
        op = pending.pop()
        if op.name in passed or op.name not in recorded:
            continue
        taken = [(t.op, i) for i, t in enumerate(op.inputs) if t.dtype == tf.resource or not t.dtype.is_integer]
        try:
            differentiable = bool(taken) and internals.has_gradient(op)
        except LookupError:
            return None
        passed[op.name] = taken if differentiable else []
        pending += [source for source, _ in passed[op.name]]
    users: dict[str, list[tuple[Any, int]]] = {}
    for name, taken in passed.items():
        for source, place in taken:
            users.setdefault(source.name, []).append((graph.get_operation_by_name(name), place))
    watched = {id(internals.as_tf_variable(variable).handle) for variable in tape.watched_variables()}
    found: list[Expected | None] = []
    for variable in variables:
        uses = users.get(handles.get(id(variable.handle), ""), []) if id(variable.handle) in watched else []
        found.append(Expected(_indices_of(uses, users)) if uses else None)
    return found


def _indices_of(uses: Sequence[tuple[Any, int]], users: Mapping[str, Sequence[tuple[Any, int]]]) -> str | None:
    """Return the dtype of the indices if all ``uses`` of a variable look up rows: int64 where they differ."""
    kinds: set[str] = set()
    for op, place in uses:
        if op.type == "ReadVariableOp":
            after = users.get(op.name, [])
            kind = _indices_of(after, users) if after else None
        else:
            kind = op.inputs[1].dtype.name if op.type in _GATHERS and place == 0 else None
        if kind is None:
            return None
        kinds.add(kind)
    return kinds.pop() if len(kinds) == 1 else "int64"


def _placeholders(variable: tf.Variable, gradient: Any) -> tuple[Any, Any]:
    """Return a gradient like ``gradient`` that is made of placeholders, and these by role."""
    place = tf.compat.v1.placeholder
    kind = gradient.indices if isinstance(gradient, Expected) else None
    if isinstance(gradient, tf.IndexedSlices):
        kind = gradient.indices.dtype.name
    if kind is None:
        dense = place(variable.dtype, variable.shape, name="gradient")
        return dense, (("gradient", dense),)
    slices = place(variable.dtype, [None, *variable.shape[1:]], name="gradient_slices")
    indices = place(kind, [None], name="gradient_indices")
    shape = tf.constant(variable.shape.as_list(), kind)
    return tf.IndexedSlices(slices, indices, shape), (("slices", slices), ("indices", indices))


def ops_before(tensors: Sequence[Any], among: Set[str] | None = None) -> dict[str, Any]:
    """Return the ops of a graph that compute ``tensors``, by name; ``among``: the names of those that count."""
    found: dict[str, Any] = {}
    pending = [tensor.op for tensor in tensors]
    while pending:
        op = pending.pop()
        if op.name not in found and (among is None or op.name in among):
            found[op.name] = op
            pending += [value.op for value in op.inputs]
            pending += op.control_inputs
    return found


def _place(graph: Any) -> str:
    """Return the file and line of the user's code that runs now."""
    with graph.as_default():
        return internals.user_place(tf.no_op())
