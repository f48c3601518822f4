"""Report the results of a training run, in words and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.commands.training_loop import RunResult
from dapple_tf.plan import Plan
from dapple_tf.timeline.recording import describe_error, planned_seconds
from profiler.units import format_seconds


@dataclass(frozen=True)
class TrainReport:
    """Lines for people, and fields for ``--json``."""

    lines: tuple[str, ...]
    fields: dict[str, Any]

    def extended(self, *lines: str, **fields: Any) -> TrainReport:
        """Return the report with more lines and fields."""
        return TrainReport((*self.lines, *lines), {**self.fields, **fields})

    def __str__(self) -> str:
        return "\n".join(self.lines)


def report_run(
    run: RunResult, plan: Plan, plain_speed: float | None, minibatch_losses: Sequence[Sequence[float]] = ()
) -> TrainReport:
    """Return losses, speed and the planner's error. ``plain_speed``: samples per second un-pipelined, if measured.

    ``minibatch_losses``: of each asynchronous window.
    """
    speed = f"{run.samples_per_second:.1f} samples/s"
    if run.step_seconds is None:
        speed = "samples/s are not measured in a run of one step"
    elif plain_speed is not None:
        ratio = run.samples_per_second / plain_speed
        speed += f"; the same model un-pipelined on the same cores: {plain_speed:.1f} samples/s ({ratio:.2f}x)"
    name, steps = "loss", "steps"
    if plan.window is not None:
        name, steps = "mean loss", f"windows of {plan.window.minibatches} minibatches"
    report = TrainReport(
        (f"{name} {run.losses[0]:.4f} -> {run.losses[-1]:.4f} in {len(run.losses)} {steps}", speed),
        {
            "first_loss": run.losses[0],
            "last_loss": run.losses[-1],
            "losses": run.losses,
            "samples_per_second": run.samples_per_second,
            "plan": dataclasses.asdict(plan),
        },
    )
    if minibatch_losses:
        report = report.extended(minibatch_losses=minibatch_losses)
    if plain_speed is not None:
        report = report.extended(plain_samples_per_second=plain_speed)
    return _with_planner_error(report, run, plan)


def _with_planner_error(report: TrainReport, run: RunResult, plan: Plan) -> TrainReport:
    """Return the report with the planner's prediction, where there is one for batches of this size."""
    planned = planned_seconds(plan)
    if planned is None or not run.step_seconds or run.samples != plan.global_batch_size:
        return report
    error = planned / run.step_seconds - 1
    took, predicted = format_seconds(run.step_seconds), format_seconds(planned)
    return report.extended(
        f"a step took {took}; the planner predicted {predicted}, {describe_error(error)}",
        planned_step_seconds=planned,
        step_seconds=run.step_seconds,
        planner_error=error,
    )
