"""Trace a tf.function or callable, and read its graph into the IR.

The function is traced anew, and the traces that the user's tf.function already has stay as they are. Axis 0 of every
argument is unknown, so that the same graph serves every micro-batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError, DappleError, LossError
from dapple_tf.exactness import BatchNorm
from dapple_tf.frontend.after_gradients import AfterGradients, loss_nodes, part_step
from dapple_tf.frontend.batch import batch_signature, batch_size
from dapple_tf.frontend.batch_norms import BatchNormCall, BatchNormRecorder
from dapple_tf.frontend.dependence.result import BatchDependence
from dapple_tf.frontend.joined_moments import join_moments
from dapple_tf.frontend.names import tensor_name, unique_name
from dapple_tf.frontend.node_attributes import read_attribute
from dapple_tf.frontend.phases import (
    HANDED_OVER,
    Asked,
    HandOver,
    cut_phases,
    join_asked,
    join_targets,
    rowless_targets,
    unrecorded_of,
)
from dapple_tf.frontend.read_graph import read_graph, read_value, skip_identities
from dapple_tf.frontend.rows import ROWS_NAME, ROWS_OP
from dapple_tf.frontend.tables import find_misuse
from dapple_tf.frontend.tape_calls import TapeCall, TapeCalls, ops_before
from dapple_tf.graph_passes.analysis.layers import written_variables
from dapple_tf.graph_passes.ir.graph import Effect, Graph, Node, Value, attributes
from dapple_tf.graph_passes.ir.names import of_target, without_target

Serves = Callable[[tuple[tf.TensorSpec, ...]], bool]
"""Whether a trace may run batches whose flattened tensors have these specs, with all inner lengths known."""

TRAINED = "trained_variables"
"""The attribute of a loss function that returns the variables to train, in the order in which its optimizer gets them.

Without it all trainable variables that the function uses are trained, in the order of their first use.
"""


@dataclass(frozen=True)
class TrainingStep:
    """A function of a batch that trains: it takes gradients with tf.GradientTape and changes variables itself.

    ``certain``: let TensorFlow tell which gradients there are, and ``rowless``: the numbers of the calls of
    ``tape.gradient`` that TensorFlow computes as it stands (see ``tape_calls``). ``phase``: the number of the phase to
    capture, of a step of several, and ``hand_over``: what its phases share. ``joined``: let one phase have several
    targets where it can (see ``phases.join_targets``).
    """

    function: Callable[..., Any]
    certain: bool = False
    rowless: frozenset[int] = frozenset()
    joined: bool = True
    phase: int | None = None
    hand_over: HandOver | None = None


class UnexpectedGradientsError(Exception):
    """Raised where a training step was traced for other gradients than it has: it must be traced as ``certain``."""


class RowlessTargetsError(Exception):
    """Raised where gradients of a training step need no rows: it must be traced with these calls as ``rowless``."""

    def __init__(self, calls: frozenset[int]) -> None:
        super().__init__(f"the gradients of the calls {sorted(calls)} need no rows of the batch")
        self.calls = calls


class SeveralPhasesError(Exception):
    """Raised where a training step has ``count`` phases, and is to be captured phase by phase.

    ``joined``: see ``TrainingStep``.
    """

    def __init__(self, count: int, *, joined: bool) -> None:
        super().__init__(f"the step has {count} phases")
        self.count = count
        self.joined = joined


@dataclass(frozen=True)
class PhaseOfStep:
    """A captured phase of a training step: its ``number`` of ``count``, and how it fits to others.

    ``trace``: of the whole step, equal for all its phases. ``taken`` and ``given``: the names of the variables through
    which values are handed over to it, and by it to later phases. ``written``: the variables that any phase changes, by
    identity.
    """

    number: int
    count: int
    trace: str
    taken: frozenset[str]
    given: frozenset[str]
    written: frozenset[int]


Traced = Callable[..., Any] | TrainingStep
"""A loss function, or a training step."""


def plain_function(function: Traced) -> Callable[..., Any]:
    """Return the user's own function."""
    return function.function if isinstance(function, TrainingStep) else function


@dataclass(frozen=True)
class Target:
    """A target of which a training step takes gradients: the ``value`` of the target, a scalar.

    Where there are several, their sum is the loss, and ``value`` is a term of it that is the target. ``gradients``: the
    name of the gradient of each variable (see ``names.of_target``).
    """

    value: Value
    gradients: Mapping[str, str]


