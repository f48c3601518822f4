"""Differentiate each stage, the last one first, in the graph that the user's function was traced into.

Custom gradients close over tensors of that graph, so working in it keeps them, control flow and nested functions
intact. The gradient of each boundary tensor is a placeholder, which the next stage fills. DAPPLE, section V.A.1: no
backward graph before all forward graphs; then backward graphs in reverse order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from dapple_tf import internals
from dapple_tf.errors import CaptureError
from dapple_tf.exactness import Inexactness
from dapple_tf.frontend.additions import read_additions
from dapple_tf.frontend.batch_norms import mark_joins
from dapple_tf.frontend.captured import Captured, CapturedTensors, Target
from dapple_tf.frontend.deferred_statistics import drop_nodes
from dapple_tf.frontend.read_graph import read_graph
from dapple_tf.frontend.rows import use_rows
from dapple_tf.frontend.sparse_gradients import find_uses, read_uses
from dapple_tf.graph_passes.analysis.layers import dependents, variables_of
from dapple_tf.graph_passes.ir.graph import Effect, FunctionRef, Graph, Node, Value, ancestors
from dapple_tf.graph_passes.ir.names import of_target, without_target
from dapple_tf.graph_passes.passes.backward import StageGradients
from dapple_tf.graph_passes.passes.combine_statistics import COMBINES
from dapple_tf.graph_passes.passes.partition import Stage, StageGraph

_ACTING = (Effect.WRITE, Effect.SIDE)

_KEPT_ATTRIBUTES = frozenset({"adds", COMBINES})


def differentiate(
    captured: Captured, stages: StageGraph, *, sparse: bool = True, scaled: bool = False
) -> tuple[Graph, tuple[StageGradients, ...]]:
    """Return the joint graph of forward and backward, and the gradients of each stage, then of the loss head if any.

    ``sparse``: IndexedSlices stay as they are, as far as TensorFlow keeps them; otherwise all gradients are dense.
    ``scaled``: the gradients are those of the loss times a factor, from which a loss head starts too.
    Raises CaptureError for a tf.py_function between a trainable variable and the loss, and what
    ``_check_backward_writes`` raises.
    """
    tensors = CapturedTensors(captured)
    trained = [_depend_on_training(captured, target) for target in captured.targets]
    for node in captured.graph.nodes:
        if node.op == "EagerPyFunc" and any(node.name in of_target for of_target in trained) and not captured.uncut:
            raise CaptureError(
                f"{node.name!r} is a tf.py_function between a variable and the loss. All its calls share one tape, so "
                "micro-batches would take each other's gradients: write it in TensorFlow ops, or give "
                "tf.numpy_function a tf.custom_gradient"
            )
    found: list[_StageResult] = []
    differentiated: Collection[Value] = ()  # boundary tensors for which the next stage sends a gradient
    if stages.layers.loss_head:
        with captured.func_graph.as_default(), tf.name_scope("loss_head_gradients"):
            result = _differentiate_loss_head(captured, stages, tensors, trained[0], scaled)
        found.append(result)
        differentiated = {value for value, _ in found[0].boundary}
    for stage in reversed(stages.stages):
        with captured.func_graph.as_default(), tf.name_scope(f"stage{stage.index}_gradients"):
            result = _differentiate_stage(captured, stages, stage, differentiated, tensors, trained)
        found.append(result)
        differentiated = {value for value, _ in result.boundary}
    found.reverse()
    with captured.func_graph.as_default():
        # TensorFlow changes ops that call functions each time it differentiates them.
        calls = any(isinstance(value, FunctionRef) for node in captured.graph.nodes for _, value in node.attrs)
        whole = None if calls else partial(_differentiate_whole, captured, tensors)
        variables = {name: captured.variables[without_target(name)] for name in captured.trainable}
        uses = find_uses([result.variables for result in found], captured.graph.by_name, whole) if sparse else {}
        dense = [
            [(name, tf.convert_to_tensor(gradient)) for name, gradient in result.variables if name not in uses]
            for result in found
        ]
    _check_captures(captured, tensors)
    joint = read_graph(captured.func_graph, tensors.inputs, captured.graph.name, captured.left_out)
    joint = use_rows(read_additions(joint, captured.graph.outputs), captured.dependence)
    joint = mark_joins(drop_nodes(_described_as_in(captured.graph, joint), captured.dropped), captured.graph)
    by_stage = [read_uses(joint, uses, i, variables, tensors.value, stages.layers.once) for i in range(len(found))]
    gradients = tuple(
        StageGradients(
            result.seeds,
            result.boundary,
            tuple((name, tensors.value(gradient)) for name, gradient in dense[i]),
            by_stage[i],
            tuple(n.name for n in joint.nodes if n.effect in _ACTING and n.name in result.added),
        )
        for i, result in enumerate(found)
    )
    _check_backward_writes(captured, joint, gradients)
    return joint, gradients


def _check_captures(captured: Captured, tensors: CapturedTensors) -> None:
    """Raise CaptureError where only gradients use a variable or a tensor from outside of the trace."""
    read = (op for op in captured.func_graph.get_operations() if op.name not in captured.left_out)
    unknown = {tensor.op.name for op in read for tensor in op.inputs} - tensors.inputs.keys()
    for outside, placeholder in captured.func_graph.captures:
        if placeholder.op.name in unknown:
            names = [internals.variable_name(variable) for variable in internals.variables_of_handles([outside])]
            raise CaptureError(
                f"in a tf.function that {captured.graph.name!r} calls, a custom gradient uses a variable or tensor "
                f"that nothing else uses ({names[0] if names else outside.shape}): read it in the forward there "
                "(value = tf.identity(variable)), and use this value in the gradient"
            )


def _differentiate_whole(captured: Captured, tensors: CapturedTensors, name: str) -> Any:
    """Return the gradient ``name`` of the whole loss. It only shows the order of lookups: no stage uses its ops."""
    target = next(target for target in captured.targets if name in target.gradients.values())
    return tf.gradients(tensors[target.value], tensors.handles[without_target(name)], name="whole_gradient")[0]


def _described_as_in(captured: Graph, joint: Graph) -> Graph:
    """Return ``joint`` with what ``captured`` says of its nodes: output types, whose shapes may say more, and marks."""
    nodes = []
    for node in joint.nodes:
        known = captured.by_name.get(node.name)
        if known is not None:
            node = dataclasses.replace(node, outputs=(*known.outputs, *node.outputs[len(known.outputs) :]))
            node = node.with_attrs(**{key: value for key, value in known.attrs if key in _KEPT_ATTRIBUTES})
        nodes.append(node)
    return joint.replace(nodes=tuple(nodes))


def _depend_on_training(captured: Captured, target: Target) -> set[str]:
    """Return the names of the nodes that depend on a variable with a gradient by ``target``: these need gradients.

    No gradient passes through integers, such as the shape of a random draw, nor through what a training step's tape did
    not record. The nodes that draw the rows of a micro-batch are not in the trace.
    """
    return dependents(captured.graph, target.gradients, captured.unrecorded, by_gradients=True)


@dataclass(frozen=True)
class _StageResult:
    """``seeds`` and ``boundary`` of ``StageGradients``; ``variables``: with tensors or IndexedSlices of the trace.

    ``added``: the names of the ops of the trace that differentiation added.
    """

    seeds: tuple[tuple[Value, str], ...] = ()
    boundary: tuple[tuple[Value, Value], ...] = ()
    variables: tuple[tuple[str, Any], ...] = ()
    added: frozenset[str] = frozenset()


def _differentiate_stage(
    captured: Captured,
    stages: StageGraph,
    stage: Stage,
    differentiated: Collection[Value],
    tensors: CapturedTensors,
    trained: Sequence[Collection[str]],
) -> _StageResult:
    """Add the gradient ops of one stage to the trace, for each target.

    ``differentiated``: the boundary tensors whose gradient the next stage sends (see ``of_target``). ``trained``: for
    each target, see ``_depend_on_training``.
    """
    others = {name for other in stages.stages if other.index != stage.index for name in other.nodes}
    loss = captured.graph.outputs[0]
    seeds: dict[Value, Any] = {}
    boundary: list[tuple[Value, Any]] = []
    variables: list[tuple[str, Any]] = []
    before = len(captured.func_graph.get_operations())
    targets = captured.targets
    for number, target in enumerate(targets):
        terms = {other.value for other in targets if other is not target}
        results = {_by_target(number, v): v for v in stage.outputs if _by_target(number, v) in differentiated}
        results |= {loss: loss} if _gives_loss(captured, stages, stage) else {}
        entering = [
            v
            for v in stage.inputs
            if captured.graph.type_of(v).dtype.differentiable and v.node in trained[number] and v not in terms
        ]
        needed = ancestors(captured.graph, [value.node for value in results.values()], stop=others)
        names = [name for name in target.gradients if name in needed]
        sources = [tensors[value] for value in entering] + [tensors.handles[name] for name in names]
        if not results or not sources:
            continue
        for key, value in results.items():
            if key not in seeds:
                place = tf.compat.v1.placeholder
                seeds[key] = place(tensors[value].dtype, tensors[value].shape, name=f"seed{len(seeds)}")
        stops = [tensors[value] for value in (*entering, *terms, *_unrecorded(captured))]
        of_results = [seeds[key] for key in results]
        gradients = _gradients([tensors[value] for value in results.values()], sources, of_results, stops)
        boundary += [(_by_target(number, v), g) for v, g in zip(entering, gradients, strict=False)]
        variables += [(target.gradients[name], g) for name, g in zip(names, gradients[len(entering) :], strict=True)]
    return _result(captured, tensors, before, seeds, boundary, variables)


def _gradients(
    results: Sequence[Any], sources: Sequence[Any], seeds: Sequence[Any] | None, stops: Sequence[Any]
) -> Any:
    """Add the gradients of ``results`` with respect to ``sources``; ``stops``: the tensors at which they end."""
    with internals.stop_gradients_at_calls(stops):
        return tf.gradients(results, sources, grad_ys=seeds, stop_gradients=stops, name="gradients")


def _result(
    captured: Captured,
    tensors: CapturedTensors,
    before: int,
    seeds: Mapping[Value, Any],
    boundary: Sequence[tuple[Value, Any]],
    variables: Sequence[tuple[str, Any]],
) -> _StageResult:
    """Return the result of a differentiation, without gradients that are None; ``before``: the number of ops before."""
    given = tuple((key, tensors.value(tf.convert_to_tensor(g))) for key, g in boundary if g is not None)
    return _StageResult(
        tuple((key, tensors.value(seed).node) for key, seed in seeds.items()),
        given,
        tuple((name, g) for name, g in variables if g is not None),
        frozenset(op.name for op in captured.func_graph.get_operations()[before:]),
    )


def _by_target(number: int, value: Value) -> Value:
    """Return the value whose name is that of the gradient of ``value`` by a target: see ``names.of_target``."""
    return Value(of_target(number, value.node), value.index)


def _gives_loss(captured: Captured, stages: StageGraph, stage: Stage) -> bool:
    """Return whether the stage computes the loss from which backward starts."""
    owner = stages.stage_of(captured.graph.outputs[0].node)
    return not stages.layers.loss_head and (len(stages.stages) - 1 if owner is None else owner) == stage.index


def _differentiate_loss_head(
    captured: Captured, stages: StageGraph, tensors: CapturedTensors, trained: Collection[str], scaled: bool
) -> _StageResult:
    """Add to the trace the gradients of the loss with respect to the inputs and the variables of the loss head."""
    head_inputs = [entry.value for entry in stages.layers.head_inputs]
    entering = [v for v in head_inputs if captured.graph.type_of(v).dtype.differentiable]
    loss = captured.graph.outputs[0]
    needed = ancestors(captured.graph, [loss.node], stop=[value.node for value in head_inputs])
    stops = [tensors[value] for value in (*entering, *_unrecorded(captured))]
    names = [name for name in captured.trainable if name in needed]
    taken = [value for value in entering if value.node in trained]
    sources = [tensors[value] for value in taken] + [tensors.handles[name] for name in names]
    before = len(captured.func_graph.get_operations())
    seeds = {loss: tf.compat.v1.placeholder(tensors[loss].dtype, [], name="seed")} if scaled else {}
    gradients = _gradients([tensors[loss]], sources, [*seeds.values()] or None, stops)
    of_variables = zip(names, gradients[len(taken) :], strict=True)
    return _result(captured, tensors, before, seeds, [*zip(taken, gradients, strict=False)], [*of_variables])


def _unrecorded(captured: Captured) -> list[Value]:
    """Return the values at which gradients end, since the tape of a training step did not record their nodes."""
    nodes = (captured.graph.node(name) for name in sorted(captured.unrecorded) if name in captured.graph.by_name)
    computed = [node for node in nodes if node.inputs]
    return [value for node in computed for value in node.values() if captured.graph.type_of(value).dtype.differentiable]


# --- Writes of variables in backward: in a custom gradient, or in what tf.recompute_grad calls again
# On one device they happen once a step, in the order of the program. In a pipeline they happen once for each
# micro-batch and replica, in an order that only data and control edges fix.


_WRITE_OUTSIDE = (
    "write it in the loss itself, or take micro_batches=1 and one replica of that stage; or pass inexact='allow'"
)


def _check_backward_writes(captured: Captured, joint: Graph, gradients: Sequence[StageGradients]) -> None:
    """Raise CaptureError if backward writes a variable, and no gradient depends on it, or its order is unknown.

    ``joint``: the graph after differentiation; ``gradients``: of its stages, and of the loss head if any.
    """
    for i, of_stage in enumerate(gradients):
        writes = _writes(joint, of_stage)
        if not writes:
            continue
        needed = _needed(joint, of_stage)
        for node in writes:
            if node.name not in needed:
                raise CaptureError(
                    f"{_describe(captured, node)} in a custom gradient or in tf.recompute_grad, and no gradient "
                    "depends on that write, so its order among the other ops of backward is not known: write the "
                    "variable in the loss itself; in place of tf.recompute_grad give recompute=True to the pipeline"
                )
        others = [_needed(joint, other) for j, other in enumerate(gradients) if j != i]
        for node in writes:
            _check_order(captured, joint, node, needed, others)


def find_write_reasons(
    captured: Captured, joint: Graph, gradients: Sequence[StageGradients], users: Mapping[str, Sequence[int]]
) -> tuple[tuple[int, Inexactness], ...]:
    """Return for each write of backward its stage, and why it is inexact if that stage runs it more than once.

    ``gradients``: of stages, without the loss head, which runs once. ``users``: the stages that use each variable.
    Raises CaptureError if several stages use a variable that backward writes.
    """
    found = []
    for stage, of_stage in enumerate(gradients):
        for node in _writes(joint, of_stage):
            what = _describe(captured, node)
            if any(len(users[name]) > 1 for name in node.strings("writes")):
                raise CaptureError(
                    f"{what} in a custom gradient, and other stages use that variable: cut the model elsewhere, or "
                    "write it in the loss itself"
                )
            why = f"{what} once for each micro-batch and replica; one device writes it once a step"
            found.append((stage, Inexactness(node.name, why, _WRITE_OUTSIDE)))
    return tuple(found)


def _writes(joint: Graph, of_stage: StageGradients) -> list[Node]:
    nodes = [joint.node(name) for name in of_stage.acting]
    return [node for node in nodes if node.effect is Effect.WRITE]


def _needed(joint: Graph, of_stage: StageGradients) -> set[str]:
    """Return the nodes that the gradients of a stage depend on."""
    values = [*(value for _, value in of_stage.boundary), *of_stage.of_variables]
    return ancestors(joint, [value.node for value in values])


def _check_order(
    captured: Captured, joint: Graph, write: Node, needed: Collection[str], others: Sequence[Collection[str]]
) -> None:
    """Raise CaptureError if other ops of backward use a variable of ``write`` in an order that is not known.

    On the write's stage: an op that a gradient depends on, where neither it nor the write depends on the other. On
    another stage: any such op. ``needed``: the nodes of the write's stage; ``others``: those of the other stages.
    """
    written, before = set(write.strings("writes")), ancestors(joint, [write.name])
    for node in joint.nodes:
        if node.name in captured.graph.by_name or node.name == write.name:
            continue  # forward has run by then
        if written.isdisjoint(variables_of(joint, node)):
            continue
        ordered = node.name in before or write.name in ancestors(joint, [node.name])
        if (node.name in needed and not ordered) or any(node.name in other for other in others):
            raise CaptureError(
                f"{_describe(captured, write)} in a custom gradient, and {node.name!r} ({node.op}) uses it in backward "
                "too, in an order that is not known: use the value that assign(..., read_value=True) returns, not "
                "another read of the variable, and only in that custom gradient"
            )


def _describe(captured: Captured, node: Node) -> str:
    names = [name for name in node.strings("writes") if name in captured.variables]
    return f"backward writes {', '.join(names) or 'a variable'} ({node.name!r}, {node.op})"
