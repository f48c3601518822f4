"""Report the end of a run of ``dapple train``, and the restarts of its job, in words and as JSON."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from dapple_tf.checkpoint.content import Position
from dapple_tf.commands.run_file import Run, RunRestart, describe_restarts, read_run
from dapple_tf.commands.train_settings import TrainSettings
from dapple_tf.commands.training_loop import RunResult
from dapple_tf.errors import RunError
from dapple_tf.launcher.restart import read_start
from dapple_tf.plans import Plan
from dapple_tf.profiler.units import format_seconds
from dapple_tf.runtime.step import PipelinedStep
from dapple_tf.timeline.recording import Recording, describe_error, planned_seconds


def make_report(
    run: RunResult,
    step: PipelinedStep,
    settings: TrainSettings,
    *,
    plain_speed: float | None,
    minibatch_losses: Sequence[Sequence[float]],
    recording: Recording | None,
    restarts: Sequence[RunRestart],
) -> tuple[str, dict[str, Any]]:
    """Return in words, and as fields for ``--json``, what came of a run.

    These are losses, speed and the planner's error; exactness, memory, curves and traces; and the restarts.
    ``plain_speed``: samples per second un-pipelined, if measured. ``minibatch_losses``: of each asynchronous window.
    ``recording``: what is saved as the trace, if anything.
    """
    memory = step.report
    lines, fields = _report_run(run, step.plan, plain_speed, minibatch_losses)
    fields |= {"memory": memory.to_json(), "exactness": step.exactness.to_json()}
    if step.exactness.reasons:
        lines.append(f"what differs from one device:\n{step.exactness}")
    if recording is not None:
        lines += [str(recording), f"timeline of one step: {settings.trace}", str(memory)]
        fields |= {"trace": settings.trace, "timeline": recording.to_json()}
    if settings.record_path:
        lines.append(f"record of the run: {settings.record_path}")
        fields["record"] = settings.record_path
    if settings.tensorboard:
        lines.append(f"curves for TensorBoard: {settings.tensorboard}")
        fields["tensorboard"] = settings.tensorboard
    if restarts:
        lines.append(describe_restarts(restarts))
        every = [dataclasses.asdict(restart) for restart in restarts]
        fields |= {"restart": every[-1], "restarts": every}
    return "\n".join(lines), fields


def _report_run(
    run: RunResult, plan: Plan, plain_speed: float | None, minibatch_losses: Sequence[Sequence[float]]
) -> tuple[list[str], dict[str, Any]]:
    """Return losses and speed, and the error of the planner's prediction, if it made one for batches of this size."""
    speed = f"{run.samples_per_second:.1f} samples/s"
    if run.step_seconds is None:
        speed = "samples/s are not measured in a run of one step"
    elif plain_speed is not None:
        ratio = run.samples_per_second / plain_speed
        speed += f"; the same model un-pipelined on the same cores: {plain_speed:.1f} samples/s ({ratio:.2f}x)"
    words = plan.training.words
    lines = [f"{words.loss} {run.losses[0]:.4f} -> {run.losses[-1]:.4f} in {len(run.losses)} {words.units}", speed]
    fields: dict[str, Any] = {
        "first_loss": run.losses[0],
        "last_loss": run.losses[-1],
        "losses": run.losses,
        "samples_per_second": run.samples_per_second,
        "plan": dataclasses.asdict(plan),
    }
    if minibatch_losses:
        fields["minibatch_losses"] = minibatch_losses
    if plain_speed is not None:
        fields["plain_samples_per_second"] = plain_speed
    planned = planned_seconds(plan)
    if planned is not None and run.step_seconds and run.samples == plan.global_batch_size:
        error = planned / run.step_seconds - 1
        took, predicted = format_seconds(run.step_seconds), format_seconds(planned)
        lines.append(f"a step took {took}; the planner predicted {predicted}, {describe_error(error)}")
        fields |= {"planned_step_seconds": planned, "step_seconds": run.step_seconds, "planner_error": error}
    return lines, fields


# --- Compare a run that is resumed with the one before it


_DATA_OPTIONS = ("--batch-size", "--seed", "--set")


def find_other_data(settings: TrainSettings, position: Position) -> str:
    """Return a warning where the run before has recorded other options for its data; "" where it has not, or no record.

    ``position``: of the run that goes on; batches are counted, so it is only there with the same data.
    """
    before = _read_record(settings.record_path)
    if before is None:
        return ""
    given, given_before = settings.options, before.start.options
    changed = [
        f"{name} is {given.get(name, 'not given')} (before: {given_before.get(name, 'not given')})"
        for name in _DATA_OPTIONS
        if given.get(name) != given_before.get(name)
    ]
    if not changed:
        return ""
    return (
        f"warning: the run goes on with other data: {', '.join(changed)}. It passes over the first {position.batches} "
        "batches, which may be others than those it was trained on: samples may be repeated or left out. Give the "
        "options of before, unless you mean it"
    )


# --- Compare a job that ``dapple launch`` has started again with the one before it


def find_restart(record: str | None, plan: Plan, ranks: int, position: Position) -> RunRestart | None:
    """Return how this job was started again, at a ``position``; None for a first start, or without a launcher.

    ``record``: the file in which the job before has recorded its steps, for what is said of it.
    """
    start = read_start()
    if start is None or not start.number:
        return None
    restart = RunRestart(
        start.number,
        start.cause or "unknown",
        max(0.0, time.time() - start.ended),  # the clock of the launcher's host may be ahead of that of this one
        ranks,
        plan.headline,
        position.steps,
        position.origin,
        f"rank{'s' * (len(start.lost) > 1)} {', '.join(map(str, start.lost))}" if start.lost else "",
        planned_seconds(plan),
    )
    before = _read_record(record)
    if before is None:
        return restart
    done = position.steps
    seconds = sorted(step.seconds for step in before.steps if step.number not in before.first_steps)
    return dataclasses.replace(
        restart,
        lost="; ".join(_describe_lost(rank, before) for rank in start.lost),
        ranks_before=before.start.processes,
        plan_before=before.plan.headline,
        repeated=max(0, (before.steps[-1].number if before.steps else done) - done),
        step_seconds_before=seconds[len(seconds) // 2] if seconds else None,
    )


def read_restarts(record: str | None, last: RunRestart | None) -> tuple[RunRestart, ...]:
    """Return all restarts of the run that its record knows, or else the ``last`` one."""
    if last is None:
        return ()
    run = _read_record(record)
    return run.restarts if run is not None and last in run.restarts else (last,)


def _read_record(path: str | None) -> Run | None:
    """Return the run that is recorded at ``path``; None without a record, or where it is empty or damaged."""
    try:
        return None if path is None else read_run(path)
    except RunError:
        return None


def _describe_lost(rank: int, before: Run) -> str:
    """Return what a lost rank ran: its stages, with their layers."""
    names = before.start.layer_names
    stages = [
        f"stage {number} ({names[stage.first_layer]} to {names[stage.last_layer]})"
        for number, stage in enumerate(before.plan.stages)
        if rank in stage.devices and stage.last_layer < len(names)
    ]
    return f"rank {rank}, {', '.join(stages)}" if stages else f"rank {rank}"
