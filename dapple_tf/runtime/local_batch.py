"""Steps for which each rank of a job is given only the rows that it needs of each argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dapple_tf.autoplan.autoplan import Autoplan
from dapple_tf.compiler import StepVariant
from dapple_tf.distributed.local_rows import MISSING, agree_on_size
from dapple_tf.distributed.membership import Job
from dapple_tf.errors import BatchError, UsageError
from dapple_tf.plan import Plan
from dapple_tf.runtime.compile_step import CompiledStep, CompiledSteps, Target, check_eager, compile_for_rows
from graph_passes.analysis.input_needs import InputNeeds, Use


def find_needs(compiled: CompiledStep, plan: Plan) -> tuple[InputNeeds, ...]:
    """Return the rows that each rank needs (in one process there is one rank); ``plan``: of whole batches."""
    form, planned = compiled.form, compiled.planned
    return tuple(
        InputNeeds(form.paths, inputs, plan.micro_batches, max(plan.replicas), planned.batch_size)
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
    """Return the step that trains on the rows of ``batch`` on each rank, and the inputs of its program.

    ``batch``: this rank's rows, or None, by argument; arguments that it does not need are ignored. The inputs are the
    flattened tensors, and the number of samples of the whole batch. ``last``: the step that ran, or was built, last;
    the rows must be of its types. Every rank must call it. Raises UsageError without a last step or inside a
    tf.function, BatchError on every rank where these are not the rows of one batch.
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
    rows: list[int] | BatchError
    try:
        leaves = last.form.flatten(batch, [use is not Use.NONE for use in uses])
        rows = [MISSING if leaf is None else int(leaf.shape[0]) for leaf in leaves]
    except BatchError as error:
        rows = error
    samples = agree_on_size(job, needs, rows)
    step = compile_for_rows(last, samples, autoplan, target, variant, compiled)
    tensors = [_no_rows(spec) if leaf is None else leaf for leaf, spec in zip(leaves, last.form.signature, strict=True)]
    return step, (*tensors, tf.constant(samples, tf.int64))


def _no_rows(spec: tf.TensorSpec) -> Any:
    return tf.zeros([dim or 0 for dim in spec.shape], spec.dtype)