@dataclass(frozen=True)
class Captured:
    """A traced loss.

    ``graph``: the op-level IR, whose outputs are the loss, then the aux tensors. ``func_graph``: the TensorFlow graph
    that it was read from, in which gradients are built. ``variables``: by the name of their node; ``trainable``: the
    names of those to train. ``constants``: tensors from outside of the function, by the name of their ``capture``
    node. ``aux``: the nesting of the aux outputs, or None. ``signature``: the specs of the flattened arguments;
    ``example``: the same trace with all inner lengths known: those of the batch that it was traced for.

    ``rows``: the placeholder of the micro-batch's first and end row and the batch size, where the trace has one; its
    node is ``ROWS_NAME``. ``dependence``: how micro-batches compute the loss, once that was found out; ``serves``: for
    which inner lengths, None where the trace knows all.

    ``batch_norms``: the calls of batch norm layers in training mode, where these were recorded; ``joined``: whether
    replicas join the statistics of such layers instead; ``dropped``: names of nodes of the trace that the graph no
    longer has.

    ``after``: of a training step, the part after the gradients, or None; ``certain``: whether its gradients are known;
    ``left_out``: names of ops of the trace that are not part of its loss; ``unrecorded``: names of nodes through which
    no gradient passes; ``several``: its targets, where there are several; ``apart``: the number of targets of the whole
    step; ``phase``: of a training step of several phases.
    """

    graph: Graph
    func_graph: Any
    variables: dict[str, tf.Variable]
    trainable: tuple[str, ...]
    constants: dict[str, tf.Tensor]
    aux: Any
    signature: tuple[tf.TensorSpec, ...]
    example: tuple[tf.TensorSpec, ...]
    rows: Any = None
    dependence: BatchDependence | None = None
    serves: Serves | None = None
    batch_norms: tuple[BatchNormCall, ...] = ()
    joined: bool = False
    dropped: frozenset[str] = frozenset()
    after: AfterGradients | None = None
    certain: bool = True
    left_out: frozenset[str] = frozenset()
    unrecorded: frozenset[str] = frozenset()
    several: tuple[Target, ...] = ()
    apart: int = 1
    phase: PhaseOfStep | None = None

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets whose gradients are computed apart: the loss, or the ``several`` of a training step."""
        return self.several or (Target(self.graph.outputs[0], {name: name for name in self.trainable}),)

    @property
    def uncut(self) -> bool:
        """Whether it is only for steps of one micro-batch on one replica."""
        return self.dependence is not None and self.dependence.uncut

    @property
    def needs_uncut(self) -> bool:
        """Whether one micro-batch on one replica computes what one device does only if it is traced for that."""
        python = any(node.op == "EagerPyFunc" for node in self.graph.nodes)  # cut into stages, it has no gradient
        return self.uncut or python or (self.dependence is not None and not self.dependence.exactness.exact_uncut)

    @property
    def stateful(self) -> bool:
        """Whether micro-batches draw from a generator's hidden state or write variables, so that they are not equal."""
        changing = (node for node in self.graph.nodes if node.effect in (Effect.WRITE, Effect.RANDOM))
        return any(not node.has("once") and not node.has("loss_head") for node in changing)


class CapturedTensors:
    """The TensorFlow tensors from which IR values were read.

    ``handles``: the resource placeholders of variables, by name. ``inputs``: as for ``read_graph``.
    """

    def __init__(self, captured: Captured) -> None:
        self.handles: dict[str, Any] = {}
        self.inputs: dict[str, Node] = {}
        self._graph = captured.func_graph
        self._placeholders: dict[str, Any] = {}
        for name, tensor in zip(captured.graph.inputs, self._graph.inputs, strict=False):
            self._add(captured.graph.node(name), tensor)
        for name, variable in captured.variables.items():
            self.handles[name] = internals.capture_of(self._graph, variable.handle)
            self._add(captured.graph.node(name), self.handles[name])
        for name, constant in captured.constants.items():
            self._add(captured.graph.node(name), internals.capture_of(self._graph, constant))
        for name, tensor in _small_constants(self._graph):
            if name in captured.graph.by_name:  # gradients may add others
                self._add(captured.graph.node(name), tensor)
        if captured.rows is not None:
            self._add(captured.graph.node(ROWS_NAME), captured.rows)

    def _add(self, node: Node, tensor: Any) -> None:
        self.inputs[tensor.op.name] = node
        self._placeholders[node.name] = tensor

    def __getitem__(self, value: Value) -> Any:
        if value.node in self._placeholders:
            return self._placeholders[value.node]
        return self._graph.get_tensor_by_name(tensor_name(value))

    def value(self, tensor: Any) -> Value:
        """Return the IR value of a tensor of the trace."""
        return read_value(tensor, self.inputs)


