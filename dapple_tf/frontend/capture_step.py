"""Read the trace of a training step into the IR: its loss, the part after the gradients, and its phases."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError, DappleError
from dapple_tf.frontend.additions import read_additions
from dapple_tf.frontend.after_gradients import loss_nodes, part_step
from dapple_tf.frontend.captured import (
    Captured,
    PhaseOfStep,
    RowlessTargetsError,
    SeveralPhasesError,
    Target,
    TrainingStep,
)
from dapple_tf.frontend.dependence.custom_gradients import check_read_by_gradients
from dapple_tf.frontend.layer_calls import LayerRecorder
from dapple_tf.frontend.names import tensor_name
from dapple_tf.frontend.phases import (
    HANDED_OVER,
    Asked,
    HandOver,
    StepTrace,
    cut_phases,
    join_asked,
    join_targets,
    rowless_targets,
    unrecorded_of,
)
from dapple_tf.frontend.read_graph import node_name, read_graph, read_value, skip_identities
from dapple_tf.frontend.tape_calls import TapeCall, ops_before
from dapple_tf.frontend.trace_inputs import TraceInputs, read_inputs
from dapple_tf.graph_passes.analysis.layers import written_variables
from dapple_tf.graph_passes.ir.graph import Node, Value, attributes
from dapple_tf.graph_passes.ir.names import of_target, without_target


def read_step(
    concrete: Any,
    recorder: LayerRecorder,
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
    inputs, read = trace.read(left_out, of_targets)
    graph, first_op = read.graph, of_targets[0][0].first_op
    loss = read_value(target, inputs.nodes)
    values = [read_value(term, inputs.nodes) for term in terms]
    results = [None if tensor is None else read_value(tensor, inputs.nodes) for tensor in returned]
    after = part_step(read, inputs, loss, first_op, results, structure, handed_over)
    if not after.trained:
        raise CaptureError(f"{name} uses none of the gradients that it takes, so there is nothing to train")
    before = [node for node in graph.nodes if node.name not in after.nodes or read.numbers[node.name] < first_op]
    check_read_by_gradients(trace.kept, inputs, before, name)
    members = loss_nodes(after, read.kept)
    gradients = [{without_target(of): of for of in after.trained if of in names} for names in inputs.gradients.values()]
    asked = [trace.asked(calls, inputs) for calls in of_targets]
    unrecorded = [unrecorded_of(read, item) for item in asked]
    graph = graph.replace(
        nodes=tuple(node for node in graph.nodes if node.name in members),
        inputs=tuple(inputs.nodes[tensor.op.name].name for tensor in func_graph.inputs[: len(specs)]),
        outputs=after.whole,
    )
    graph = read_additions(graph, after.whole)
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
        left_out=frozenset(trace.ops_without(members, inputs)),
        unrecorded=frozenset().union(*unrecorded),
        several=tuple(several) if len(of_targets) > 1 else (),
        apart=len(groups),
        phase=phase,
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
    recorder: LayerRecorder
    arguments: int
    name: str
    calls: Sequence[TapeCall]
    kept: Mapping[str, Sequence[Any]]

    def read(
        self, left_out: frozenset[str], of_targets: Sequence[Sequence[TapeCall]] = ()
    ) -> tuple[TraceInputs, StepTrace]:
        """Return the inputs, gradients included, and the trace in the IR, without the ops ``left_out``.

        ``of_targets``: the calls of each target whose gradients are computed apart from the others'.
        """
        inputs = read_inputs(self.func_graph, self.arguments, self.name)
        _add_gradients(inputs, of_targets or [self.calls])
        graph = read_graph(self.func_graph, inputs.nodes, self.name, left_out)
        operations = self.func_graph.get_operations()
        of_node = {node_name(op.name, inputs.nodes): op for op in operations}
        trace = StepTrace(
            self.recorder.mark_layers(graph, self.func_graph),
            {node_name(op.name, inputs.nodes): i for i, op in enumerate(operations)},
            lambda node: _place_of(node, of_node) or self.name,
            {op: [read_value(tensor, inputs.nodes) for tensor in tensors] for op, tensors in self.kept.items()},
        )
        return inputs, trace

    def ops_without(self, nodes: Set[str], inputs: TraceInputs) -> set[str]:
        """Return the names of the ops that are not these ``nodes`` of the graph."""
        names = (op.name for op in self.func_graph.get_operations())
        return {name for name in names if node_name(name, inputs.nodes) not in nodes}

    def asked(self, calls: Sequence[TapeCall], inputs: TraceInputs) -> Asked:
        """Return the gradients that the ``calls`` with one target ask for."""
        names = {id(v.handle): label for label, v in inputs.variables.items()}
        placeholders = [p for call in calls for gradient in call.gradients for _, p in gradient.placeholders]
        _check_recorded(calls)
        return Asked(
            (read_value(calls[0].target, inputs.nodes),),
            frozenset(node_name(placeholder.op.name, inputs.nodes) for placeholder in placeholders),
            frozenset(names[id(gradient.variable.handle)] for call in calls for gradient in call.gradients),
            calls[0].first_op,
            frozenset(calls[0].unrecorded),
            calls[0].place,
        )

    def phases(
        self, groups: Sequence[Sequence[TapeCall]], left_out: frozenset[str], *, joined: bool
    ) -> list[list[Sequence[TapeCall]]]:
        """Return the calls of each phase by target; ``groups``: those of each target.

        Raises RowlessTargetsError where the gradients of some of them need no rows.
        """
        if len(groups) == 1:
            return [[calls] for calls in groups]
        inputs, trace = self.read(left_out)
        asked = [self.asked(calls, inputs) for calls in groups]
        rowless = rowless_targets(trace, asked)
        if 0 < len(rowless) < len(groups):
            raise RowlessTargetsError(frozenset(call.number for i in rowless for call in groups[i]))
        if not joined:
            return [[calls] for calls in groups]
        return [[groups[i] for i in members] for members in join_targets(trace, asked)]


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
    inputs, whole = trace.read(left_out)
    operations = func_graph.get_operations()
    asked = [join_asked([trace.asked(calls, inputs) for calls in of_targets]) for of_targets in groups]
    values = [None if tensor is None else read_value(tensor, inputs.nodes) for tensor in returned]
    phases = cut_phases(whole, asked, values)
    phase = phases[number]
    arguments = {tensor.op.name for tensor in func_graph.inputs[: trace.arguments]}
    others = left_out | trace.ops_without(phase.kept, inputs) - arguments
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
        frozenset(id(inputs.variables[name]) for name in written_variables(whole.graph) if name in inputs.variables)
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


def error_of_step(name: str, error: Exception) -> Exception:
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
    needed = ops_before([first.target]).keys() if others else set[str]()
    for call in others:
        if call.unrecorded & needed != first.unrecorded & needed:
            raise CaptureError(
                f"{call.place}: the step takes gradients of one target from tapes that have recorded different ops "
                f"than the one at {first.place}: take them from one persistent tape"
            )


def _add_gradients(inputs: TraceInputs, of_targets: Sequence[Sequence[TapeCall]]) -> None:
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
