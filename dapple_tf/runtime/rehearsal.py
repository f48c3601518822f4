"""Runs of a recorded step before its first real one: to warm it up, and to measure its memory.

The first run of a program takes several times as long as the next ones, for TensorFlow sets up its functions, and the
measurement of memory slows a run down by up to a quarter. A rehearsal runs the step twice on the same batch and puts
all variables back, so that the times of the first recorded step are those of any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorflow.core.framework import function_pb2

from dapple_tf.frontend.read_graph import find_stateful_ops
from dapple_tf.memory.meter import MeasuredMemory, MemoryMeter
from dapple_tf.runtime.compile_step import CompiledStep
from dapple_tf.staged_model import StagedModel
from graph_passes.ir.graph import Attr, Effect, FunctionRef, Graph, Node


def can_rehearse(model: StagedModel) -> bool:
    """Return whether restoring the variables undoes all that a step of ``model`` does.

    It does not undo prints, Python code and draws from the hidden state of a random generator. On all ranks of a job
    the result is the same.
    """
    library = {name: function_pb2.FunctionDef.FromString(body) for name, body in model.library.items()}
    return not any(_is_permanent(node, library) for graph in _function_graphs(model) for node in graph.nodes)


def rehearse(compiled: CompiledStep, batch: Sequence[Any], devices: Sequence[str]) -> tuple[MeasuredMemory, ...]:
    """Run the step twice on the batch's flattened tensors, without effect; return the memory of the second run.

    ``devices``: names of those whose memory is measured. In a job every rank must call it. Raises StepError if the step
    fails; the variables are put back then too.
    """
    program, variables = compiled.program, compiled.planned.model.variables.values()
    # Each run starts from the same variables as the real step: it fails only where the real step fails too.
    with program.rehearsal(variables):
        program.run(batch)
    with program.rehearsal(variables), MemoryMeter(devices) as meter:
        program.run(batch)
    return meter.measured


def _function_graphs(model: StagedModel) -> Iterator[Graph]:
    yield from (function.graph for function in model.graph.functions)
    if model.updates is not None:
        yield from (function.graph for function in model.updates.functions)


def _is_permanent(node: Node, library: Mapping[str, Any]) -> bool:
    """Return whether the node has an effect other than on variables.

    A call has the effects of the ops inside; its own effect is only the strongest of them.
    """
    if node.effect in (Effect.PURE, Effect.READ, Effect.JOIN):
        return False
    called = [name for _, value in node.attrs for name in _function_names(value)]
    if called:
        return any(_acts_outside(op) for op in find_stateful_ops(called, library))
    return node.effect != Effect.WRITE and _acts_outside(node.op)


def _function_names(value: Attr) -> list[str]:
    """Return the names of the functions in the value of an attribute: the body of a While, the branches of a Case."""
    if isinstance(value, tuple):
        return [name for item in value for name in _function_names(item)]
    return [value.name] if isinstance(value, FunctionRef) else []


def _acts_outside(op: str) -> bool:
    """Return whether a stateful op type does more than write variables; an assertion does nothing unless it fails."""
    return op != "Assert" and not op.startswith(("Assign", "Resource"))