def capture(
    loss_fn: Traced,
    batch: Sequence[Any],
    *,
    batch_norm: BatchNorm = "micro-batch",
    trains: bool = True,
    signature: Sequence[tf.TensorSpec] | None = None,
    sized: bool = False,
    inlined: bool = False,
) -> Captured:
    """Trace ``loss_fn(*batch)`` and read the graph.

    ``batch_norm``: for "deferred", record the calls of batch norm layers in training mode, with what their statistics
    are made of; for "sync", let replicas join these. Without ``trains`` the function is only to run forward: every
    variable that it does not write counts as trainable, so that all that is computed from it stays in the
    micro-batches. ``signature``: of the batch's flattened tensors; by default only axis 0 is unknown. ``sized``: trace
    the function for the size of ``batch`` where it cannot be traced for an unknown one. ``inlined``: what it calls is
    traced as part of it, also tf.functions; so is a training step that takes gradients in such.

    Of a training step the graph is that of its loss, with the values of it that the part after the gradients takes.

    Raises CaptureError when the trace fails for an unknown batch size or the function has nothing to train, and
    LossError when the loss is not a floating-point scalar.
    """
    example = batch_signature(batch)
    specs = example if signature is None else tuple(signature)
    calls = TapeCalls(certain=loss_fn.certain, rowless=loss_fn.rowless) if isinstance(loss_fn, TrainingStep) else None
    user = plain_function(loss_fn)
    function = internals.clone_function(user) if internals.is_tf_function(user) else tf.function(user)
    if not sized:
        _check_signature(function)
    name, norms = _function_name(user), BatchNormRecorder()
    moments: dict[str, internals.Moments] = {"deferred": norms, "sync": join_moments}
    with (
        internals.replace_moments(moments[batch_norm]) if batch_norm in moments else nullcontext(),
        internals.listen_to_tapes(calls) if calls is not None else nullcontext(),
        internals.inline_functions() if inlined else nullcontext(),
    ):
        try:
            concrete, recorder, specs = _trace(function, name, batch, specs, sized=sized)
        except Exception as error:  # the user's code and AutoGraph raise any type; a training step's gets its line
            if calls is None:
                raise
            if inlined or not calls.nested:
                raise calls.refused or _error_of_step(name, error) from error
            concrete = None
    if concrete is None:
        return capture(
            loss_fn, batch, batch_norm=batch_norm, trains=trains, signature=signature, sized=sized, inlined=True
        )
    if calls is None:
        captured = _read_loss(concrete, recorder, specs, example, name, user, trains=trains)
    else:
        assert isinstance(loss_fn, TrainingStep), "only for such there are calls"
        captured = _read_step(concrete, recorder, specs, example, name, calls.calls, loss_fn)
    return replace(captured, batch_norms=tuple(norms.calls), joined=batch_norm == "sync")


def _read_loss(
    concrete: Any,
    recorder: _LayerRecorder,
    specs: tuple[tf.TensorSpec, ...],
    example: tuple[tf.TensorSpec, ...],
    name: str,
    loss_fn: Callable[..., Any],
    *,
    trains: bool,
) -> Captured:
    """Return the captured loss of a trace; see ``capture`` for what it raises."""
    func_graph = concrete.graph
    outputs, aux = _loss_and_aux(concrete, name)
    kept = internals.kept_for_gradients(func_graph)  # first: it captures what gradients alone use of the outside
    inputs = _read_inputs(func_graph, len(specs), name)
    graph = recorder.mark_layers(read_graph(func_graph, inputs.nodes, name), func_graph)
    graph = graph.replace(
        inputs=tuple(inputs.nodes[tensor.op.name].name for tensor in func_graph.inputs[: len(specs)]),
        outputs=tuple(read_value(tensor, inputs.nodes) for tensor in outputs),
    )
    _check_read_by_gradients(kept, inputs, graph.nodes, name)
    written = {} if trains else written_variables(graph)
    trainable = _in_order(inputs, loss_fn) if trains else [name for name in inputs.variables if name not in written]
    if trains and not trainable:
        raise CaptureError(f"{name} uses no trainable variable, so there is nothing to train: is the model captured?")
    return Captured(graph, func_graph, inputs.variables, tuple(trainable), inputs.constants, aux, specs, example)


