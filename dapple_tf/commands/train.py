"""``dapple train``: train a model over a pipeline."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import click
import cloup
from click.core import ParameterSource

from dapple_tf.autoplan.options import Options
from dapple_tf.checkpoint.names import last_steps
from dapple_tf.commands.command import FILE, command, result_options
from dapple_tf.commands.model_loading import check_model_exists
from dapple_tf.commands.options import (
    MODEL_ARGUMENT,
    MODEL_OPTIONS,
    PLAN_OPTIONS,
    check_window_usage,
    plan_option,
    read_options,
    window_options,
)
from dapple_tf.commands.output import check_chart_path, check_folder_path, check_output_path
from dapple_tf.commands.run_file import NAME
from dapple_tf.commands.startup import start_tensorflow
from dapple_tf.commands.train_settings import TrainSettings, check_unfinished
from dapple_tf.errors import JobError, OutputError
from dapple_tf.launcher.restart import read_start
from dapple_tf.profiler.detect import job_rank, job_size


@command(short_help="Train a model over a pipeline.", former_names={"--compare": "--baseline"})
@MODEL_ARGUMENT
@MODEL_OPTIONS
@PLAN_OPTIONS
@window_options()
@cloup.option_group(
    "The run",
    cloup.option("--steps", default=100, show_default=True, help="How many steps to train; with --async, windows."),
    cloup.option(
        "--checkpoint-dir",
        type=FILE,
        help="Save checkpoints in this folder, and go on from the last one there. Ctrl-C saves one too.",
    ),
    cloup.option("--checkpoint-every", type=int, help="Steps between checkpoints (default: a tenth of all)."),
    plan_option("elastic", is_flag=True),
    plan_option("snapshot_every", type=int, metavar="STEPS"),
    cloup.option("--check-numerics", is_flag=True, help="Fail a step whose loss or gradients are NaN or infinite."),
    cloup.option(
        "--baseline",
        default=0,
        metavar="STEPS",
        help="Before the run, measure the speed of the model without a pipeline in this number of steps; with --async, "
        "in windows of as many minibatches one after the other.",
    ),
)
@result_options(
    cloup.option("--trace", type=FILE, help="Save the timeline of the last step as .png, .html or .json."),
    cloup.option(
        "--trace-steps",
        default=1,
        show_default=True,
        metavar="N",
        help="How many of the last steps a .json trace shows, up to 8.",
    ),
    cloup.option("--trace-ops", is_flag=True, help="Show in a .json trace also TensorFlow's ops inside each action."),
    cloup.option(
        "--record",
        type=FILE,
        help=f"Write the run's losses, times and plan to this file, for dapple report.  [default: {NAME} in "
        "--checkpoint-dir]",
    ),
    cloup.option(
        "--tensorboard", metavar="DIR", help="Write curves for TensorBoard to this folder: loss, bubble, stages."
    ),
)
def train(**options: Any) -> None:
    """Train MODEL (path.py:callable or package.module:callable) over a pipeline.

    Under mpirun or horovodrun every process trains its stages, and the first one prints and saves.
    """
    own = {field.name: options.pop(field.name) for field in fields(TrainSettings) if field.name in options}
    settings = TrainSettings(**own, options=given_options(click.get_current_context()))
    check_usage(settings)
    start = read_start()
    if settings.checkpoint_dir and (start is None or not start.number):
        check_unfinished(settings.checkpoint_dir, last_steps(settings.checkpoint_dir), settings.steps)
    if options["elastic"] and not settings.checkpoint_dir:
        raise click.UsageError("--elastic: a job that is started again goes on from checkpoints: give --checkpoint-dir")
    if options["snapshot_every"] is not None and not settings.checkpoint_dir:
        raise click.UsageError(
            "--snapshot-every: where two hosts are lost at once, a run goes on from checkpoints: give --checkpoint-dir"
        )
    check_window_usage(check_numerics=settings.check_numerics, **options)
    check_model_exists(options["model"])
    given = Options(**read_options(options))
    if not job_rank(os.environ):
        try:
            check_output_paths(settings)
        except OutputError as error:
            if start is None or not start.number:
                raise
            # The start before could write there: a full disk, or one that is away, may be back at the next.
            raise JobError(str(error)) from error
    start_tensorflow(options["devices"])
    from dapple_tf.commands.training_run import run_training

    run_training(settings, given, options)


def check_output_paths(settings: TrainSettings) -> None:
    """Raise OutputError for what cannot be written. Makes the folders of checkpoints and curves; rank 0 calls it."""
    check_chart_path("--trace", settings.trace)
    check_output_path("--record", settings.record)
    check_folder_path("--tensorboard", settings.tensorboard, "TensorBoard's events")
    check_folder_path("--checkpoint-dir", settings.checkpoint_dir, "checkpoints")


def given_options(context: click.Context) -> dict[str, str]:
    """Return the options that the command line gives, by their longest name, as text."""
    found = {}
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) == ParameterSource.COMMANDLINE and name in context.params
        if given and isinstance(parameter, click.Option):
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
    if settings.trace_ops and not (settings.trace or "").endswith(".json"):
        raise click.UsageError("--trace-ops: ops are recorded for a trace only: give --trace FILE.json too")
    if settings.trace and settings.check_numerics:
        raise click.UsageError(
            "--trace and --check-numerics: a step that records times cannot check its numbers; give one or the other"
        )
    if settings.baseline and job_size(os.environ) > 1:
        raise click.UsageError(
            "--baseline: the waiting processes of a job would disturb the timing; measure in one process"
        )
