"""``dapple train``: train a model over a pipeline."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import click

from dapple_tf.commands.common import (
    MODEL,
    PLAN,
    add_options,
    describe,
    load_model,
    load_plan,
    make_request,
    quiet_start,
    say,
    start,
)


@click.command()
@add_options(MODEL, PLAN)
@click.option("--steps", default=100, show_default=True, help="Training steps.")
@click.option("--trace", default=None, help="Save the timeline of the last step as .png or .json.")
@click.option("--checkpoint-dir", default=None, help="Save checkpoints here, and resume from the last.")
@click.option("--compare", default=0, help="First time this many steps of the model un-pipelined, for comparison.")
def train(steps: int, trace: str | None, checkpoint_dir: str | None, compare: int, **options: Any) -> None:
    """Train MODEL (path.py:callable or package.module:callable) over a pipeline."""
    if steps < 1:
        raise click.UsageError("--steps must be at least 1")
    start(options["devices"])
    from dapple_tf.runtime.picture import check_path, save_timeline
    from dapple_tf.runtime.step import PipelinedStep
    from dapple_tf.training import batches, run_steps

    if trace:
        check_path(trace)
    plan, request = load_plan(options["plan_path"]), make_request(**options)
    plain_speed = time_plain(compare, **options) if compare else None
    workload = load_model(**options)
    step = PipelinedStep(workload.loss_fn, workload.optimizer, request, plan)
    first = next(iter(batches(workload.dataset, 1)))
    step.build(*first)
    say(describe(step.plan, step.layer_names))
    done, saved = 0, None
    if checkpoint_dir:
        from dapple_tf.checkpoint import Checkpoints

        saved = Checkpoints(checkpoint_dir, step, first, workload.optimizer)
        done = saved.restore()
        if done:
            say(f"resumed after step {done} from {checkpoint_dir}")
    if done >= steps:
        raise click.ClickException(f"{checkpoint_dir} has {done} steps already: ask for more with --steps")
    every = max(1, steps // 10)
    keep = saved

    def after(number: int) -> None:
        if keep is not None and (number % every == 0 or number == steps):
            keep.save(number)

    numbers = itertools.count(done + 1)

    def one(*batch: Any) -> Any:
        # The last two steps take times: the first of them also builds, the second is the one to look at.
        return (step.record if trace and next(numbers) > steps - 2 else step)(*batch)

    run = run_steps(one, workload, steps - done, "training", done, after)
    result = {
        "steps": steps,
        "first_loss": run.losses[0],
        "last_loss": run.losses[-1],
        "samples_per_second": run.samples_per_second,
        "plan": dataclasses.asdict(step.plan),
    }
    say(f"loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f} in {len(run.losses)} steps")
    speed = f"{run.samples_per_second:.1f} samples/s"
    if plain_speed is not None:
        result["plain_samples_per_second"] = plain_speed
        ratio = run.samples_per_second / plain_speed
        speed += f"; the same model un-pipelined on the same cores: {plain_speed:.1f} samples/s ({ratio:.2f}x)"
    say(speed)
    if trace:
        name = options["model"].rpartition(":")[2]
        save_timeline(step.timeline, trace, f"{name}: {step.plan.schedule}, M = {step.plan.micro_batches}")
        result["trace"] = trace
        say(f"timeline of one step: {trace}")
    if options["as_json"]:
        click.echo(json.dumps(result))


@click.command(hidden=True)
@add_options(MODEL)
@click.option("--steps", default=10, help="Steps to time.")
def plain(steps: int, **options: Any) -> None:
    """Time MODEL as an ordinary tf.function on one device; what ``train --compare`` runs beside the pipeline."""
    with quiet_start():
        from dapple_tf.devices import home_device

        home_device()
    from dapple_tf.training import plain_step, run_steps

    workload = load_model(**options)
    run = run_steps(plain_step(workload), workload, steps + 1, "un-pipelined")
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
