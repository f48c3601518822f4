"""``mode="async"``: the options of asynchronous windows, checked against the others before anything is traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from dapple_tf.errors import PlanError
from dapple_tf.plan import Plan
from dapple_tf.window_plan import WindowPlan
from profiler.units import format_samples

MODES = ("sync", "async")
USUAL_MINIBATCHES = 64
"""Minibatches of a window where none are given."""


def make_window(
    mode: str, minibatches: int | None, weights: str | None, depth: int | None, micro_batches: object
) -> WindowPlan | None:
    """Return the window that these options of ``dapple.pipeline`` describe, or None for synchronous training.

    None stands for an option that is not given. Raises PlanError for an unknown mode, for values out of range, and for
    options of windows without mode="async".
    """
    if mode not in MODES:
        raise PlanError(f"mode={mode!r}: give 'sync' or 'async'")
    given = {"minibatches": minibatches, "weights": weights, "depth": depth}
    if mode == "sync":
        for name, value in given.items():
            if value is not None:
                raise PlanError(f"{name}={value!r} is for asynchronous windows: give mode='async' too, or leave it out")
        return None
    given["micro_batches"] = micro_batches  # type: ignore[assignment]  # WindowPlan checks the values
    found = {name: value for name, value in given.items() if value is not None}
    return WindowPlan(**{"minibatches": USUAL_MINIBATCHES, **found})  # type: ignore[arg-type]


def check_window_options(
    window: WindowPlan, replicas: Sequence[int] | None, others: Mapping[str, tuple[object, object]]
) -> None:
    """Raise PlanError, or ScheduleError, where other options contradict the ``window``.

    ``others``: options that windows do not have, each with its value and its default.
    """
    for name, (value, default) in others.items():
        if value != default:
            raise PlanError(f"{name}={value!r} with mode='async': windows have an order of their own; leave it out")
    if replicas is not None:
        window.versions(replicas)


def check_optimizer(optimizer: Any) -> None:
    """Raise PlanError for an optimizer that updates by the gradients of all stages at once, or scales the loss."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return  # told when it is traced
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None:
        raise PlanError(
            f"{name} scales the loss, with mode='async': whether a step is skipped depends on the gradients of all "
            "stages, which are of different minibatches at any time; use an optimizer without loss scaling"
        )
    if optimizer.global_clipnorm:
        raise PlanError(
            f"{name} has global_clipnorm={optimizer.global_clipnorm}, with mode='async': stages update at different "
            "times, so there is no global norm; use clipnorm or clipvalue, which clip each variable by itself"
        )


def window_plan(plan: Plan, window: WindowPlan, samples: int) -> Plan:
    """Return ``plan``'s stages as the plan of asynchronous windows of ``samples`` samples.

    Raises PlanError
    for stages that share devices and for too few samples, and what ``WindowPlan.versions`` raises.
    """
    if not plan.worker_map.is_straight:
        raise PlanError("mode='async' with several stages on one device: give each stage devices of its own")
    found = window.versions(plan.replicas).window
    total, warm_up = found.size, found.warm_up
    check_window_size(samples, total, (1,) if window.in_turn else plan.replicas)
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
            f"needs at least {format_samples(max(replicas))}: give a larger window, or fewer minibatches"
        )
