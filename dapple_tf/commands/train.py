"""``dapple train``: train a model over a pipeline."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dapple_tf.commands.common import (
    MODEL,
    PLAN,
    add_options,
    describe,
    load_model,
    load_named_cluster,
    load_plan,
    make_request,
    quiet_start,
    say,
    start,
)
from graph_passes.schedules.policies import abbreviate_schedule
from profiler.detect import job_size

if TYPE_CHECKING:
    from dapple_tf.checkpoint.checkpoints import Checkpoints
    from dapple_tf.commands.training_loop import Run
    from dapple_tf.plan import Plan


@click.command()
@add_options(MODEL, PLAN)
@click.option("--steps", default=100, show_default=True, help="Training steps.")
@click.option("--trace", default=None, help="Save the timeline of the last step as .png, .html or .json.")
@click.option("--tensorboard", default=None, metavar="DIR", help="Write curves for TensorBoard: loss, bubble, stages.")
@click.option("--checkpoint-dir", default=None, help="Save checkpoints here, and resume from the last.")
@click.option("--checkpoint-every", default=None, type=int, help="Steps between checkpoints (default: a tenth of all).")
@click.option("--check-numerics", is_flag=True, help="Fail a step whose loss or gradients are NaN or infinite.")
@click.option("--compare", default=0, help="First time this many steps of the model un-pipelined, for comparison.")
def train(
    steps: int,
    trace: str | None,
    tensorboard: str | None,
    checkpoint_dir: str | None,
    checkpoint_every: int | None,
    check_numerics: bool,
    compare: int,
    **options: Any,
) -> None:
    """Train MODEL (path.py:callable or package.module:callable) over a pipeline.

    Under mpirun or horovodrun every process trains its part, and the first one prints and saves.
    """
    check_usage(steps, trace, checkpoint_every, check_numerics, compare)
    start(options["devices"])
    from dapple_tf.commands.observation import Observer
    from dapple_tf.commands.tensorboard import Scalars, check_folder
    from dapple_tf.commands.training_loop import run_steps
    from dapple_tf.distributed import membership
    from dapple_tf.timeline.picture import check_path, save_recording

    job = membership.current()
    leads = job is None or job.rank == 0
    tell = say if leads else _say_nothing
    # What is wrong on all ranks is told once, and on all what is wrong on one.
    everywhere = _call if job is None else job.run_on_all
    if trace:
        everywhere(lambda: check_path(trace) if leads else None)
    if tensorboard:
        everywhere(lambda: check_folder(tensorboard) if leads else None)
    plan, request = everywhere(lambda: (load_plan(options["plan_path"]), make_request(**options)))
    plain_speed = time_plain(compare, **options) if compare else None
    step, first, stream = everywhere(lambda: make_step(plan, request, options))
    step.check_numerics = check_numerics
    # A step that takes times checks nothing.
    curves = tensorboard is not None and not check_numerics
    step.build(*first, record=curves)
    tell(describe(step.plan, step.layer_names))
    if step.choice is not None:
        tell(str(step.choice))
    tell(str(step.report))
    done, after = 0, None
    if checkpoint_dir:
        from dapple_tf.checkpoint.checkpoints import Checkpoints

        saved = Checkpoints(checkpoint_dir, step)
        position = saved.restore()
        done = position.steps
        everywhere(partial(check_unfinished, checkpoint_dir, done, steps))
        if done:
            tell(f"resumed after step {done} from {checkpoint_dir}")
            stream = itertools.islice(stream, position.batches, None)
        after = partial(save_at, saved, checkpoint_every or max(1, steps // 10), steps)
    scalars = everywhere(lambda: Scalars(tensorboard) if tensorboard and leads else None)
    observer = Observer(
        step, done + 1, steps, trace=trace is not None, curves=curves, scalars=scalars, job=job, tell=tell
    )
    try:
        run = run_steps(
            observer.run,
            stream,
            steps - done,
            "training",
            done=done,
            after=after,
            observe=observer.observe,
            shown=leads,
        )
    finally:
        if scalars is not None:
            scalars.close()
    if job is not None:
        job.gather(None)  # Horovod ends for all when the first rank leaves
    result, lines = report(run, step.plan, plain_speed)
    memory = step.report
    result["memory"] = memory.to_json()
    if trace and leads:
        plan, model = step.plan, options["model"].rpartition(":")[2]
        title = f"{model}: {abbreviate_schedule(plan.schedule)}, M = {plan.micro_batches}"
        recording = dataclasses.replace(step.recording, title=title)
        save_recording(recording, trace)
        result |= {"trace": trace, "timeline": recording.to_json()}
        lines += [str(recording), f"timeline of one step: {trace}", str(memory)]
    if tensorboard:
        result["tensorboard"] = tensorboard
        lines.append(f"curves for TensorBoard: {tensorboard}")
    tell("\n".join(lines))
    if options["as_json"]:
        tell(json.dumps({"steps": steps, **result}))


def report(run: Run, plan: Plan, plain_speed: float | None) -> tuple[dict[str, Any], list[str]]:
    """What a training run gave, as JSON and in words; ``plain_speed``: samples a second un-pipelined, if measured."""
    from dapple_tf.timeline.describe import write_seconds
    from dapple_tf.timeline.recording import planned_seconds, tell_error

    result = {
        "first_loss": run.losses[0],
        "last_loss": run.losses[-1],
        "losses": run.losses,
        "samples_per_second": run.samples_per_second,
        "plan": dataclasses.asdict(plan),
    }
    lines = [f"loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f} in {len(run.losses)} steps"]
    lines.append(f"{run.samples_per_second:.1f} samples/s")
    if plain_speed is not None:
        result["plain_samples_per_second"] = plain_speed
        ratio = run.samples_per_second / plain_speed
        lines[-1] += f"; the same model un-pipelined on the same cores: {plain_speed:.1f} samples/s ({ratio:.2f}x)"
    planned = planned_seconds(plan)
    if planned is not None and run.step_seconds and run.samples == plan.global_batch_size:
        error = planned / run.step_seconds - 1
        result |= {"planned_step_seconds": planned, "step_seconds": run.step_seconds, "planner_error": error}
        took = write_seconds(run.step_seconds)
        lines.append(f"a step took {took}; the planner predicted {write_seconds(planned)}, {tell_error(error)}")
    return result, lines


def make_step(plan: Any, request: Any, options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], Iterator[Any]]:
    """The step of the MODEL that ``options`` name, its first batch, and all batches without end."""
    from dapple_tf.commands.training_loop import batches
    from dapple_tf.runtime.step import PipelinedStep

    workload = load_model(**options)
    step = PipelinedStep(workload.loss_fn, workload.optimizer, request, plan, cluster=load_named_cluster(**options))
    stream = batches(workload.dataset)
    first = next(stream)
    return step, first, itertools.chain([first], stream)


def check_unfinished(folder: str, done: int, steps: int) -> None:
    """ClickException where nothing is left to do."""
    if done >= steps:
        raise click.ClickException(f"{folder} has {done} steps already: ask for more with --steps")


def check_usage(
    steps: int, trace: str | None, checkpoint_every: int | None, check_numerics: bool, compare: int
) -> None:
    """UsageError, before TensorFlow starts, for numbers below 1 and for what a job of several processes cannot do."""
    if steps < 1:
        raise click.UsageError("--steps must be at least 1")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise click.UsageError("--checkpoint-every must be at least 1")
    if trace and check_numerics:
        raise click.UsageError(
            "--trace and --check-numerics: a step that takes times checks nothing; give one or the other"
        )
    if compare and job_size(os.environ) > 1:
        raise click.UsageError(
            "--compare: the waiting processes of a job would disturb the timing; compare in one process"
        )


def save_at(saved: Checkpoints, every: int, last: int, number: int) -> None:
    """Save after step ``number`` if it is an ``every``-th one or the ``last``; each step takes one batch."""
    if number % every == 0 or number == last:
        saved.save(number)


def _call(work: Callable[[], Any]) -> Any:
    return work()


def _say_nothing(text: str) -> None:
    """What all ranks but the first say."""


@click.command(hidden=True)
@add_options(MODEL)
@click.option("--steps", default=10, help="Steps to time.")
def plain(steps: int, **options: Any) -> None:
    """Time MODEL as an ordinary tf.function on one device; what ``train --compare`` runs beside the pipeline."""
    with quiet_start():
        from dapple_tf.devices import home_device

        home_device()
    from dapple_tf.commands.training_loop import batches, plain_step, run_steps

    workload = load_model(**options)
    run = run_steps(plain_step(workload), batches(workload.dataset), steps + 1, "un-pipelined")
    click.echo(json.dumps({"samples_per_second": run.samples_per_second}))


def time_plain(
    steps: int, model: str, settings: Sequence[str], batch_size: int | None, seed: int | None, **_: Any
) -> float:
    """Samples a second of the model un-pipelined, in a process of its own with TensorFlow as it comes."""
    command = [sys.executable, "-m", "dapple_tf", "plain", model, "--steps", str(steps)]
    for setting in settings:
        command += ["--set", setting]
    for option, value in (("--batch-size", batch_size), ("--seed", seed)):
        command += [] if value is None else [option, str(value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"the un-pipelined {model} failed (see above): leave --compare out")
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_second"])
