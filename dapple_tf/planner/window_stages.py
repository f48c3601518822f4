"""Stages as the plan of an asynchronous window."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dapple_tf.errors import PlanError
from dapple_tf.plans import Plan
from dapple_tf.profiler.units import format_samples
from dapple_tf.window_plan import WindowPlan


def window_plan(plan: Plan, window: WindowPlan, samples: int) -> Plan:
    """Return ``plan``'s stages as the plan of asynchronous windows of ``samples`` samples.

    Raises PlanError for stages that share devices and for too few samples, and what ``WindowPlan.versions`` raises.
    """
    if not plan.worker_map.has_one_stage_per_worker:
        raise PlanError("mode='async' with several stages on one device: give each stage devices of its own")
    found = window.versions(plan.replicas).window
    total, warm_up = found.size, found.warm_up
    check_window_size(samples, total, found.sharing)
    return dataclasses.replace(
        plan,
        global_batch_size=samples,
        micro_batch_size=-(-samples // total),
        micro_batches=total,
        micro_batch_sizes=None,
        schedule="K=" + ",".join(str(min(k, total)) for k in warm_up),
        overlap=False,
        predicted=None,
        window=window,
    )


def check_window_size(samples: int, micro_batches: int, replicas: Sequence[int]) -> None:
    """Raise PlanError unless a window of ``samples`` has a sample for each replica of each micro-batch."""
    if samples // micro_batches < max(replicas):
        raise PlanError(
            f"a window of {format_samples(samples)} is cut into {micro_batches} minibatches or micro-batches, and each "
            f"needs at least {format_samples(max(replicas))}: give a larger window (the batch of a call is one), leave "
            "this one out (drop_remainder=True), or give fewer minibatches"
        )
