"""Say how a job that ``dapple launch`` has started again differs from the one before it."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from dapple_tf.commands.run_file import read_run
from dapple_tf.errors import RunError
from dapple_tf.launcher.restart import read_start
from dapple_tf.plans import Plan
from dapple_tf.profiler.units import format_seconds
from dapple_tf.timeline.recording import planned_seconds


@dataclass(frozen=True)
class Restart:
    """A job that was started again, beside the one before it, of which less is known where it left no record.

    ``start``: how many times it was started before. ``seconds``: since the job before it ended, until its state is
    restored. ``ranks`` and ``ranks_before``. ``plan`` and ``plan_before``: in one line. ``done``: the step that it goes
    on from. ``repeated``: the steps that the job before it had done after that. ``predicted_seconds``: of a step;
    ``step_seconds_before``: the median step of the job before.
    """

    start: int
    seconds: float
    ranks: int
    plan: str
    done: int
    predicted_seconds: float | None
    ranks_before: int | None = None
    plan_before: str | None = None
    repeated: int | None = None
    step_seconds_before: float | None = None

    def __str__(self) -> str:
        before = "" if self.ranks_before is None else f" ({self.ranks_before} before)"
        lines = [
            f"start {self.start + 1} of the job: {self.ranks} ranks{before}, back after {self.seconds:.0f} s, goes "
            f"on from step {self.done}"
        ]
        if self.repeated is not None:
            lines[0] += f", {self.repeated} steps are repeated"
        if self.plan_before is not None:
            lines.append(f"  plan before: {self.plan_before}; now: {self.plan}")
        known = {"a step before": self.step_seconds_before, "predicted now": self.predicted_seconds}
        times = [f"{what} {format_seconds(seconds)}" for what, seconds in known.items() if seconds is not None]
        if times:
            lines.append(f"  {', '.join(times)}")
        return "\n".join(lines)


def find_restart(record: str | None, plan: Plan, ranks: int, done: int) -> Restart | None:
    """Return how this job was started again, after step ``done``; None for a first start, or without a launcher.

    ``record``: the file in which the job before has recorded its steps, for what is said of it.
    """
    start = read_start()
    if start is None or not start.number:
        return None
    restart = Restart(start.number, time.time() - start.ended, ranks, plan.headline, done, planned_seconds(plan))
    try:
        before = read_run(record) if record is not None else None
    except RunError:  # it failed before its first step
        before = None
    if before is None:
        return restart
    seconds = sorted(step.seconds for step in before.steps if step.number not in before.first_steps)
    return dataclasses.replace(
        restart,
        ranks_before=before.start.processes,
        plan_before=before.plan.headline,
        repeated=max(0, (before.steps[-1].number if before.steps else done) - done),
        step_seconds_before=seconds[len(seconds) // 2] if seconds else None,
    )