def _read_step(
    concrete: Any,
    recorder: _LayerRecorder,
    specs: tuple[tf.TensorSpec, ...],
    example: tuple[tf.TensorSpec, ...],
    name: str,
    calls: Sequence[TapeCall],
    step: TrainingStep,
) -> Captured:
    """Return the captured loss of the trace of a training step, with the part after its gradients.

    Of a step that takes gradients of several targets it is one phase (see ``phases``). Raises CaptureError where it
    takes no gradients of variables, SeveralPhasesError where ``step`` does not say which phase, and RowlessTargetsError
    where it does not say which gradients need no rows.
    """
    func_graph = concrete.graph
    calls = [call for call in calls if call.graph is func_graph]
    if not calls:
        raise CaptureError(
            f"{name} takes no gradient of a variable with tf.GradientTape (tape.gradient), so there is nothing to "
            "train; a loss needs optimizer=..."
        )
    groups: dict[int, list[TapeCall]] = {}
    for call in calls:
        groups.setdefault(id(call.target), []).append(call)
    returned, structure = _returned(concrete, name)
    captured = {placeholder.op.name for _, placeholder in func_graph.captures}
    left_out = frozenset().union(*(call.left_out for call in calls)) - captured
    trace = _Trace(func_graph, recorder, len(specs), name, calls, internals.kept_for_gradients(func_graph, left_out))
    phases = trace.phases([*groups.values()], left_out, joined=step.joined)
    if len(phases) > 1 and step.phase is None:
        raise SeveralPhasesError(len(phases), joined=step.joined)
    phase, handed_over = None, frozenset[str]()
    if step.phase is not None:
        assert step.hand_over is not None, "phases share it"
        phase, handed_over, left_out, returned = _hand_over(
            trace, phases, left_out, returned, step.phase, step.hand_over
        )
    of_targets = phases[step.phase or 0]
    target, terms = _loss_of(func_graph, [calls[0].target for calls in of_targets])
    inputs, graph = trace.read(left_out, of_targets)
    loss = read_value(target, inputs.nodes)
    values = [read_value(term, inputs.nodes) for term in terms]
    operations = func_graph.get_operations()
    node_of, first_op = trace.node_of(inputs), of_targets[0][0].first_op
    numbers = {node_of[op.name]: i for i, op in enumerate(operations)}
    after = part_step(
        graph,
        loss,
        first_op,
        numbers,
        [None if tensor is None else read_value(tensor, inputs.nodes) for tensor in returned],
        structure,
        inputs.variables,
        inputs.constants,
        trace.place_of(inputs),
        trace.values_kept(inputs),
        handed_over,
    )
    if not after.trained:
        raise CaptureError(f"{name} uses none of the gradients that it takes, so there is nothing to train")
    before = [node for node in graph.nodes if node.name not in after.nodes or numbers[node.name] < first_op]
    _check_read_by_gradients(trace.kept, inputs, before, name)
    members = loss_nodes(after, trace.values_kept(inputs))
    gradients = [{without_target(of): of for of in after.trained if of in names} for names in inputs.gradients.values()]
    asked = [trace.asked(calls, inputs) for calls in of_targets]
    unrecorded = [unrecorded_of(graph, item) for item in asked]
    graph = graph.replace(
        nodes=tuple(node for node in graph.nodes if node.name in members),
        inputs=tuple(inputs.nodes[tensor.op.name].name for tensor in func_graph.inputs[: len(specs)]),
        outputs=after.whole,
    )
    several = [Target(value, of) for value, of in zip(values, gradients, strict=True)]
    return Captured(
        graph,
        func_graph,
        {name: variable for name, variable in inputs.variables.items() if name in members},
        after.trained,
        {name: value for name, value in inputs.constants.items() if name in members},
        None,
        specs,
        example,
        after=after,
        certain=step.certain,
        left_out=frozenset(op.name for op in operations if node_of[op.name] not in members),
        unrecorded=frozenset().union(*unrecorded),
        several=tuple(several) if len(of_targets) > 1 else (),
        apart=len(groups),
        phase=phase,
    )


def _check_read_by_gradients(
    kept: Mapping[str, Sequence[Any]], inputs: _Inputs, nodes: Sequence[Node], name: str
) -> None:
    """Raise CaptureError where a custom gradient reads a variable that one of ``nodes`` writes: the order is not known.

    ``kept``: see ``_Trace``.
    """
    for node in (node for node in nodes if node.effect is Effect.WRITE):
        for op, tensors in kept.items():
            read = {read_value(tensor, inputs.nodes).node for tensor in tensors if tensor.dtype == tf.resource}
            if found := sorted(read.intersection(node.strings("writes"))):
                place = internals.user_place(tensors[0].graph.get_operation_by_name(op)) or name
                raise CaptureError(
                    f"{place}: a custom gradient reads the variable {found[0]!r}, which is written before the "
                    "gradients are taken: read the variable in the forward (value = tf.identity(variable)), and use "
                    "this value in the gradient"
                )


