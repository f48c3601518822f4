"""The un-pipelined model in a process of its own, for ``dapple train --compare``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import click

from dapple_tf.commands.model_loading import load_model
from dapple_tf.commands.options import MODEL_OPTIONS, add_options
from dapple_tf.commands.startup import hide_startup_messages


@click.command(hidden=True)
@add_options(MODEL_OPTIONS)
@click.option("--steps", default=10, help="Steps to time.")
def plain(steps: int, **options: Any) -> None:
    """Time MODEL as an ordinary tf.function on one device, and print its samples per second as JSON."""
    with hide_startup_messages():
        from dapple_tf.devices import home_device

        home_device()
    from dapple_tf.commands.training_loop import plain_step, repeat_batches, run_steps

    workload = load_model(**options)
    run = run_steps(plain_step(workload), repeat_batches(workload.dataset), steps + 1, "un-pipelined")
    click.echo(json.dumps({"samples_per_second": run.samples_per_second}))


def time_plain_model(
    steps: int, model: str, settings: Sequence[str], batch_size: int | None, seed: int | None, **_: Any
) -> float:
    """Return the samples per second of the un-pipelined model, measured in a new process with TensorFlow's defaults.

    Raises ClickException where that process fails.
    """
    command = [sys.executable, "-m", "dapple_tf", "plain", model, "--steps", str(steps)]
    for setting in settings:
        command += ["--set", setting]
    for option, value in (("--batch-size", batch_size), ("--seed", seed)):
        command += [] if value is None else [option, str(value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"the un-pipelined {model} failed (see above): leave --compare out")
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_second"])
