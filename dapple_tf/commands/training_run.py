"""A run of ``dapple train``, step by step: plan, build, resume, train, report."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from dapple_tf.autoplan.request import Request
from dapple_tf.checkpoint.checkpoints import Checkpoints
from dapple_tf.commands.cluster_option import load_optional_cluster
from dapple_tf.commands.finite_losses import LossWatch
from dapple_tf.commands.model_loading import load_model
from dapple_tf.commands.observation import Observer
from dapple_tf.commands.options import load_plan, parse_request
from dapple_tf.commands.output import check_chart_path, check_folder_path, describe_plan
from dapple_tf.commands.plain import time_plain_model
from dapple_tf.commands.ranks import Ranks
from dapple_tf.commands.tensorboard import Scalars
from dapple_tf.commands.train_report import TrainReport, report_run
from dapple_tf.commands.train_settings import TrainSettings
from dapple_tf.commands.training_loop import RunResult, StepResult, repeat_batches, run_steps
from dapple_tf.distributed import membership
from dapple_tf.distributed.shared_errors import share_error
from dapple_tf.plan import Plan
from dapple_tf.runtime.step import PipelinedStep
from dapple_tf.timeline.picture import save_recording
from dapple_tf.timeline.recording import Recording
from graph_passes.schedules.policies import abbreviate_schedule

Batches = Iterator[tuple[Any, ...]]


def run_training(settings: TrainSettings, options: Mapping[str, Any]) -> None:
    """Train as ``settings`` and the ``options`` of the model and the plan state, and print the results.

    In a job every rank calls it, and rank 0 prints and writes. Raises ClickException at the end of a run whose loss
    became NaN or infinite.
    """
    ranks = Ranks(membership.current())
    _check_output_paths(settings, ranks)
    plan = ranks.run_on_all(lambda: load_plan(**options))
    request = ranks.run_on_all(lambda: parse_request(plan=plan, **options))
    plain_speed = time_plain_model(settings.compare, request.window, **options) if settings.compare else None
    step, first, batches = ranks.run_on_all(lambda: _make_step(plan, request, options))
    _build(step, first, settings, ranks)
    checkpoints, done, batches = _resume(step, batches, settings, ranks)
    losses = LossWatch(step, ranks, ranks.print_progress)
    run = _train(step, batches, settings, ranks, done, _save_after(checkpoints, settings, losses))
    ranks.wait_for_all()
    found = report_run(run, step.plan, plain_speed, losses.minibatch_losses)
    recording = _named_recording(step, options["model"]) if settings.trace and ranks.is_first else None
    report = _report(found, step, settings, recording)
    ranks.print_result(str(report))
    if options["as_json"]:
        ranks.print_result(json.dumps({"steps": settings.steps, **report.fields}))
    if settings.trace and recording is not None:
        save_recording(recording, settings.trace)  # after the report, which is not lost where this fails
    if losses.problem:
        raise share_error(click.ClickException(losses.problem), 0)


def _check_output_paths(settings: TrainSettings, ranks: Ranks) -> None:
    """Raise OutputError on every rank, before the model is made, for what rank 0 cannot write."""

    def check() -> None:
        check_chart_path("--trace", settings.trace)
        check_folder_path("--tensorboard", settings.tensorboard, "TensorBoard's events")
        check_folder_path("--checkpoint-dir", settings.checkpoint_dir, "checkpoints")

    ranks.check_on_first(check)


def _make_step(
    plan: Plan | None, request: Request, options: Mapping[str, Any]
) -> tuple[PipelinedStep, tuple[Any, ...], Batches]:
    """Return the step of the model that ``options`` name, its first batch, and all its batches without end."""
    workload = load_model(**options)
    cluster = load_optional_cluster(**options)
    step = PipelinedStep(workload.loss_fn, workload.optimizer, request, plan, cluster=cluster)
    batches = repeat_batches(workload.dataset)
    first = next(batches)
    return step, first, itertools.chain([first], batches)


def _build(step: PipelinedStep, first: tuple[Any, ...], settings: TrainSettings, ranks: Ranks) -> None:
    """Plan and compile the step for the first batch; print the plan, the reasons for it, and the predicted memory."""
    step.check_numerics = settings.check_numerics
    step.build(*first, record=settings.records_steps)
    ranks.print_result(describe_plan(step.plan, step.layer_names))
    if step.choice is not None:
        ranks.print_result(str(step.choice))
    ranks.print_result(str(step.report))


def _resume(
    step: PipelinedStep, batches: Batches, settings: TrainSettings, ranks: Ranks
) -> tuple[Checkpoints | None, int, Batches]:
    """Restore the last checkpoint; return the checkpoints, the steps already done, and the batches that follow.

    Raises ClickException where all steps are done.
    """
    folder = settings.checkpoint_dir
    if not folder:
        return None, 0, batches
    checkpoints = Checkpoints(folder, step)
    position = checkpoints.restore()
    ranks.run_on_all(lambda: _check_unfinished(folder, position.steps, settings.steps))
    if not position.steps:
        return checkpoints, 0, batches
    what = "step" if step.plan.window is None else "window"
    ranks.print_result(f"resumed after {what} {position.steps} from {folder}")
    return checkpoints, position.steps, itertools.islice(batches, position.batches, None)


def _check_unfinished(folder: str, done: int, steps: int) -> None:
    if done >= steps:
        raise click.ClickException(f"{folder} has {done} steps already: ask for more with --steps")


def _save_after(
    checkpoints: Checkpoints | None, settings: TrainSettings, losses: LossWatch
) -> Callable[[StepResult], None]:
    """Return a function that notes the loss of a step, and saves a checkpoint if one is due and no loss was NaN."""

    def save(done: StepResult) -> None:
        losses.note(done)
        due = done.number % settings.checkpoint_interval == 0 or done.number == settings.steps
        if checkpoints is not None and due and losses.may_save():
            checkpoints.save(done.number)

    return save


def _train(
    step: PipelinedStep,
    batches: Batches,
    settings: TrainSettings,
    ranks: Ranks,
    done: int,
    save_after: Callable[[StepResult], None],
) -> RunResult:
    """Train until the last step, recording steps for the trace and the curves."""
    tensorboard = settings.tensorboard
    scalars = ranks.run_on_first(lambda: Scalars(tensorboard)) if tensorboard else None
    observer = Observer(
        step,
        done + 1,
        settings.steps,
        trace=settings.trace is not None,
        curves=settings.records_curves,
        scalars=scalars,
        job=ranks.job,
        tell=ranks.print_result,
    )
    try:
        return run_steps(
            observer.run,
            batches,
            settings.steps - done,
            "training" if step.plan.window is None else "training window",
            done=done,
            after=save_after,
            observe=observer.observe,
            shown=ranks.is_first,
            loss_name="loss" if step.plan.window is None else "mean loss",
        )
    finally:
        if scalars is not None:
            scalars.close()


def _named_recording(step: PipelinedStep, model: str) -> Recording:
    """Return the recorded step, with the model and the schedule as its title."""
    plan = step.plan
    how = f"{abbreviate_schedule(plan.schedule)}, M = {plan.micro_batches}"
    if plan.window is not None:
        how = f"asynchronous, weights {plan.window.weights}, {plan.window.minibatches} minibatches"
    return dataclasses.replace(step.recording, title=f"{model.rpartition(':')[2]}: {how}")


def _report(
    report: TrainReport, step: PipelinedStep, settings: TrainSettings, recording: Recording | None
) -> TrainReport:
    """Return the report with exactness, memory, curves, and the ``recording`` that is saved as the trace."""
    memory = step.report
    report = report.extended(memory=memory.to_json(), exactness=step.exactness.to_json())
    if step.exactness.reasons:
        report = report.extended(f"what differs from one device:\n{step.exactness}")
    if recording is not None:
        report = report.extended(
            str(recording),
            f"timeline of one step: {settings.trace}",
            str(memory),
            trace=settings.trace,
            timeline=recording.to_json(),
        )
    if settings.tensorboard:
        report = report.extended(f"curves for TensorBoard: {settings.tensorboard}", tensorboard=settings.tensorboard)
    return report