def _loss_of(func_graph: Any, targets: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the loss from which backward starts, and the terms of it that are the targets.

    A target may be part of another one. So a term is an op of its own, at which the gradients of the others end.
    """
    if len(targets) == 1:
        return targets[0], [targets[0]]
    with func_graph.as_default(), tf.name_scope("targets"):
        terms = [tf.raw_ops.Mul(x=target, y=tf.ones([], target.dtype)) for target in targets]
        return tf.raw_ops.AddN(inputs=terms), terms


@dataclass(frozen=True)
class _Trace:
    """The trace of a training step, as it is read into the IR. ``arguments``: the number of the batch's tensors.

    ``kept``: the tensors of the forward that custom gradients use, by the name of the op that has the gradient.
    """

    func_graph: Any
    recorder: _LayerRecorder
    arguments: int
    name: str
    calls: Sequence[TapeCall]
    kept: Mapping[str, Sequence[Any]]

    def read(self, left_out: frozenset[str], of_targets: Sequence[Sequence[TapeCall]] = ()) -> tuple[_Inputs, Graph]:
        """Return the inputs, gradients included, and the graph, without the ops ``left_out``.

        ``of_targets``: the calls of the targets whose gradients are to be told apart.
        """
        inputs = _read_inputs(self.func_graph, self.arguments, self.name)
        _add_gradients(inputs, of_targets or [self.calls])
        graph = read_graph(self.func_graph, inputs.nodes, self.name, left_out)
        return inputs, self.recorder.mark_layers(graph, self.func_graph)

    def asked(self, calls: Sequence[TapeCall], inputs: _Inputs) -> Asked:
        """Return the gradients that the ``calls`` with one target ask for."""
        node_of, names = self.node_of(inputs), {id(v.handle): label for label, v in inputs.variables.items()}
        _check_recorded(calls)
        return Asked(
            (read_value(calls[0].target, inputs.nodes),),
            frozenset(node_of[p.op.name] for call in calls for g in call.gradients for _, p in g.placeholders),
            frozenset(names[id(gradient.variable.handle)] for call in calls for gradient in call.gradients),
            calls[0].first_op,
            frozenset(calls[0].unrecorded),
            calls[0].place,
            self.values_kept(inputs),
        )

    def values_kept(self, inputs: _Inputs) -> dict[str, list[Value]]:
        """Return the values of the forward that the custom gradient of each node uses."""
        return {op: [read_value(tensor, inputs.nodes) for tensor in tensors] for op, tensors in self.kept.items()}

    def phases(
        self, groups: Sequence[Sequence[TapeCall]], left_out: frozenset[str], *, joined: bool
    ) -> list[list[Sequence[TapeCall]]]:
        """Return the calls of each phase by target; ``groups``: those of each target.

        Raises RowlessTargetsError where the gradients of some of them need no rows.
        """
        if len(groups) == 1:
            return [[calls] for calls in groups]
        inputs, graph = self.read(left_out)
        asked = [self.asked(calls, inputs) for calls in groups]
        rowless = rowless_targets(graph, asked)
        if 0 < len(rowless) < len(groups):
            raise RowlessTargetsError(frozenset(call.number for i in rowless for call in groups[i]))
        if not joined:
            return [[calls] for calls in groups]
        node_of = self.node_of(inputs)
        numbers = {node_of[op.name]: i for i, op in enumerate(self.func_graph.get_operations())}
        found = join_targets(graph, asked, numbers)
        return [[groups[i] for i in members] for members in found]

    def node_of(self, inputs: _Inputs) -> dict[str, str]:
        """Return the name of the node of each op."""
        names = (op.name for op in self.func_graph.get_operations())
        return {name: inputs.nodes[name].name if name in inputs.nodes else name for name in names}

    def place_of(self, inputs: _Inputs) -> Callable[[str], str]:
        """Return the function that returns the file and line of a node."""
        node_of = self.node_of(inputs)
        of_node = {node_of[op.name]: op for op in self.func_graph.get_operations()}
        return lambda node: _place_of(node, of_node) or self.name


def _hand_over(
    trace: _Trace,
    groups: Sequence[Sequence[Sequence[TapeCall]]],
    left_out: frozenset[str],
    returned: Sequence[Any],
    number: int,
    shared: HandOver,
) -> tuple[PhaseOfStep, frozenset[str], frozenset[str], list[Any]]:
    """Change the trace so that it takes and gives what the phase ``number`` takes of others and gives to others.

    ``groups``: the calls of each phase, by target. Return the phase, the names of the ops that read what it takes,
    those of all ops that are not part of it, and what it gives of the tensors ``returned``, the others as None.
    """
    func_graph = trace.func_graph
    inputs, graph = trace.read(left_out)
    operations, node_of = func_graph.get_operations(), trace.node_of(inputs)
    asked = [join_asked([trace.asked(calls, inputs) for calls in of_targets]) for of_targets in groups]
    values = [None if tensor is None else read_value(tensor, inputs.nodes) for tensor in returned]
    places = {node_of[op.name]: i for i, op in enumerate(operations)}
    phases = cut_phases(graph, asked, places, values, trace.place_of(inputs))
    phase = phases[number]
    arguments = {tensor.op.name for tensor in func_graph.inputs[: trace.arguments]}
    others = left_out | {op.name for op in operations if node_of[op.name] not in phase.kept} - arguments
    inside = {node.name: op for op, node in inputs.nodes.items()}

    def tensor_of(value: Value) -> Any:
        return func_graph.get_tensor_by_name(tensor_name(Value(inside.get(value.node, value.node), value.index)))

    def variables_of(values: Sequence[Value]) -> list[tuple[Any, tf.Variable]]:
        return [(tensor, shared.variable_of(tensor)) for tensor in map(tensor_of, values)]

    taken, given = variables_of(phase.taken), variables_of(phase.given)
    reads: set[str] = set()
    with func_graph.as_default(), tf.name_scope(f"{HANDED_OVER}/"):
        for tensor, variable in taken:
            func_graph.watch_variable(variable)
            read = tf.raw_ops.ReadVariableOp(
                resource=internals.capture_of(func_graph, variable.handle), dtype=variable.dtype
            )
            read.set_shape(tensor.shape)
            reads.add(read.op.name)
            internals.replace_tensor(tensor, read)
        for tensor, variable in given:
            func_graph.watch_variable(variable)
            handle = internals.capture_of(func_graph, variable.handle)
            tf.raw_ops.AssignVariableOp(resource=handle, value=tensor)
    handed = {id(variable): key for key, variable in shared.variables.items()}
    of_step = PhaseOfStep(
        number,
        len(phases),
        _digest(operations),
        frozenset(handed[id(variable)] for _, variable in taken),
        frozenset(handed[id(variable)] for _, variable in given),
        frozenset(id(inputs.variables[name]) for name in written_variables(graph) if name in inputs.variables)
        | handed.keys(),
    )
    own = [tensor if i in phase.returned else None for i, tensor in enumerate(returned)]
    return of_step, frozenset(reads), others, own


def _digest(operations: Sequence[Any]) -> str:
    """Return a digest of a trace: the names and types of its ops, and its constants."""
    digest = hashlib.sha256()
    for op in operations:
        digest.update(f"{op.name} {op.type}\n".encode())
        if op.type == "Const":
            digest.update(op.get_attr("value").SerializeToString(deterministic=True))
    return digest.hexdigest()


def _place_of(node: str, operations: Mapping[str, Any]) -> str:
    """Return the file and line of a node, "" where they are not known; that of a branch's node is its condition's."""
    node = re.split(r"\.(?:then|else)_branch/", node)[0]
    return internals.user_place(operations[node]) if node in operations else ""


def _error_of_step(name: str, error: Exception) -> Exception:
    """Return the error to raise where a training step cannot be traced: one of dapple_tf's own stays as it is."""
    place = internals.user_place_of_error(error.__cause__ or error)
    prefix = f"{place}: " if place and place not in str(error) else ""
    if isinstance(error, DappleError):
        return type(error)(f"{prefix}{error}")
    return CaptureError(
        f"{prefix}{name} cannot be traced: {error}. Gradients and losses have no values while a "
        "step is traced: let no Python code depend on them (tf.cond in place of `if`, no .numpy())"
    )


def _check_recorded(calls: Sequence[TapeCall]) -> None:
    """Raise CaptureError where the tapes of ``calls`` with one target have recorded different ops before it."""
    first, *others = calls
    needed = {op.name for op in ops_before(first.target)} if others else set[str]()
    for call in others:
        if call.unrecorded & needed != first.unrecorded & needed:
            raise CaptureError(
                f"{call.place}: the step takes gradients of one target from tapes that have recorded different ops "
                f"than the one at {first.place}: take them from one persistent tape"
            )


def _add_gradients(inputs: _Inputs, of_targets: Sequence[Sequence[TapeCall]]) -> None:
    """Add the placeholders of gradients to the inputs of a trace; ``of_targets``: the calls of each target."""
    labels = {id(variable.handle): name for name, variable in inputs.variables.items()}
    known: set[str] = set()
    for number, calls in enumerate(of_targets):
        own = inputs.gradients.setdefault(number, set())
        for gradient in (gradient for call in calls for gradient in call.gradients):
            variable = labels[id(gradient.variable.handle)]
            name = of_target(number, variable) if variable in known else variable
            own.add(name)
            for role, placeholder in gradient.placeholders:
                attrs = attributes({"port": name, "role": role})
                inputs.nodes[placeholder.op.name] = Node(f"{role}/{placeholder.op.name}", "arg", attrs=attrs)
        known |= own


def _returned(concrete: Any, name: str) -> tuple[list[Any], Any]:
    """Return the flattened tensors that a trace returns, None where the function returns None, and their nesting."""
    structure = concrete.structured_outputs
    leaves = tf.nest.flatten(structure)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, tf.TensorSpec | tf.Tensor):
            raise CaptureError(f"{name} returns a {type(leaf).__name__}: a training step returns tensors, or None")
    tensors = iter(concrete.graph.outputs)
    return [None if leaf is None else skip_identities(next(tensors)) for leaf in leaves], structure


