"""Steps for which each rank of a job is given only the rows that it needs of each argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from dapple_tf.autoplan.autoplan import Autoplan
from dapple_tf.compiler import StepVariant
from dapple_tf.distributed.local_rows import MISSING, GivenRows, LengthAxis, agree_on_size
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import BatchError, UsageError
from dapple_tf.frontend.batch import BatchForm
from dapple_tf.frontend.composite import as_rows
from dapple_tf.graph_passes.analysis.input_needs import InputNeeds, Use, whole_batch
from dapple_tf.plans import Plan
from dapple_tf.runtime.compile_step import CompiledStep, CompiledSteps, Target, check_eager, compile_for_rows
from dapple_tf.staged_model import StagedModel


def find_needs(compiled: CompiledStep, plan: Plan) -> tuple[InputNeeds, ...]:
    """Return the rows that each rank needs; one process counts as one rank.

    ``plan``: the plan for a whole batch, also if the step was compiled for a smaller one. In asynchronous windows every
    rank takes the whole window, and cuts it into minibatches itself.
    """
    form, planned = compiled.form, compiled.planned
    if plan.window is not None:
        whole = whole_batch(len(form.paths))
        needs = InputNeeds(form.paths, whole, plan.micro_batches, plan.least_samples, planned.batch_size)
        return (needs,) * len(compiled.program.inputs)
    return tuple(
        InputNeeds(form.paths, inputs, plan.micro_batches, plan.least_samples, planned.batch_size, plan.sizes)
        for inputs in compiled.program.inputs
    )


def compile_local(
    job: Job,
    batch: Sequence[Any],
    last: CompiledStep | None,
    autoplan: Autoplan,
    target: Target,
    variant: StepVariant,
    compiled: CompiledSteps,
) -> tuple[CompiledStep, Sequence[Any]]:
    """Return the step that trains on each rank's own rows of a batch, and the inputs of its program.

    ``batch``: this rank's rows of each argument, or None; arguments that the rank does not need are ignored. The inputs
    are the flattened tensors, and the number of samples of the whole batch. ``last``: the step that ran, or was built,
    last; the rows must have its types. For the other parameters see ``compile_step``. Every rank must call this.

    Raises UsageError without a last step or inside a tf.function. Raises BatchError on every rank if the rows of all
    ranks are not one batch, or have lengths for which the step is not valid.
    """
    if last is None:
        raise UsageError(
            "local rows do not tell what the step is built for: before the first call with local=True, give "
            "example_batch to dapple.pipeline or call step.build with a whole batch, on every rank"
        )
    check_eager()
    needs = find_needs(last, autoplan.plan)
    uses = needs[job.rank].inputs.uses
    leaves: list[Any] = []
    places = _unknown_axes(last.form)
    rows: GivenRows | BatchError
    try:
        leaves = last.form.flatten(as_rows(batch, partial=True), [use is not Use.NONE for use in uses])
        given = [(leaf, 0) for leaf in leaves] + [(leaves[i], axis) for i, axis in places]
        numbers = [MISSING if leaf is None else int(leaf.shape[axis]) for leaf, axis in given]
        rows = GivenRows(tuple(numbers[: len(leaves)]), tuple(numbers[len(leaves) :]))
    except BatchError as error:
        rows = error
    named: list[LengthAxis] = [(last.form.paths[i], axis) for i, axis in places]
    samples, lengths = agree_on_size(job, needs, rows, named)
    _check_lengths(last.planned.model, dict(zip(places, lengths, strict=True)))
    step = compile_for_rows(last, samples, autoplan, target, variant, compiled)
    tensors = [_no_rows(spec) if leaf is None else leaf for leaf, spec in zip(leaves, last.form.signature, strict=True)]
    return step, (*tensors, tf.constant(samples, tf.int64))


def _unknown_axes(form: BatchForm) -> list[tuple[int, int]]:
    """Return the axes whose length is unknown, each as the number of the flattened argument and of the axis."""
    dims = [(i, axis, dim) for i, spec in enumerate(form.signature) for axis, dim in enumerate(spec.shape)]
    return [(i, axis) for i, axis, dim in dims if axis and dim is None]


def _check_lengths(model: StagedModel, lengths: Mapping[tuple[int, int], int]) -> None:
    """Raise BatchError, on all ranks, if the model is not valid for these lengths."""
    if model.interface.serves is None:
        return
    shapes = [spec.shape.as_list() for spec in model.interface.example]
    for (i, axis), length in lengths.items():
        shapes[i][axis] = shapes[i][axis] if length == MISSING else length
    specs = [tf.TensorSpec(shape, spec.dtype) for shape, spec in zip(shapes, model.interface.example, strict=True)]
    if not model.interface.serves(tuple(specs)):
        raise BatchError(
            f"the step that was built last cannot run batches of the shapes {', '.join(str(s.shape) for s in specs)}: "
            "the loss depends on the batch in another way at these lengths. Call step.build with a whole batch of them "
            "on every rank"
        )


def _no_rows(spec: tf.TensorSpec) -> Any:
    """Return a tensor without rows, for an argument that this rank does not need."""
    return tf.zeros([dim or 0 for dim in spec.shape], spec.dtype)
