"""``dapple train``: train a model over a pipeline."""

from __future__ import annotations

import os
from typing import Any

import click
from click.core import ParameterSource

from dapple_tf.autoplan.options import Options
from dapple_tf.commands.model_loading import check_model_exists
from dapple_tf.commands.options import MODEL_OPTIONS, PLAN_OPTIONS, read_options
from dapple_tf.commands.planning_options import add_options
from dapple_tf.commands.run_file import NAME
from dapple_tf.commands.startup import start_tensorflow
from dapple_tf.commands.train_settings import TrainSettings
from dapple_tf.commands.window_options import check_window_usage, window_options
from dapple_tf.profiler.detect import job_size


@click.command()
@add_options(MODEL_OPTIONS, PLAN_OPTIONS, window_options())
@click.option("--steps", default=100, show_default=True, help="Training steps, or with --async windows.")
@click.option("--trace", default=None, help="Save the timeline of the last step as .png, .html or .json.")
@click.option("--trace-steps", default=1, show_default=True, help="Trace so many of the last steps, up to 8 (.json).")
@click.option("--record", default=None, metavar="FILE", help=f"Record the run [default: {NAME} in --checkpoint-dir].")
@click.option("--tensorboard", default=None, metavar="DIR", help="Write curves for TensorBoard: loss, bubble, stages.")
@click.option("--checkpoint-dir", default=None, help="Save checkpoints here, and resume from the last.")
@click.option("--checkpoint-every", default=None, type=int, help="Steps between checkpoints (default: a tenth of all).")
@click.option("--check-numerics", is_flag=True, help="Fail a step whose loss or gradients are NaN or infinite.")
@click.option(
    "--compare",
    default=0,
    help="First time this many steps of the un-pipelined model, for comparison; with --async, windows of as many "
    "minibatches one after the other.",
)
def train(
    steps: int,
    trace: str | None,
    trace_steps: int,
    record: str | None,
    tensorboard: str | None,
    checkpoint_dir: str | None,
    checkpoint_every: int | None,
    check_numerics: bool,
    compare: int,
    **options: Any,
) -> None:
    """Train MODEL (path.py:callable or package.module:callable) over a pipeline.

    Under mpirun or horovodrun every process trains its stages, and the first one prints and saves.
    """
    settings = TrainSettings(
        steps,
        trace,
        tensorboard,
        checkpoint_dir,
        checkpoint_every,
        check_numerics,
        compare,
        trace_steps,
        record,
        given_options(click.get_current_context()),
    )
    check_usage(settings)
    check_window_usage(check_numerics=check_numerics, **options)
    check_model_exists(options["model"])
    given = Options(**read_options(options))
    start_tensorflow(options["devices"])
    from dapple_tf.commands.training_run import run_training

    run_training(settings, given, options)


def given_options(context: click.Context) -> dict[str, str]:
    """Return the options that the command line gives, by their longest name, as text."""
    found = {}
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE and isinstance(parameter, click.Option):
            value = context.params[name]
            text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            found[max(parameter.opts, key=len)] = text
    return found


def check_usage(settings: TrainSettings) -> None:
    """Raise UsageError, before TensorFlow starts, for numbers below 1 and options that exclude each other."""
    if settings.steps < 1:
        raise click.UsageError("--steps must be at least 1")
    if settings.checkpoint_every is not None and settings.checkpoint_every < 1:
        raise click.UsageError("--checkpoint-every must be at least 1")
    if not 1 <= settings.trace_steps <= 8:
        raise click.UsageError("--trace-steps must be from 1 to 8")
    paths = {
        "trace": settings.trace,
        "record": settings.record,
        "tensorboard": settings.tensorboard,
        "checkpoint-dir": settings.checkpoint_dir,
    }
    for option, path in paths.items():
        if path == "":
            raise click.UsageError(f"--{option} is empty: name a path, or leave the option out")
    if settings.trace and settings.check_numerics:
        raise click.UsageError(
            "--trace and --check-numerics: a step that records times cannot check its numbers; give one or the other"
        )
    if settings.compare and job_size(os.environ) > 1:
        raise click.UsageError(
            "--compare: the waiting processes of a job would disturb the timing; compare in one process"
        )