def read_again(captured: Captured, loss: Any, rows: Any) -> Captured:
    """Return ``captured`` after ops were added to its trace: ``loss`` is its loss, and ``rows`` a further input."""
    tensors = CapturedTensors(captured)
    inputs = {**tensors.inputs, rows.op.name: Node(ROWS_NAME, ROWS_OP)}
    graph = read_graph(captured.func_graph, inputs, captured.graph.name, captured.left_out)
    nodes = tuple(captured.graph.by_name.get(node.name, node) for node in graph.nodes)
    outputs = (read_value(loss, inputs), *captured.graph.outputs[1:])
    graph = graph.replace(nodes=nodes, inputs=captured.graph.inputs, outputs=outputs)
    return replace(captured, graph=graph, rows=rows)


def _trace(
    function: Any, name: str, batch: Sequence[Any], specs: tuple[tf.TensorSpec, ...], *, sized: bool
) -> tuple[Any, _LayerRecorder, tuple[tf.TensorSpec, ...]]:
    """Return the trace of a tf.function, the Keras layers recorded meanwhile, and the specs that it was made for.

    Raises CaptureError as ``capture`` does.
    """

    def trace(specs: Sequence[tf.TensorSpec]) -> tuple[Any, _LayerRecorder]:
        recorder = _LayerRecorder()
        arguments = tf.nest.pack_sequence_as(tuple(batch), list(specs))
        with internals.record_layers(recorder):
            return internals.clone_function(function).get_concrete_function(*arguments), recorder

    try:
        return *trace(specs), specs
    except (TypeError, ValueError) as error:
        known = tuple(tf.TensorSpec((batch_size(batch), *spec.shape[1:]), spec.dtype) for spec in specs)
        try:
            found = *trace(known), known
        except (TypeError, ValueError):
            raise CaptureError(f"{name} cannot be traced: {error}{_hint(batch, error)}") from error
        if sized:
            return found
        raise CaptureError(
            f"{name} cannot be traced with an unknown batch size on axis 0 ({specs}): {error}. Where it uses "
            "x.shape[0], let it use tf.shape(x)[0]; or use micro_batches=1 and one replica of each stage"
        ) from error


