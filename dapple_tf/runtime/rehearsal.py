"""Runs of a recorded step before its first real one: to warm it up, and to measure its memory.

The first run of a program takes several times as long as the next ones, since TensorFlow sets up its functions, and the
measurement of memory makes a run up to a quarter slower. A rehearsal runs the step twice on the same batch and restores
all variables, so that the first recorded step takes as long as any other.

If ops of a model were classified by experiment, its first run is rehearsed too, to compare its results with the results
of the whole batch before anything is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2

from dapple_tf import internals
from dapple_tf.backend.program import Program
from dapple_tf.backend.saved_variables import unchanged_variables
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import ExactnessError
from dapple_tf.frontend.captured import plain_function
from dapple_tf.frontend.read_graph import find_stateful_ops
from dapple_tf.graph_passes.ir.graph import Attr, Effect, FunctionRef, Graph, Node
from dapple_tf.memory.meter import MeasuredMemory, MemoryMeter
from dapple_tf.runtime.compile_step import CompiledStep, CompiledSteps
from dapple_tf.staged_model import StagedModel
from dapple_tf.timeline.stamps import fill_stamps, first_start, name_stamps


def can_rehearse(model: StagedModel) -> bool:
    """Return whether restoring the variables undoes all effects of a step of ``model``.

    Prints, Python code and draws from the hidden state of a random generator cannot be undone. The result is the same
    on all ranks of a job.
    """
    library = {name: function_pb2.FunctionDef.FromString(body) for name, body in model.library.items()}
    return not any(_is_permanent(node, library) for graph in _function_graphs(model) for node in graph.nodes)


def rehearse(
    program: Program, batch: Sequence[Any], devices: Sequence[str], job: Job
) -> list[tuple[MeasuredMemory, ...]]:
    """Run the step twice on the batch's flattened tensors, without effect; return the memory of each phase.

    It is measured in the second run. The samples have times as fractions of the phase's run: 0 is the start of its
    first action in this process, 1 the end of its last event. ``devices``: names of the devices whose memory is
    measured. In a job every rank must call this. Raises StepError if the step fails; the variables are restored then
    too.
    """
    # Each run starts from the same variables as the real step, so it fails only if the real step fails too.
    with program.rehearsal(program.variables):
        program.run_parts(batch)
    with program.rehearsal(program.variables), MemoryMeter(devices) as meter:
        # No rank sends before all ranks measure: a tensor that arrived before would count as live at the start.
        job.gather(None)
        outputs = program.run_parts(batch)
    found = []
    for part, (*_, times) in zip(program.parts, outputs, strict=True):
        stamps = fill_stamps(name_stamps(part.graph), times.numpy())
        begin, end = first_start(stamps), max(stamp.end for stamp in stamps)
        own = (replace(memory, samples=tuple(_as_fractions(memory.samples, begin, end))) for memory in meter.measured)
        found.append(tuple(map(_peak_of_samples, own) if len(outputs) > 1 else own))
    return found


def _peak_of_samples(memory: MeasuredMemory) -> MeasuredMemory:
    """Return the memory of a phase, whose peak is the highest of its own samples where there are any."""
    if not memory.samples:
        return memory
    return replace(memory, peak_bytes=memory.start_bytes + max(count for _, count in memory.samples))


def _as_fractions(samples: Sequence[tuple[float, int]], begin: float, end: float) -> Iterator[tuple[float, int]]:
    """Yield the samples from ``begin`` to ``end`` with times as fractions of that time; the first one is at 0."""
    before = [count for time, count in samples if time <= begin]
    yield from ((0.0, count) for count in before[-1:])
    yield from (((time - begin) / (end - begin), count) for time, count in samples if begin < time <= end)


def compare_first(
    compiled: CompiledStep,
    known: CompiledSteps,
    tensors: Sequence[Any],
    function: Any,
    arguments: Sequence[Any],
    gather: Callable[[], None],
) -> None:
    """Raise ExactnessError if the first run differs from one device, for a model with ops tried by experiment.

    A run on more samples than before is compared too. A run is not compared if it is known to differ from one device,
    if it cannot be rehearsed, or if it is a window of minibatches. ``function`` takes the ``arguments`` of the whole
    batch, and ``tensors`` are these arguments flattened. The loss is compared, and the other results if the run does
    not train. All variables keep their values. In a job every rank must call this; ``gather`` brings the variables of
    all ranks to this one.
    """
    planned, compared = compiled.planned, known.compared
    exactness, model = planned.exactness, planned.model
    if not exactness.tried or exactness.reasons or exactness.windows:
        return
    if planned.batch_size <= compared.get(id(model), 0):
        return
    if can_rehearse(model):
        gather()
        _compare_with_whole(compiled, tensors, function, arguments)
    compared[id(model)] = planned.batch_size


def _compare_with_whole(
    compiled: CompiledStep, tensors: Sequence[Any], function: Any, arguments: Sequence[Any]
) -> None:
    model, program = compiled.planned.model, compiled.program
    plain = plain_function(function)
    whole = internals.without_xla(plain) if internals.is_tf_function(plain) else tf.function(plain)
    with unchanged_variables(model.variables.values()):
        wanted = tf.nest.flatten(whole(*arguments))
    with program.rehearsal(model.variables.values()):
        found = program.run(tensors)
    compared = 1 if model.trains else len(wanted)
    if model.interface.returns is not None:  # a training step may return no loss
        found, wanted = ([v for v in part if v is not None] for part in (tf.nest.flatten(model.pack(found)), wanted))
        compared = len(wanted)
    for number, (ours, theirs) in enumerate(zip(found[:compared], wanted[:compared], strict=True)):
        name = "loss" if number == 0 else f"result {number} beside its loss"
        _check_equal(model, name, np.asarray(ours), np.asarray(theirs))


def _check_equal(model: StagedModel, name: str, found: Any, wanted: Any) -> None:
    """Raise ExactnessError if a result differs by more than rounding, relative to its largest number."""
    dtype = tf.as_dtype(wanted.dtype)
    if dtype.is_floating or dtype.is_complex:
        finite = wanted[np.isfinite(wanted)]
        tolerance = _TOLERANCE.get(wanted.dtype.name, 1e-2) * max(1.0, float(np.abs(finite).max(initial=0)))
        equal = np.allclose(found, wanted, rtol=0, atol=tolerance, equal_nan=True)
    else:
        equal = np.array_equal(found, wanted)
    if not equal:
        shown = f" {found}, and one device {wanted}" if wanted.ndim == 0 else ", which differs from one device's"
        raise ExactnessError(
            f"the first run of {model.graph.name} has the {name}{shown}: an experiment gave a wrong answer "
            f"({model.interface.exactness.note}). Nothing was trained. Pass micro_batches=1 with one replica of each "
            "stage, and please report the ops"
        )


_TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


def _function_graphs(model: StagedModel) -> Iterator[Graph]:
    yield from (function.graph for function in model.graph.functions)
    if model.updates is not None:
        yield from (function.graph for function in model.updates.functions)


def _is_permanent(node: Node, library: Mapping[str, Any]) -> bool:
    """Return whether the node has an effect other than on variables.

    A call has the effects of all ops in its function, while ``effect`` is only the strongest of them.
    """
    if node.effect in (Effect.PURE, Effect.READ, Effect.JOIN):
        return False
    called = [name for _, value in node.attrs for name in _function_names(value)]
    if called:
        return any(_acts_outside(op) for op in find_stateful_ops(called, library))
    return node.effect != Effect.WRITE and _acts_outside(node.op)


def _function_names(value: Attr) -> list[str]:
    """Return the names of the functions in an attribute's value, such as the body of a While."""
    if isinstance(value, tuple):
        return [name for item in value for name in _function_names(item)]
    return [value.name] if isinstance(value, FunctionRef) else []


def _acts_outside(op: str) -> bool:
    """Return whether a stateful op type does more than write variables; an assertion does nothing unless it fails."""
    return op != "Assert" and not op.startswith(("Assign", "Resource"))
