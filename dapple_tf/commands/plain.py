"""The un-pipelined model in a process of its own, for ``dapple train --baseline``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import click
import cloup

from dapple_tf.commands.command import command, result_options
from dapple_tf.commands.model_loading import load_model
from dapple_tf.commands.options import MODEL_ARGUMENT, MODEL_OPTIONS
from dapple_tf.commands.output import shows_progress
from dapple_tf.commands.startup import hide_startup_messages


@command(hidden=True)
@MODEL_ARGUMENT
@MODEL_OPTIONS
@cloup.option("--steps", default=10, help="Steps to time.")
@cloup.option(
    "--minibatches", default=1, help="Cut each batch into this number of minibatches, and train on one after the other."
)
@result_options()
def plain(steps: int, minibatches: int, **options: Any) -> None:
    """Time MODEL as an ordinary tf.function on one device, and print its samples per second as JSON."""
    with hide_startup_messages():
        from dapple_tf.devices import home_device

        home_device()
    from dapple_tf.commands.training_loop import plain_step, repeat_batches, run_steps, step_of_minibatches

    workload = load_model(**options)
    step = plain_step(workload)
    if minibatches > 1:
        step = step_of_minibatches(step, minibatches)
    run = run_steps(step, repeat_batches(workload.dataset), steps + 1, "un-pipelined")
    click.echo(json.dumps({"samples_per_second": run.samples_per_second}))


def time_plain_model(
    steps: int,
    minibatches: int,
    /,
    model: str,
    settings: Sequence[str],
    batch_size: int | None,
    seed: int | None,
    **_: Any,
) -> float:
    """Return the samples per second of the un-pipelined model, measured in a new process with TensorFlow's defaults.

    It trains on the ``minibatches`` of each batch one after the other. Raises ClickException where that process fails.
    """
    words = [sys.executable, "-m", "dapple_tf", "plain", model, "--steps", str(steps)]
    for setting in settings:
        words += ["--set", setting]
    given = (("--batch-size", batch_size, None), ("--seed", seed, None), ("--minibatches", minibatches, 1))
    for option, value, default in given:
        words += [] if value == default else [option, str(value)]
    words += [] if shows_progress() else ["--quiet"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"the un-pipelined {model} failed (see above): leave --baseline out")
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_second"])
