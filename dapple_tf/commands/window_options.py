"""``--async`` and its options: training in asynchronous windows, and what contradicts them."""

from __future__ import annotations

from typing import Any

import click
import cloup

from dapple_tf.commands.command import Decorator
from dapple_tf.commands.options import plan_option
from dapple_tf.graph_passes.schedules.weight_versions import POLICIES
from dapple_tf.window_plan import USUAL_MINIBATCHES
from dapple_tf.wording import format_count


def window_options(*, hidden: bool = False) -> Decorator:
    """Return the options of asynchronous windows; ``hidden``: the command only says why it does not have them."""
    return cloup.option_group(
        "Asynchronous windows",
        cloup.option(
            "--async",
            "asynchronous",
            is_flag=True,
            help="Train asynchronously (PipeDream): every minibatch updates the weights, and the pipeline is not "
            "emptied in between. Each batch is then a window of minibatches: --batch-size gives its samples, --steps "
            "counts windows.",
        ),
        plan_option("minibatches", type=click.IntRange(1)),
        plan_option("weights", type=click.Choice(POLICIES)),
        plan_option("depth", type=click.IntRange(1)),
        hidden=hidden,
    )


def check_window_usage(
    *,
    asynchronous: bool,
    minibatches: int | None,
    weights: str | None,
    depth: int | None,
    micro_batches: str | None,
    schedule: str,
    slice: str | None,
    batch_norm: str | None,
    batch_size: int | None,
    plan: str | None,
    check_numerics: bool = False,
    **_: Any,
) -> None:
    """Raise UsageError, before TensorFlow starts, for options of windows without --async, or that contradict it."""
    if not asynchronous:
        for name, value in (("--minibatches", minibatches), ("--weights", weights), ("--depth", depth)):
            if value is not None:
                raise click.UsageError(f"{name} {value} is for asynchronous windows: give --async too, or leave it out")
        return
    for name, given, default in (("--schedule", schedule, "auto"), ("--slice", slice, None)):
        if given != default:
            raise click.UsageError(f"{name} {given} with --async: windows have an order of their own; leave it out")
    if batch_norm not in (None, "micro-batch"):
        raise click.UsageError(
            f"--batch-norm {batch_norm} with --async: batch norm takes the statistics of each minibatch; leave it out"
        )
    if check_numerics:
        raise click.UsageError(
            "--check-numerics with --async: a window changes variables after every minibatch, so it cannot leave them "
            "as they were. The losses of minibatches are in the result of --json; to find out why one is not finite, "
            "train on from the last checkpoint without --async"
        )
    if plan is None and micro_batches is not None and weights != "2bw":
        raise click.UsageError(
            f"--micro-batches {micro_batches} with --async: each minibatch runs whole, so give --minibatches only, or "
            "--weights 2bw, which cuts minibatches"
        )
    if plan is None and batch_size is not None:
        _check_batch_size(batch_size, minibatches or USUAL_MINIBATCHES, micro_batches)


def _check_batch_size(samples: int, minibatches: int, micro_batches: str | None) -> None:
    """Raise UsageError unless every minibatch, or every micro-batch of it, has a sample."""
    cut = int(micro_batches) if micro_batches is not None and micro_batches.isdecimal() else 1
    if samples < minibatches * cut:
        parts = format_count(minibatches, "minibatch") + (f" of {format_count(cut, 'micro-batch')}" if cut > 1 else "")
        raise click.UsageError(
            f"--batch-size {samples} is a window of {parts}, which need at least "
            f"{format_count(minibatches * cut, 'sample')}: give a larger --batch-size, or fewer --minibatches"
        )