def _hint(batch: Sequence[Any], error: Exception) -> str:
    nested = len(batch) == 1 and isinstance(batch[0], tuple | list) and isinstance(error, TypeError)
    return ". The batch is one tuple: give its tensors one by one, step(*batch)" if nested else ""


def _check_signature(function: Any) -> None:
    signature = internals.input_signature(function)
    for spec in tf.nest.flatten(signature or ()):
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] is not None:
            raise CaptureError(
                f"the function's input_signature fixes axis 0 to {spec.shape[0]}; micro-batches need it to be None"
            )


def _function_name(function: Any) -> str:
    python = getattr(function, "python_function", function)
    name = getattr(python, "__name__", type(python).__name__)
    return "".join(c if c.isalnum() or c in "_.-" else "_" for c in str(name)).strip("_") or "loss"


def _loss_and_aux(concrete: Any, name: str) -> tuple[list[Any], Any]:
    """Return the flattened output tensors of a trace, the loss first, and the nesting of the aux outputs."""
    result = concrete.structured_outputs
    loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(loss, tf.TensorSpec | tf.Tensor):
        raise LossError(
            f"{name} must return a scalar loss, or (loss, aux), but returns {type(loss).__name__}; a whole training "
            "step, which takes gradients by itself, is for dapple.train_step"
        )
    if loss.shape.rank != 0:
        raise LossError(
            f"the loss of {name} has shape {loss.shape}, not (): return its mean over the batch (tf.reduce_mean)"
        )
    if not loss.dtype.is_floating:
        raise LossError(f"the loss of {name} is {loss.dtype.name}, not a float")
    tensors = [skip_identities(tensor) for tensor in concrete.graph.outputs]
    if len(tensors) != 1 + len(tf.nest.flatten(aux) if aux is not None else []):
        raise CaptureError(f"every output of {name} must be a tensor")
    return tensors, aux


def _small_constants(func_graph: Any) -> list[tuple[str, Any]]:
    """Return the tensors from outside of which TensorFlow made a Const in the trace, each with a name for its node.

    TensorFlow's own names of these differ from process to process.
    """
    found = [tensor for _, tensor in func_graph.captures if tensor.op.type == "Const"]
    return [(f"constant/{i}", tensor) for i, tensor in enumerate(found)]


