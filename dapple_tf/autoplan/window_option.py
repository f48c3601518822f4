"""``mode="async"``: the options of asynchronous windows, checked against the others before anything is traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dapple_tf.errors import PlanError
from dapple_tf.plan import Plan
from dapple_tf.window_plan import USUAL_MINIBATCHES, WindowPlan

MODES = ("sync", "async")


def make_window(
    mode: str,
    minibatches: int | None,
    weights: str | None,
    depth: int | None,
    micro_batches: object,
    plan: Plan | None = None,
) -> WindowPlan | None:
    """Return the window that these options of ``dapple.pipeline`` describe, or None for synchronous training.

    None stands for an option that is not given: it is as in the window of ``plan``, if that has one. Raises PlanError
    for an unknown mode, for values out of range, and for options of windows without mode="async".
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
    if isinstance(plan, Plan) and plan.window is not None:
        return dataclasses.replace(plan.window, **found)  # type: ignore[arg-type]  # WindowPlan checks the values
    return WindowPlan(**{"minibatches": USUAL_MINIBATCHES, **found})  # type: ignore[arg-type]  # as above


def check_window_options(
    window: WindowPlan, replicas: Sequence[int] | None, others: Mapping[str, tuple[object, object]]
) -> None:
    """Raise PlanError, or ScheduleError, where other options contradict the ``window``.

    ``others``: options that windows do not have, each with its value and its default.
    """
    for name, (value, default) in others.items():
        if value != default:
            raise PlanError(f"{name}={value!r} with mode='async': windows have an order of their own; leave it out")
    if replicas and min(replicas) > 0:  # else refused when the stages are known
        window.versions(replicas)
