"""``slice="auto"`` or a number: the first micro-batches of 1F1B run their forwards in halves (AutoPipe's Slicer)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from dapple_tf.autoplan.layer_estimates import BACKWARD_OVER_FORWARD
from dapple_tf.errors import PlanError, ScheduleError, warn_user
from dapple_tf.graph_passes.analysis.row_bounds import micro_batch_bounds
from dapple_tf.graph_passes.schedules.slicer import count_slices, slice_sizes, sliced_1f1b
from dapple_tf.plans import Plan
from dapple_tf.wording import format_count

Slice = int | Literal["auto"] | None
"""The number of micro-batches to slice, "auto" for AutoPipe's Algorithm 2, or None for none."""

SLICED_SCHEDULES = ("auto", "dapple-a", "1f1b", "1f1b-sno")
"""The names of 1F1B, whose start-up the Slicer halves; "auto" means "dapple-a"."""


def is_slice(wanted: object) -> bool:
    """Return whether ``wanted`` is a Slice."""
    return wanted in (None, "auto") or (isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0)


def _fit_slices(count: int, sizes: Sequence[int], replicas: int) -> int:
    """Return how many of ``count`` micro-batches can be sliced; warn where there are none.

    ``sizes``: samples of each micro-batch; each half needs a sample for each of ``replicas``.
    """
    fitting = next((m for m, size in enumerate(sizes) if size // 2 < replicas), len(sizes))
    if count and not fitting:
        warn_user(
            f"slice='auto': half of micro-batch 0, which has {format_count(sizes[0], 'sample')}, is too small for "
            f"{format_count(replicas, 'replica')}: none is sliced"
        )
    return min(count, fitting)


def slice_plan(plan: Plan, wanted: int | str, layers: Sequence[float]) -> Plan:
    """Return the 1F1B plan with sliced micro-batches; ``layers``: estimated seconds of each layer's forward.

    Raises PlanError where a replica would get no sample of a half, or more micro-batches are to be sliced than stage 0
    runs before its first backward.
    """
    stages = len(plan.stages)
    if stages <= 2 and wanted != 0:
        warn_user(
            f"slice={wanted!r}: {stages} stage{'s are' if stages > 1 else ' is'} unsuited: with a start-up that short, "
            "halves cost more than they save (AutoPipe, section IV.B)"
        )
    samples, m = plan.global_batch_size, plan.micro_batches
    bounds = [micro_batch_bounds(samples, index, m, plan.sizes) for index in range(m)]
    rows = [end - begin for begin, end in bounds]
    if wanted == "auto":
        forward = [sum(layers[s.first_layer : s.last_layer + 1]) / s.replicas for s in plan.stages]
        backward = [BACKWARD_OVER_FORWARD * seconds for seconds in forward]
        count = _fit_slices(count_slices(forward, backward, 0.0), rows, plan.least_samples)
    else:
        count = int(wanted)
    if not count:
        return plan
    try:
        schedule = sliced_1f1b(stages, m, count)
        sizes = slice_sizes(rows, count)
    except ScheduleError as error:
        raise PlanError(str(error)) from error
    if min(sizes) < plan.least_samples:
        shares = " with their shares" if plan.shares else ""
        raise PlanError(
            f"slice={wanted!r}: half a micro-batch has {format_count(min(sizes), 'sample')}, too few for "
            f"{format_count(max(plan.replicas), 'replica')}{shares}: use fewer micro-batches, or a larger batch"
        )
    return dataclasses.replace(
        plan, schedule=str(schedule), micro_batches=len(sizes), micro_batch_size=max(sizes), micro_batch_sizes=sizes
    )