@dataclass
class _Inputs:
    """The inputs of a trace. ``nodes``: the input nodes by the name of the placeholder they replace.

    ``gradients``: the names of the gradients by each target.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    variables: dict[str, tf.Variable] = field(default_factory=dict)
    trainable: list[str] = field(default_factory=list)
    constants: dict[str, tf.Tensor] = field(default_factory=dict)
    gradients: dict[int, set[str]] = field(default_factory=dict)


def _read_inputs(func_graph: Any, arguments: int, name: str) -> _Inputs:
    """Return the inputs of a trace: its first ``arguments`` inputs are the batch's tensors, the others captures.

    ``name``: of the function, for errors. Raises CaptureError for a captured resource that is neither a variable nor a
    lookup table that is only read.
    """
    found = _Inputs()
    for i, tensor in enumerate(func_graph.inputs[:arguments]):
        found.nodes[tensor.op.name] = Node(f"input/{i}", "arg", attrs=attributes({"port": f"input/{i}"}))
    by_handle = {id(variable.handle): variable for variable in func_graph.variables}
    unknown = [t for t, _ in func_graph.captures if t.dtype == tf.resource and id(t) not in by_handle]
    by_handle |= {id(variable.handle): variable for variable in internals.variables_of_handles(unknown)}
    trainable = _trainable_variables(func_graph)
    # A variable may have the name of an op.
    op_names = {op.name for op in func_graph.get_operations() if op.type != "Placeholder"}
    for label, tensor in _small_constants(func_graph):
        attrs = {key: read_attribute(value) for key, value in tensor.op.node_def.attr.items()}
        found.nodes[tensor.op.name] = Node(label, "Const", attrs=attributes(attrs))
    for outside, placeholder in func_graph.captures:
        if placeholder.op.name in found.nodes:
            continue
        variable = by_handle.get(id(outside))
        if variable is not None:
            label = unique_name(internals.variable_name(variable), op_names | found.variables.keys())
            found.variables[label] = variable
            found.nodes[placeholder.op.name] = Node(label, "variable")
            if id(variable) in trainable:
                found.trainable.append(label)
        elif outside.dtype == tf.resource and (misuse := find_misuse(placeholder)):
            raise CaptureError(
                f"{name} uses a resource that is neither a tf.Variable nor a lookup table that it only reads "
                f"({placeholder.name}, used by the op {misuse}; perhaps a dataset, an iterator, or a table that is "
                "written): pass the values that it gives as an argument instead"
            )
        else:
            label = f"capture/{len(found.constants)}"
            found.nodes[placeholder.op.name] = Node(label, "capture")
            found.constants[label] = outside
    return found


def _in_order(inputs: _Inputs, loss_fn: Callable[..., Any]) -> list[str]:
    """Return the names of the variables to train; those that ``loss_fn`` names, where it does (``TRAINED``)."""
    if not hasattr(loss_fn, TRAINED):
        return inputs.trainable
    wanted = [id(internals.as_tf_variable(variable)) for variable in getattr(loss_fn, TRAINED)()]
    names = {id(inputs.variables[name]): name for name in inputs.trainable}
    return [names[item] for item in wanted if item in names]


def _trainable_variables(func_graph: Any) -> set[int]:
    """Return the ids of the variables to train: freezing a Keras layer marks Keras's variables, not TensorFlow's."""
    variables = list(func_graph.trainable_variables)
    wrappers = internals.keras_variables(variables)
    return {id(variable) for variable, wrapper in zip(variables, wrappers, strict=True) if wrapper.trainable}


# --- Find out which Keras layer created each op of a trace


@dataclass
class _OpenCall:
    """A layer's call that has not returned: its graph and the number of ops there when it began."""

    layer: keras.Layer
    graph: Any
    first_op: int
    calls_layers: bool = False


@dataclass(frozen=True)
class _Call:
    """A layer's call: the ops ``first_op`` to ``end_op`` (exclusive) of ``graph``.

    ``path`` holds the names of the layer and of those that called it. A ``container`` calls other layers, or is a
    model. ``batch_norm``: the number of the call among those of ``keras.layers.BatchNormalization`` layers, or None.
    """

    graph: Any
    first_op: int
    end_op: int
    path: str
    container: bool
    batch_norm: int | None


class _LayerRecorder:
    """Records which ops of a trace each Keras layer's call created; for ``internals.record_layers``."""

    def __init__(self) -> None:
        self._open: list[_OpenCall] = []
        self._calls: list[_Call] = []
        self._batch_norms = 0

    def __call__(self, layer: keras.Layer, entering: bool) -> None:
        graph = tf.compat.v1.get_default_graph()
        count = len(graph.get_operations()) if graph.building_function else 0
        if entering:
            if self._open and self._open[-1].graph is graph:
                self._open[-1].calls_layers = True
            self._open.append(_OpenCall(layer, graph, count))
            return
        path = "/".join(call.layer.name for call in self._open)
        call = self._open.pop()
        container = call.calls_layers or isinstance(layer, keras.Model)
        batch_norm = None
        if isinstance(layer, keras.layers.BatchNormalization):
            batch_norm, self._batch_norms = self._batch_norms, self._batch_norms + 1
        self._calls.append(_Call(graph, call.first_op, count, path, container, batch_norm))

    def mark_layers(self, graph: Graph, func_graph: Any) -> Graph:
        """Return ``graph``, read from ``func_graph``, with each node's Keras layer as an attribute.

        ``layer``: the path of the innermost layer whose call created the op. Where that layer contains others, the
        attribute is called ``within``. ``batch_norm``, for the ops of batch normalization: the number of the call.
        """
        operations = func_graph.get_operations()
        calls = {op.name: call for op, call in zip(operations, self._innermost(func_graph), strict=True)}
        nodes = []
        for node in graph.nodes:
            call = calls.get(node.name)
            if call is not None and call.path:
                node = node.with_attrs(within=call.path) if call.container else node.with_attrs(layer=call.path)
                node = node if call.batch_norm is None else node.with_attrs(batch_norm=call.batch_norm)
            nodes.append(node)
        return dataclasses.replace(graph, nodes=tuple(nodes))

    def _innermost(self, func_graph: Any) -> Sequence[_Call | None]:
        """Return the innermost call that created each op of ``func_graph``.

        Calls in the body of a loop belong to the body's graph, not to this one.
        """
        found: list[_Call | None] = [None] * len(func_graph.get_operations())
        for call in reversed(self._calls):  # an inner call returns, and is recorded, before the outer one
            if call.graph is func_graph:
                found[call.first_op : call.end_op] = [call] * (call.end_op - call.first_op)
        return found
